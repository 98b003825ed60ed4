"""Reads the launcher's environment variables: the one place that knows them.

The rank and world size come from the first of these that is set, since each may be started by one below it:

1. RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: torchrun, DeepSpeed, PyTorchJob, a user. torchrun hosts a TCPStore at
   that address (TORCHELASTIC_USE_AGENT_STORE). DeepSpeed sets LOCAL_SIZE in place of LOCAL_WORLD_SIZE, puts
   `--local_rank=N` before the user's arguments, and leaves the address for rank 0 to listen at, as all others do.
2. OMPI_COMM_WORLD_RANK and its like: Open MPI's mpirun.
3. PMI_RANK with MPI_LOCALRANKID: MPICH's and Intel's mpiexec (hydra).
4. SLURM_PROCID of a step with several tasks: srun. Not the shell of salloc nor the script of sbatch (slurm.py).
5. PMI_RANK alone: another launcher of that interface.

MASTER_ADDR and MASTER_PORT take precedence. Without them, rank 0's host is this one if all ranks are here, else the
first of SLURM's hosts, where srun puts rank 0 unless it is asked to distribute tasks differently
(SLURM_LAUNCH_NODE_IPADDR is where srun was called, which may be a login node); the port is derived from the job ID.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parallel3d.elastic.guardian.slurm import expand_counts, expand_hosts, first_of, is_task
from parallel3d.errors import LaunchError

SECRET_VARIABLE = "PARALLEL3D_SECRET"
"""The run's secret, if the user gives it (run_secret.py)."""
DEFAULT_PORT = 29500
FIRST_PORT, NUM_PORTS = 10_000, 20_000
"""Below the usual range of ephemeral ports."""

Variables = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class LauncherEnv:
    """This process's rank in a world that another launcher has started."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None
    """Ranks on this host; None: unknown."""
    master_addr: str
    master_port: int
    agent_store: bool = False
    """The launcher hosts a TCPStore at the master's address; otherwise that port is free for rank 0."""
    attempt: int = 0
    """How often the launcher has restarted the world; keeps a restart from finding the last attempt's addresses."""
    secret: str = ""
    """The words from which the run's secret is made, if the user gives any."""
    joins: bool = False
    """This process joins the run by a command, and leaves it with its worker."""
    run_id: str = ""
    """The launcher's name of the run, the same after a restart."""


@dataclass(frozen=True, kw_only=True)
class _Launcher:
    """The variables of one launcher; of several names the first that is set counts."""

    is_here: Callable[[Variables], bool]
    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    local_world_size: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
    """Lists of the job's hosts, rank 0's first."""
    job: tuple[str, ...] = ()
    """Variables that are equal on all ranks of this world, and differ from any other world's on these hosts."""


_STANDARD_LAUNCHER = _Launcher(
    is_here=lambda variables: "RANK" in variables,
    rank="RANK",
    world_size=("WORLD_SIZE",),
    local_rank="LOCAL_RANK",
    local_world_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
)
_LAUNCHERS = (
    _STANDARD_LAUNCHER,
    _Launcher(
        is_here=lambda variables: "OMPI_COMM_WORLD_RANK" in variables,
        rank="OMPI_COMM_WORLD_RANK",
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"),
    ),
    _Launcher(
        is_here=lambda variables: "PMI_RANK" in variables and "MPI_LOCALRANKID" in variables,
        rank="PMI_RANK",
        world_size=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_world_size=("MPI_LOCALNRANKS",),
        job=("SLURM_JOB_ID",),
    ),
    _Launcher(
        is_here=is_task,
        rank="SLURM_PROCID",
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        job=("SLURM_JOB_ID",),
    ),
    _Launcher(
        is_here=lambda variables: "PMI_RANK" in variables,
        rank="PMI_RANK",
        world_size=("PMI_SIZE",),
        local_rank="PMI_LOCAL_RANK",
        local_world_size=("PMI_LOCAL_SIZE",),
    ),
)


def read_launcher_env(variables: Variables, *, local_rank: int | None = None) -> LauncherEnv | None:
    """Reads `variables` (os.environ); returns None without a launcher, raises LaunchError if they are inconsistent.

    `local_rank` is the command line's, for a launcher that does not set the variable.
    """
    launcher = next((each for each in _LAUNCHERS if each.is_here(variables)), None)
    if launcher is None:
        return None
    needed = [launcher.world_size, *([("MASTER_ADDR",), ("MASTER_PORT",)] if launcher is _STANDARD_LAUNCHER else [])]
    if missing := [names[0] for names in needed if not first_of(variables, *names)]:
        raise LaunchError(
            f"{launcher.rank} is set but not {', '.join(missing)}: start with torchrun or another launcher that sets "
            f"them, or unset {launcher.rank} to let this process start the workers itself"
        )
    rank, world_size = _number(variables, launcher.rank), _number(variables, *launcher.world_size)
    if not 0 <= rank < world_size:
        size_name = next(name for name in launcher.world_size if variables.get(name))
        raise LaunchError(f"{launcher.rank} = {rank}: must be in 0..{world_size - 1}, since {size_name} = {world_size}")
    if launcher.local_rank in variables:
        local_rank = _number(variables, launcher.local_rank)
    local_world_size = _local_world_size(variables, launcher, world_size)
    return LauncherEnv(
        rank=rank,
        local_rank=rank if local_rank is None else local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=_master_addr(variables, launcher, is_one_host=local_world_size == world_size),
        master_port=_master_port(variables, launcher),
        agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        secret=variables.get(SECRET_VARIABLE, ""),
        run_id=variables.get("TORCHELASTIC_RUN_ID", ""),
        attempt=_number(variables, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in variables else 0,
    )


def _local_world_size(variables: Variables, launcher: _Launcher, world_size: int) -> int | None:
    if first_of(variables, *launcher.local_world_size):
        return _number(variables, *launcher.local_world_size)
    if launcher.rank != "SLURM_PROCID":
        return None
    try:
        counts = expand_counts(first_of(variables, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
        return counts[int(variables.get("SLURM_NODEID", ""))] if len(counts) > 1 else counts[0]
    except (ValueError, IndexError):
        is_one_host = first_of(variables, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") == "1"
        return world_size if is_one_host else None


def _master_addr(variables: Variables, launcher: _Launcher, *, is_one_host: bool) -> str:
    """Rank 0's host."""
    if address := variables.get("MASTER_ADDR"):
        return address
    if is_one_host:
        return "127.0.0.1"
    hosts = first_of(variables, *launcher.hosts)
    try:
        return expand_hosts(hosts)[0]
    except ValueError as error:
        why = str(error) if hosts else "the launcher does not set it"
        raise LaunchError(f"the host of rank 0 is unknown ({why}): set MASTER_ADDR to it") from None


def _master_port(variables: Variables, launcher: _Launcher) -> int:
    """Returns the same port on every rank."""
    if variables.get("MASTER_PORT"):
        return _number(variables, "MASTER_PORT")
    job = first_of(variables, *launcher.job)
    if not job:
        return DEFAULT_PORT
    step = variables.get("SLURM_STEP_ID", "") if launcher.rank == "SLURM_PROCID" else ""
    return FIRST_PORT + zlib.crc32(f"{job}.{step}".encode()) % NUM_PORTS


def _number(variables: Variables, *names: str) -> int:
    name = next((name for name in names if variables.get(name)), names[0])
    try:
        return int(variables[name])
    except ValueError:
        raise LaunchError(f"{name} = {variables[name]!r}: must be a whole number") from None
