"""How a command reaches a run: the coordinator's address stands in the run's folder, next to the run's secret.

The coordinator's process writes both, a successor its own address. A command connects, proves the secret, asks for one
thing (coordinator/operator_requests.py answers) and closes.
"""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel3d.elastic.drain_target import DrainTarget
from parallel3d.elastic.frames import CHUNK_BYTES, FrameReader, encode_frame
from parallel3d.elastic.guardian.launcher_env import LauncherEnv
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.elastic.protocol.membership import Address
from parallel3d.errors import LaunchError, ProtocolError
from parallel3d.handshake import connect_handshake

ADDRESS_FILE = ".coordinator"
ANSWER_S = 10.0
"""For each step of an exchange."""


def write_address(directory: Path, address: Address) -> None:
    """Writes where the coordinator of this run folder serves, in one piece."""
    new = directory / f"{ADDRESS_FILE}.new"
    new.write_text(json.dumps(address))
    new.replace(directory / ADDRESS_FILE)


def remove_address(directory: Path, address: Address) -> None:
    """Removes this coordinator's address: the run is over. That of another one, which has taken over, stays."""
    with contextlib.suppress(LaunchError):
        if read_address(directory) == address:
            (directory / ADDRESS_FILE).unlink(missing_ok=True)


def read_address(directory: Path) -> Address:
    """Returns where the coordinator of this run folder serves. Raises LaunchError."""
    try:
        host, port = json.loads((directory / ADDRESS_FILE).read_text())
    except FileNotFoundError:
        raise LaunchError(f"{directory}: no run goes on there; run.directory must name the folder of one") from None
    except (OSError, ValueError) as error:
        raise LaunchError(f"{directory / ADDRESS_FILE} can't be read: {error}") from None
    return str(host), int(port)


def ask(env: LauncherEnv, directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Sends the coordinator a request and returns its answer. Raises LaunchError."""
    reader, address, run_secret = FrameReader(), (env.master_addr, env.master_port), RunSecret(env, directory)
    try:
        with socket.create_connection(address, timeout=ANSWER_S) as connection:
            connect_handshake(connection, run_secret.read())
            hello = encode_frame({"op": "hello", "role": "operator"})
            connection.sendall(hello + encode_frame(request))  # bounded: by the socket's timeout
            while data := connection.recv(CHUNK_BYTES):  # bounded: by the socket's timeout
                for header, _ in reader.feed(data):
                    if header["op"] == "answer":
                        return header
    except (OSError, ProtocolError) as error:
        raise LaunchError(f"the run's coordinator at {address[0]}:{address[1]} does not answer ({error})") from None
    raise LaunchError(f"the run's coordinator at {address[0]}:{address[1]} refused the request")


def reserve_place(directory: Path, launcher: LauncherEnv | None, secret_words: str) -> LauncherEnv:
    """Returns the environment of one more worker of the run in `directory`, as if its launcher had started it: with a
    number from the coordinator. `launcher`: that of this process, if any. Raises LaunchError."""
    env = _guest_env(directory, secret_words)
    rank = int(ask(env, directory, {"op": "reserve_worker"})["rank"])
    local_rank, num_local = (launcher.local_rank, launcher.local_world_size or 1) if launcher else (0, 1)
    return replace(
        env,
        rank=rank,
        world_size=rank + 1 + num_local,  # other hosts have workers too
        local_rank=local_rank,
        local_world_size=num_local,
    )


def request_drain(directory: Path, target: DrainTarget, secret_words: str) -> str:
    """Asks the run in `directory` to let workers go; returns what leaves, and when. Raises LaunchError."""
    answer = ask(_guest_env(directory, secret_words), directory, {"op": "drain", "target": target.to_json()})
    if answer["refused"]:
        raise LaunchError(f"nothing leaves: {answer['text']}")
    return str(answer["text"])


def _guest_env(directory: Path, secret_words: str) -> LauncherEnv:
    """The environment of a process that the run in `directory` does not know yet. Raises LaunchError."""
    host, port = read_address(directory)
    return LauncherEnv(
        rank=1,  # any but the first, which makes the secret
        local_rank=0,
        world_size=2,
        local_world_size=1,
        master_addr=host,
        master_port=port,
        secret=secret_words,
        joins=True,
    )
