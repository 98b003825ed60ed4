from __future__ import annotations

from pathlib import Path

import pytest

from parallel3d.elastic.guardian.discovery import CoordinatorDiscovery
from parallel3d.elastic.guardian.launcher_env import LauncherEnv, read_launcher_env
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.errors import LaunchError

DEEPSPEED = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_no_launcher():
    assert read_launcher_env({"WORLD_SIZE": "8", "MASTER_PORT": "1"}) is None


def test_torchrun():
    torchrun = {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert read_launcher_env({**DEEPSPEED, **torchrun}) == LauncherEnv(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        master_addr="node0",
        master_port=29500,
        agent_store=True,
        attempt=2,
    )


def test_deepspeed_does_not_set_local_world_size():
    env = read_launcher_env(DEEPSPEED)
    assert env is not None and env.local_world_size is None and not env.agent_store
    env = read_launcher_env({**DEEPSPEED, "LOCAL_SIZE": "2"})
    assert env is not None and env.local_world_size == 2


def test_the_local_rank_argument_serves_where_the_variable_is_missing():
    variables = {name: value for name, value in DEEPSPEED.items() if name != "LOCAL_RANK"}
    assert read_launcher_env(variables, local_rank=1).local_rank == 1
    assert read_launcher_env(variables).local_rank == 3
    assert read_launcher_env(DEEPSPEED, local_rank=0).local_rank == 1


@pytest.mark.parametrize(
    "change, named",
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT = 'http'"),
        ({"RANK": "4"}, "RANK = 4"),
        ({"RANK": "one"}, "RANK = 'one'"),
    ],
)
def test_a_broken_variable_is_named(change, named):
    with pytest.raises(LaunchError, match=named):
        read_launcher_env({**DEEPSPEED, **change})


SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[03-06]",
    "SLURM_JOB_NODELIST": "node[01-06]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node01-4242@1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def test_srun():
    env = read_launcher_env(SLURM)
    assert env is not None and 10_000 <= env.master_port < 30_000
    assert env == LauncherEnv(
        rank=5, local_rank=1, world_size=7, local_world_size=2, master_addr="node03", master_port=env.master_port
    )
    last = read_launcher_env({**SLURM, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"})
    assert last is not None and last.local_world_size == 1
    assert (last.master_addr, last.master_port) == (env.master_addr, env.master_port)
    assert read_launcher_env({**SLURM, "SLURM_STEP_ID": "1"}).master_port != env.master_port
    given = read_launcher_env({**SLURM, "MASTER_ADDR": "other", "MASTER_PORT": "9"})
    assert (given.master_addr, given.master_port) == ("other", 9)


def test_srun_on_one_host():
    here = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node04"}
    env = read_launcher_env(here)
    assert env.local_world_size == 7 and env.master_addr == "127.0.0.1"
    without = {name: value for name, value in here.items() if name != "SLURM_STEP_TASKS_PER_NODE"}
    assert read_launcher_env({**without, "SLURM_STEP_NUM_NODES": "1"}).local_world_size == 7
    assert read_launcher_env(without).local_world_size is None


def test_inside_an_allocation_but_no_task():
    assert read_launcher_env({**SLURM, "SLURM_STEP_ID": "4294967290"}) is None
    assert read_launcher_env({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}) is None


def test_open_mpi():
    env = read_launcher_env(OPEN_MPI)
    assert (env.rank, env.local_rank, env.world_size, env.local_world_size) == (3, 3, 4, 4)
    assert env.master_addr == "127.0.0.1" and not env.agent_store
    other = read_launcher_env({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-node01-4243@1"})
    assert other.master_port != env.master_port
    spread = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(LaunchError, match="set MASTER_ADDR"):
        read_launcher_env(spread)
    with pytest.raises(LaunchError, match="node\\[1"):
        read_launcher_env({**spread, "SLURM_JOB_NODELIST": "node[1"})
    assert read_launcher_env({**spread, "MASTER_ADDR": "node01"}).master_addr == "node01"


def test_mpich():
    env = read_launcher_env({**HYDRA, "MASTER_ADDR": "node01"})
    assert (env.rank, env.local_rank, env.world_size, env.local_world_size) == (2, 0, 4, 2)
    assert env.master_port == 29500


def test_the_innermost_launcher_counts():
    """torchrun under srun, mpirun or mpiexec whose daemons srun started on other hosts, srun --mpi=pmi2."""
    assert read_launcher_env({**SLURM, **OPEN_MPI, **HYDRA, **DEEPSPEED}).rank == 3
    mpirun = read_launcher_env({**SLURM, **OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert (mpirun.rank, mpirun.world_size, mpirun.master_addr) == (3, 4, "node01")
    mpiexec = read_launcher_env({**SLURM, **HYDRA})
    assert (mpiexec.rank, mpiexec.world_size, mpiexec.master_addr) == (2, 4, "node01")
    pmi2 = read_launcher_env({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"})
    assert (pmi2.rank, pmi2.local_rank, pmi2.master_addr) == (5, 1, "node03")


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({**SLURM, "SLURM_STEP_NODELIST": "node[", "SLURM_JOB_NODELIST": ""}, "set MASTER_ADDR"),
        ({**SLURM, "SLURM_PROCID": "7"}, "SLURM_PROCID = 7: must be in 0..6, since SLURM_STEP_NUM_TASKS = 7"),
        ({**SLURM, "SLURM_LOCALID": "x"}, "SLURM_LOCALID = 'x'"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_RANK is set but not OMPI_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "set MASTER_ADDR"),
    ],
)
def test_a_broken_variable_of_slurm_or_mpi_is_named(variables, named):
    with pytest.raises(LaunchError, match=named):
        read_launcher_env(variables)


def test_on_one_host_the_coordinator_is_at_the_loopback_address():
    """Where it listens, whatever name MASTER_ADDR has for this host."""
    env = {**OPEN_MPI, "MASTER_ADDR": "node01", "MASTER_PORT": "4242"}
    for variables, address in ((env, "127.0.0.1"), ({**env, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "node01")):
        env_read = read_launcher_env(variables)
        run_secret = RunSecret(env_read, Path())
        discovery = CoordinatorDiscovery(env=env_read, known_address=None, run_secret=run_secret, timeout_s=1.0)
        assert discovery.address == (address, 4242) and discovery.look_up() is None
