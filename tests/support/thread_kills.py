"""Runs in threads in which ranks die, compared bit for bit with the undisturbed run.

Ranks are threads with the real trainer, the coordinator's real protocol and exact sums: whatever the faults, losses,
gradients, weights and evaluations are those of the undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch

from parallel3d.config.schema import Config, FaultConfig
from parallel3d.inprocess.harness import ElasticRunResult, run_elastic_in_threads
from parallel3d.trainer.context import RankContext, RankHooks
from parallel3d.trainer.plans import build_grid
from parallel3d.worker.fault_injection import FaultInjector
from tests.support import tiny_runs
from tests.support.kill_cells import KillCell, Outcome, possible_outcomes
from tests.support.kill_layouts import config_of

MONITORED = ("perplexity", "loss_ratio", "fraction_clipped", "param_norm", "variance_norm", "variance_max")
"""Figures of a step's record that follow from applied state."""


def fault_hooks(injector: FaultInjector, config: Config) -> RankHooks:
    """Hooks that show a fault injector every instruction and every phase. Where routes follow the speeds, a compute
    takes a second, or a slow one's."""
    injector.sleep = lambda seconds: None
    return RankHooks(
        on_instruction=lambda step: injector.enter_instruction(step.op.value),
        compute_hook=(lambda seconds: injector.slow_down(1.0)) if config.elastic.balance else (lambda seconds: seconds),
        slowness=injector.slowness,
        phase_hook=injector,
    )


def run(
    config: Config,
    faults: Sequence[FaultConfig] = (),
    *,
    watch: Callable[[int, RankContext], None] = lambda rank, runtime: None,
) -> ElasticRunResult:
    """Runs the configuration in threads with these faults; `watch` may add its own hooks to a rank."""
    grid = build_grid(config)

    def prepare(rank: int, phase_hook) -> RankContext:
        runtime = tiny_runs.prepare(config, grid, rank, hooks=fault_hooks(phase_hook, config))
        watch(rank, runtime)
        return runtime

    return run_elastic_in_threads(config, prepare, faults)


@cache
def undisturbed(layout: str, num_steps: int = 3) -> ElasticRunResult:
    return run(config_of(layout, num_steps=num_steps))


def assert_same_run(ours: ElasticRunResult, theirs: ElasticRunResult, *, gradients: bool = True) -> None:
    """Bitwise: every step's record, the last evaluation, gradients and weights (of all replicas: `assemble`).

    `gradients` False for a change after the last step's entry: ranges that have moved are without them.
    """
    assert not ours.abort_reason and ours.run is not None and theirs.run is not None
    assert ours.steps.keys() == theirs.steps.keys()
    for step, record in theirs.steps.items():
        for name in ("loss", "grad_norm", "lr", "tokens", "num_updates", *MONITORED):
            assert ours.steps[step].get(name) == record.get(name), f"{name} of step {step}"  # step 1 has no loss ratio
    assert ours.num_tokens == theirs.num_tokens
    assert ours.run.evaluation == theirs.run.evaluation
    entries = [[replace(entry, leave=False) for entry in each.run.entries] for each in (ours, theirs)]
    assert entries[0] == entries[1]
    for what in ("weights", "gradients") if gradients else ("weights",):
        mine, yours = getattr(ours.run, what), getattr(theirs.run, what)
        assert mine.keys() == yours.keys()
        assert [name for name in yours if not torch.equal(mine[name], yours[name])] == []


def outcome_of(done: ElasticRunResult) -> Outcome:
    return Outcome(frozenset(done.dead), done.num_changes, not done.abort_reason)


def check_cell(cell: KillCell) -> ElasticRunResult:
    """Runs a cell: it must end in an allowed way, and a run that goes on must be the undisturbed run bit for bit."""
    done = run(cell.config, cell.faults)
    expected = possible_outcomes(cell.config, cell.faults)
    assert outcome_of(done) in expected, expected
    if done.abort_reason:
        assert "no replica left" in done.abort_reason or "no holder left" in done.abort_reason
    else:
        assert_same_run(done, undisturbed(cell.layout, cell.num_steps))
    return done
