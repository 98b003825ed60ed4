"""What the launcher that started this process says: the one place that knows launchers' variables.

torchrun sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and hosts a TCPStore at that
address (TORCHELASTIC_USE_AGENT_STORE). DeepSpeed's launcher sets LOCAL_SIZE in place of LOCAL_WORLD_SIZE, puts
`--local_rank=N` before the user's arguments, and leaves the address for rank 0 to listen at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallel3d.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class LauncherEnv:
    """This process's place in a world that another launcher has started."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None
    """Ranks on this host; None: the launcher does not say."""
    master_addr: str
    master_port: int
    agent_store: bool = False
    """The launcher hosts a TCPStore at the master's address; else that port is free for rank 0."""
    attempt: int = 0
    """How often the launcher has restarted the world: keeps a restart from finding the last attempt's addresses."""


def read_launcher_env(variables: Mapping[str, str], *, local_rank: int | None = None) -> LauncherEnv | None:
    """The place that `variables` (os.environ) tell, None where no launcher is around; raises LaunchError."""
    if "RANK" not in variables:
        return None
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if missing:
        raise LaunchError(
            f"RANK is set but not {', '.join(missing)}: start with torchrun or another launcher that sets them, "
            "or unset RANK to let this process start the workers itself"
        )
    rank, world_size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise LaunchError(f"RANK = {rank} is outside of 0..{world_size - 1}: WORLD_SIZE = {world_size}")
    if "LOCAL_RANK" in variables:
        local_rank = _number(variables, "LOCAL_RANK")
    local_size_name = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in variables), None)
    return LauncherEnv(
        rank=rank,
        local_rank=rank if local_rank is None else local_rank,
        world_size=world_size,
        local_world_size=_number(variables, local_size_name) if local_size_name else None,
        master_addr=variables["MASTER_ADDR"],
        master_port=_number(variables, "MASTER_PORT"),
        agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        attempt=_number(variables, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in variables else 0,
    )


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise LaunchError(f"{name} = {variables[name]!r} is not a whole number") from None
