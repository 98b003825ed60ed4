"""A stranger at every port that a run opens changes nothing: the run ends like an undisturbed one."""

import contextlib
import os
import random
import socket
import struct
from pathlib import Path

import pytest

from parallel3d.elastic.frame_schemas import FRAMES
from parallel3d.elastic.frames import encode_frame
from parallel3d.handshake import NONCE_BYTES, REQUEST
from tests.support.launch_runs import children_of, finish, metrics, start, wait_for_step

LISTENING = "0A"
UNDISTURBED = ("run.num_steps=40",)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4")
OPS = sorted({op for frames in FRAMES.values() for op in frames} | {"hello"})
FIELDS = {"role": "guardian", "ranks": [0, 1, 2, 3], "host": "x", "signal": 15, "at_once": True, "generation": 1}
WORDS = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"",
    struct.pack(">II", 2**32 - 1, 2**32 - 1),
    REQUEST + bytes(NONCE_BYTES) + bytes(32),
    random.Random(1).randbytes(4096),
    *(encode_frame({"op": op, **FIELDS}) for op in OPS),
)


def losses(run):
    return [line["loss"] for line in metrics(run)]


def listening_ports(pids) -> set[int]:
    """The TCP ports at which these processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in inodes}


def descendants_of(pid) -> list[int]:
    return [found for child in children_of(pid) for found in (child, *descendants_of(child))]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.sample(0, rest=2)
@pytest.mark.parametrize(
    ("launcher", "exchange"), [((), "auto"), ((), "gloo"), (TORCHRUN, "auto")], ids=["plain", "gloo", "torchrun"]
)
def test_a_stranger_at_every_port(config_file, tmp_path, undisturbed, launcher, exchange):
    process = start("--config", config_file, *UNDISTURBED, f"run.exchange={exchange}", launcher=launcher)
    wait_for_step(tmp_path / "run", 2)
    of_torchrun = listening_ports([process.pid]) if launcher else set()  # that of its store
    ports = listening_ports([process.pid, *descendants_of(process.pid)]) - of_torchrun
    assert len(ports) >= 5  # the coordinator's, and one of each worker's links
    with contextlib.ExitStack() as stack:
        for port in sorted(ports):
            for words in WORDS:
                with contextlib.suppress(OSError):
                    stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
                    stranger.sendall(words)
        code, out, err = finish(process)
    assert code == 0 and "Traceback" not in out + err, out + err
    assert "did not prove the run's secret, the last from 127.0.0.1" in out
    assert losses(tmp_path / "run") == undisturbed(config_file)
