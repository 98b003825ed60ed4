"""How workers and guardians find the coordinator, and its successor.

this process has it         its own listener's port
torchrun                    rank 0 leaves the address in torchrun's TCPStore, under `parallel3d/coordinator`. Only
                            workers import torch, so each tells its guardian through a pipe
a launcher without a store  the coordinator itself listens at the master's address
it is lost                  guardians find the successor, and each tells its worker through a second pipe
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta

from parallel3d.elastic.guardian.launcher_env import LauncherEnv
from parallel3d.elastic.protocol.membership import Address
from parallel3d.errors import LaunchError

STORE_KEY = "parallel3d/coordinator"


class CoordinatorDiscovery:
    """Made before the forks: `find` and `tell` run in a worker, the rest in its guardian."""

    def __init__(self, *, env: LauncherEnv | None, listener: socket.socket | None, timeout_s: float):
        self._env = env
        self._listener = listener
        self._timeout_s = timeout_s
        self.pipe, self._address_writer = os.pipe()
        self._new_address_reader, self._new_address_writer = os.pipe()
        self.own_address: Address | None = ("127.0.0.1", listener.getsockname()[1]) if listener else None
        """Known at once where this process is the coordinator's."""

    def find(self) -> Address:
        """The coordinator's address; raises LaunchError."""
        if self._listener:
            self._listener.close()  # the guardian's alone: else the port would outlive it
        if self._env is not None and self._env.agent_store:
            return self._look_up(self._env)
        if self.own_address:
            return self.own_address
        assert self._env is not None
        return ("127.0.0.1" if self._is_one_host else self._env.master_addr), self._env.master_port

    def host_address(self) -> str:
        """This host's address as the workers of all hosts reach it: the loopback one where there is only one host."""
        if self._env is None or self._is_one_host:
            return "127.0.0.1"
        return _reachable_host(self._env)

    @property
    def _is_one_host(self) -> bool:
        """All ranks are here, where rank 0 listens at the loopback address, whatever name the host has."""
        return self._env is not None and self._env.local_world_size == self._env.world_size

    def report(self, address: Address) -> None:
        """Lets the guardian know where its worker has reached the coordinator."""
        os.write(self._address_writer, "{} {}\n".format(*address).encode())

    def await_new_address(self) -> Address | None:
        """Where the coordinator's successor is; None: there is none. Waits for the guardian's word."""
        if self._env is None:  # the coordinator was in the guardian's own process
            return None
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self._new_address_reader, 1)
        return _address_of(line)

    def close_worker_ends(self) -> None:
        """Keeps the workers as the pipe's only writers, so that it ends with them."""
        os.close(self._address_writer)
        os.close(self._new_address_reader)

    def send_new_address(self, address: Address | None) -> None:
        """Tells the worker where the successor is, or that there is none."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self._new_address_writer, "{} {}\n".format(*address).encode() if address else b"\n")

    def close(self) -> None:
        os.close(self.pipe)
        os.close(self._new_address_writer)

    def read_address(self) -> Address | None:
        """What a worker has found; None when all have ended without."""
        return _address_of(os.read(self.pipe, 4096))

    def _look_up(self, env: LauncherEnv) -> Address:
        from torch.distributed import TCPStore  # a guardian never gets here

        timeout = timedelta(seconds=self._timeout_s)
        try:
            store = TCPStore(env.master_addr, env.master_port, is_master=False, timeout=timeout, wait_for_workers=False)
            key = f"{STORE_KEY}/{env.attempt}"
            if self.own_address:
                store.set(key, f"{_reachable_host(env)} {self.own_address[1]}")
                return self.own_address
            host, _, port = store.get(key).decode().rpartition(" ")
        except RuntimeError as error:
            raise LaunchError(
                f"could not learn the coordinator's address from the launcher's store at "
                f"{env.master_addr}:{env.master_port} ({str(error).splitlines()[0]})"
            ) from None
        return host, int(port)


def _address_of(message: bytes) -> Address | None:
    host, _, port = message.decode().partition("\n")[0].rpartition(" ")
    return (host, int(port)) if host else None


def _reachable_host(env: LauncherEnv) -> str:
    """This host's address as other hosts reach it: that of its route to the master, or the master's own name."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((env.master_addr, env.master_port))  # sends nothing, picks a route
            host = probe.getsockname()[0]
    except OSError:  # the connection to the master will say so in better words
        return socket.gethostname()
    return env.master_addr if host.startswith("127.") else host
