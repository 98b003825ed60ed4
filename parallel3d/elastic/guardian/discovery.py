"""Coordinator discovery: how workers and guardians find the coordinator, and its successor.

a coordinator on this host    the port of the listener that the stub has opened
torchrun                      rank 0 puts the address and the run's secret into torchrun's TCPStore, under
                              `parallel3d/coordinator`. Only workers import torch, so each sends both to its guardian
                              through a pipe
a launcher without a store    the coordinator listens at the master's address
failover                      guardians find the successor, and each sends its address to its workers, each through
                              a pipe of its own
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from datetime import timedelta

from parallel3d.elastic.guardian.launcher_env import LauncherEnv
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.elastic.protocol.membership import Address
from parallel3d.errors import LaunchError

STORE_KEY = "parallel3d/coordinator"
LOOPBACK = "127.0.0.1"


class CoordinatorDiscovery:
    """Created before the forks. A worker calls `find`, `report` and `await_new_address`, its guardian the rest."""

    def __init__(
        self,
        *,
        env: LauncherEnv | None,
        known_address: Address | None,
        ranks: Sequence[int],
        run_secret: RunSecret,
        timeout_s: float,
    ):
        self.run_secret = run_secret
        self._env = env
        self._timeout_s = timeout_s
        self.pipe, self._address_writer = os.pipe()
        self._new_address_pipes = {rank: os.pipe() for rank in ranks}
        """By worker: the ends to read and to write."""
        self.known_address = known_address
        """The coordinator's, if it need not be found: it is on this host, or another guardian has found it."""

    def find(self) -> Address:
        """Returns the coordinator's address; raises LaunchError."""
        if self._env is not None and self._env.agent_store:
            return self._look_up(self._env)
        address = self.known_address or address_of_first_coordinator(self._env)
        assert address is not None
        return address

    def report(self, address: Address) -> None:
        """Sends the guardian the address at which its worker has reached the coordinator, and the secret that it proved
        there."""
        secret = self.run_secret.read()
        self.run_secret.set(secret)
        if self.known_address is None:
            os.write(self._address_writer, "{} {} {}\n".format(*address, secret.hex()).encode())

    def await_new_address(self, rank: int) -> Address | None:
        """Waits in worker `rank` for the guardian to send the successor's address; returns None without one."""
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self._new_address_pipes[rank][0], 1)
        return _address_of(line)

    def close_worker_ends(self) -> None:
        """Leaves the workers as the pipe's only writers, so that it ends with them."""
        os.close(self._address_writer)
        for reader, _ in self._new_address_pipes.values():
            os.close(reader)

    def send_new_address(self, address: Address | None) -> None:
        """Sends the workers the successor's address, or None without a successor."""
        for _, writer in self._new_address_pipes.values():
            with contextlib.suppress(BrokenPipeError):  # the worker has ended
                os.write(writer, "{} {}\n".format(*address).encode() if address else b"\n")

    def close(self) -> None:
        os.close(self.pipe)
        for _, writer in self._new_address_pipes.values():
            os.close(writer)

    def read_address(self) -> Address | None:
        """Returns the address that a worker has reported; None if all have ended without a report."""
        message, _, secret = os.read(self.pipe, 4096).decode().partition("\n")[0].rpartition(" ")
        if not message:
            return None
        self.run_secret.set(bytes.fromhex(secret))
        return _address_of(message.encode())

    def _look_up(self, env: LauncherEnv) -> Address:
        from torch.distributed import TCPStore  # only in workers

        timeout = timedelta(seconds=self._timeout_s)
        try:
            store = TCPStore(env.master_addr, env.master_port, is_master=False, timeout=timeout, wait_for_workers=False)
            key = f"{STORE_KEY}/{env.attempt}"
            if self.known_address:
                own_port, secret = self.known_address[1], self.run_secret.read()
                store.set(key, f"{_reachable_host(env)} {own_port} {secret.hex()}")
                return self.known_address
            host, port, secret_hex = store.get(key).decode().rsplit(" ", 2)
        except RuntimeError as error:
            raise LaunchError(
                f"could not get the coordinator's address from the launcher's store at "
                f"{env.master_addr}:{env.master_port} ({str(error).splitlines()[0]})"
            ) from None
        self.run_secret.set(bytes.fromhex(secret_hex))
        return host, int(port)


def _address_of(message: bytes) -> Address | None:
    host, _, port = message.decode().partition("\n")[0].rpartition(" ")
    return (host, int(port)) if host else None


def host_address(env: LauncherEnv | None) -> str:
    """Returns this host's address as all workers reach it; the loopback address if there is only one host."""
    return LOOPBACK if env is None or is_one_host(env) else _reachable_host(env)


def address_of_first_coordinator(env: LauncherEnv | None) -> Address | None:
    """Returns the address at which a run's first coordinator serves, if the launcher's environment names it."""
    if env is None or env.agent_store:
        return None
    return (LOOPBACK if is_one_host(env) else env.master_addr), env.master_port


def is_one_host(env: LauncherEnv | None) -> bool:
    """True if all ranks are known to be on this host; then nothing of a run can be reached from another one."""
    return env is None or env.local_world_size == env.world_size


def listening_host(env: LauncherEnv | None) -> str:
    """Returns the address of the interface at which a coordinator on this host listens; "" if it can't be known: all.

    That is the interface of the route to the master: the one that the hosts use.
    """
    if env is None or is_one_host(env):
        return LOOPBACK
    route = _route_address(env)
    if not route.startswith("127."):
        return route
    is_loopback = env.master_addr == "localhost" or env.master_addr.startswith("127.")  # hosts in name only
    return env.master_addr if is_loopback else ""  # a host's own name often stands for its loopback address


def local_address(listener: socket.socket) -> Address:
    """Returns where this host reaches its own listener."""
    host, port = listener.getsockname()
    return (LOOPBACK if host == "0.0.0.0" else host), port


def _reachable_host(env: LauncherEnv) -> str:
    """Returns this host's address as other hosts reach it: that of its route to the master, or the master's name."""
    route = _route_address(env)
    if not route:  # connecting to the master will fail with a better message
        return socket.gethostname()
    return env.master_addr if route.startswith("127.") else route


def _route_address(env: LauncherEnv) -> str:
    """This host's address on its route to the master; "" without a route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((env.master_addr, env.master_port))  # sends nothing, picks a route
            return probe.getsockname()[0]
    except OSError:
        return ""
