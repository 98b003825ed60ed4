"""A run on GPUs that this host does not have is refused before anything is started."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest

from parallel3d.config.schema import BatchConfig, Config, ModelConfig, OptimizerConfig, RunConfig
from parallel3d.elastic.guardian import gpu_check
from parallel3d.elastic.guardian.gpu_check import check_gpus, count_gpus
from parallel3d.elastic.guardian.launcher_env import LauncherEnv
from parallel3d.errors import ConfigError

ENV = LauncherEnv(rank=0, local_rank=0, world_size=8, local_world_size=4, master_addr="10.0.0.1", master_port=1)


def config(device: str) -> Config:
    return Config(
        model=ModelConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2),
        batch=BatchConfig(micro_batch_size=1, sequence_length=4),
        optimizer=OptimizerConfig(learning_rate=1.0),
        run=RunConfig(num_steps=1, device=device),
    )


@pytest.mark.parametrize(
    ("device", "env", "num_gpus", "message"),
    [
        ("cuda", None, 0, "needs 8 GPUs, one for each worker of this host, and torch finds 0 here.*cpu or auto$"),
        ("cuda", None, 7, "needs 8 GPUs.*finds 7 here.*fewer workers"),
        ("cuda", None, 8, None),
        ("cuda", None, 1, "needs 8 GPUs"),
        ("cuda", ENV, 0, "needs 4 GPUs.*finds 0 here"),
        ("cuda", ENV, 1, None),  # the launcher may show each worker another one
        ("cuda", ENV, 3, "needs 4 GPUs.*finds 3 here"),
        ("cuda", ENV, 4, None),
        ("cuda", dataclasses.replace(ENV, local_world_size=None), 0, "needs a GPU, and torch finds 0 here"),
        ("cuda_shared", None, 0, "run.device = 'cuda_shared': needs a GPU"),
        ("cuda_shared", None, 1, None),
        ("cuda", None, None, None),
    ],
)
def test_which_hosts_are_refused(monkeypatch, device, env, num_gpus, message):
    monkeypatch.setattr(gpu_check, "count_gpus", lambda: num_gpus)
    if message is None:
        check_gpus(config(device), env, 8)
    else:
        with pytest.raises(ConfigError, match=message):
            check_gpus(config(device), env, 8)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_runs_that_can_do_without_gpus_do_not_wait_for_a_count(monkeypatch, device):
    monkeypatch.setattr(gpu_check, "count_gpus", lambda: pytest.fail("counted"))
    check_gpus(config(device), None, 8)


def test_the_count_is_that_of_torch_and_may_be_unknown(monkeypatch):
    for output, number in (("3\n", 3), ("", None), ("Traceback", None)):
        monkeypatch.setattr(subprocess, "run", lambda *a, out=output, **k: subprocess.CompletedProcess(a, 0, out, ""))
        assert count_gpus() == number
