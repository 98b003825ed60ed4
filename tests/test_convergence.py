"""The convergence benchmark's table and one run of three steps; the variants of the updates benchmark."""

from __future__ import annotations

import pytest

from benchmarks.convergence import POLICIES, Result, run, table
from benchmarks.updates import make_variants
from parallel3d.precision.policy import POLICIES as ROWS


def result(final: float | None, evaluation: float | None) -> Result:
    return Result(final_loss=final, evaluation_loss=evaluation, num_updates=3, step_s=0.2)


def test_the_table_has_means_spreads_and_distances_seed_by_seed():
    lines = table(
        {"fp32": [result(2.0, 3.0), result(4.0, 3.5)], "bf16_pure": [result(2.5, 3.25), result(None, None)]}
    ).splitlines()
    assert lines[2] == "| fp32 | 3.0000 | 2.0000 | +0.0000 +0.0000 | 3.2500 | +0.0000 +0.0000 | 200 |"
    assert (
        lines[3]
        == "| bf16_pure | 2.5000 (1 not finite) | 0.0000 | +0.5000 - | 3.2500 (1 not finite) | +0.2500 - | 200 |"
    )


def test_it_compares_policies_that_there_are():
    assert set(POLICIES) <= ROWS.keys()


@pytest.mark.full
@pytest.mark.slow
def test_a_run_of_three_steps():
    small = ["model.hidden_size=12", "model.intermediate_size=16", "run.evaluate_batches=1"]
    done = run("bf16_sr", 1, 3, small)
    assert done.num_updates == 3 and done.final_loss is not None and done.evaluation_loss is not None


def test_every_update_that_is_timed_is_one():
    for update in make_variants(1000).values():
        update()
