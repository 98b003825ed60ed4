"""Trains the update rule of ademamix.py where its file is in the folder of update rules (test_toy_update_rule.py).

Every run must have the same bits as one process: on other layouts, through a death, and through a resume on another
layout.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from parallel3d.errors import ConfigError
from tests.support import tiny_runs
from tests.support.kill_cells import Outcome, kill_fault
from tests.support.saved_layouts import assert_equal, read_all, run_layout, save
from tests.support.thread_kills import assert_same_run, outcome_of, run

LAYOUTS = {
    "fp32": (dict(dp_size=3), dict(pp_size=2, stage_replicas=[1, 2])),
    "bf16_sr": (dict(dp_size=2, zero_stage=0),),
}
"""By precision policy."""


def sections(policy: str = "fp32", **parallel: object) -> dict[str, dict[str, object]]:
    return dict(
        parallel=parallel,
        optimizer=dict(kind="ademamix", alpha=4.0, beta3=0.99),
        precision=dict(policy=policy, sums="exact"),
        elastic=dict(zero_backups=1),
    )


def check_settings() -> None:
    optimizer = tiny_runs.make_config(**sections()).optimizer
    assert optimizer.settings == dict(beta1=0.9, beta2=0.999, beta3=0.99, alpha=4.0, eps=1e-8)
    try:
        tiny_runs.make_config(optimizer=dict(kind="lion", alpha=4.0))
    except ConfigError as error:
        assert "optimizer.alpha = 4.0: is not a setting of optimizer.kind lion" in str(error)
    else:
        raise AssertionError("lion has no alpha")


def check_layouts() -> None:
    for policy, layouts in LAYOUTS.items():
        one = tiny_runs.train_in_threads(**sections(policy))
        assert one.entries[-1].loss < one.entries[0].loss, policy
        for layout in layouts:
            many = tiny_runs.train_in_threads(**sections(policy, **layout))
            assert many.entries == one.entries, (policy, layout)
            assert all(torch.equal(many.weights[key], weight) for key, weight in one.weights.items()), (policy, layout)


def check_death() -> None:
    config = tiny_runs.make_config(
        **{**sections(dp_size=3), "elastic": dict(enabled=True, zero_backups=1)}, run=dict(evaluate_every=2)
    )
    disturbed = run(config, [kill_fault(1, "update")])
    assert outcome_of(disturbed) == Outcome(frozenset({1}), 1, True)
    assert_same_run(disturbed, run(config, []))


def check_resume() -> None:
    before, after = (
        tiny_runs.make_config(**sections("bf16", **layout)) for layout in (dict(pp_size=2, dp_size=2), dict(dp_size=3))
    )
    _, snapshots, runtimes = run_layout(before, steps=1)
    with tempfile.TemporaryDirectory() as folder:
        saved = save(Path(folder), snapshots, runtimes[0])
        assert {kind for kind, _ in read_all(saved)} == {"weight", "moment1", "moment2", "slow_moment"}
        resumed, _, _ = run_layout(after, start=saved, steps=1)
    whole, _, _ = run_layout(before, steps=2)
    assert_equal(resumed, whole)


if __name__ == "__main__":
    for check in (check_settings, check_layouts, check_death, check_resume):
        check()
        print(check.__name__, "passed")
