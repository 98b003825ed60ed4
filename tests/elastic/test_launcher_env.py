from __future__ import annotations

import pytest

from parallel3d.elastic.launcher_env import LauncherEnv, read_launcher_env
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
