"""Coordinator discovery: how guardians find the coordinator that a run begins with.

a coordinator on this host    the port of the listener that the stub has opened
a launcher without a store    the coordinator listens at the master's address
torchrun                      rank 0 puts the address and the run's secret into torchrun's TCPStore, under
                              `parallel3d/coordinator`. Only workers import torch, so each sends both to its guardian
"""

from __future__ import annotations

import socket
from datetime import timedelta

from parallel3d.elastic.guardian.launcher_env import LauncherEnv
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.elastic.protocol.membership import Address
from parallel3d.errors import LaunchError

STORE_KEY = "parallel3d/coordinator"
LOOPBACK = "127.0.0.1"


class CoordinatorDiscovery:
    """Created before the forks. `known_address`: that of the coordinator on this host."""

    def __init__(
        self, *, env: LauncherEnv | None, known_address: Address | None, run_secret: RunSecret, timeout_s: float
    ):
        self.run_secret = run_secret
        self.address = known_address or address_of_first_coordinator(env)
        """The coordinator's, if it need not be looked up."""
        self._env = env
        self._known_address = known_address
        self._timeout_s = timeout_s

    def look_up(self) -> Address | None:
        """Meets the others at the launcher's store, in a worker: puts the address there, or returns what it finds;
        None without a store. Raises LaunchError."""
        return self._look_up(self._env) if self._env is not None and self._env.agent_store else None

    def _look_up(self, env: LauncherEnv) -> Address:
        from torch.distributed import TCPStore  # only in workers

        timeout = timedelta(seconds=self._timeout_s)
        try:
            store = TCPStore(env.master_addr, env.master_port, is_master=False, timeout=timeout, wait_for_workers=False)
            key = f"{STORE_KEY}/{env.attempt}"
            if self._known_address:
                own_port, secret = self._known_address[1], self.run_secret.read()
                store.set(key, f"{_reachable_host(env)} {own_port} {secret.hex()}")
                return self._known_address
            host, port, secret_hex = store.get(key).decode().rsplit(" ", 2)
        except RuntimeError as error:
            raise LaunchError(
                f"could not get the coordinator's address from the launcher's store at "
                f"{env.master_addr}:{env.master_port} ({str(error).splitlines()[0]})"
            ) from None
        self.run_secret.set(bytes.fromhex(secret_hex))
        return host, int(port)


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
