"""Runs in threads with faults, and what they are compared with: the undisturbed run, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from parallel3d.config.schema import Config, FaultConfig
from parallel3d.elastic.protocol.survivability import check_survivability
from parallel3d.inprocess.harness import ElasticRunResult, run_elastic_in_threads
from parallel3d.parallel.grid import Grid
from parallel3d.trainer.context import RankContext, RankHooks
from parallel3d.trainer.plans import build_grid
from parallel3d.worker.fault_injection import FaultInjector
from tests.support import tiny_runs

LAYOUTS = {
    "pp2-dp2-tp2": dict(pp_size=2, dp_size=2, tp_size=2),
    "pp3-dp2": dict(pp_size=3, dp_size=2),
    "pp2-dp4": dict(pp_size=2, dp_size=4),
}
EARLY = ("load", "forward", "send", "backward", "reduce_scatter", "backup", "all_reduce")
LATE = ("update", "all_gather", "evaluate")
MAY_LEAVE_AN_ENTRY = ("all_reduce", *LATE)
BEFORE_GO = ("recovery_report", "recovery_moves", "recovery_confirm")
AFTER_GO = "recovery_groups"
MONITORED = ("perplexity", "loss_ratio", "fraction_clipped", "param_norm", "variance_norm", "variance_max")
"""Figures of a step's record that follow from folded state."""
STEP = 2
"""Faults happen here unless said otherwise; an evaluation follows this step."""


SCHEDULES = {
    "interleaved": dict(pp_size=2, dp_size=2, schedule="interleaved", virtual_stages=2),
    "interleaved-pp3": dict(pp_size=3, dp_size=2, schedule="interleaved", virtual_stages=2),
    "zb-h1": dict(pp_size=3, dp_size=2, schedule="zb-h1"),
}
SPARES = "dp3-tp2"
"""A layout in which two deaths can leave a range of state to a spare alone."""

TIED = {
    "tied-pp2-dp2-tp2": dict(pp_size=2, dp_size=2, tp_size=2),
    "tied-pp3-dp2": dict(pp_size=3, dp_size=2),
    "tied-stages-2-1-3": dict(pp_size=3, stage_replicas=[2, 1, 3]),
    "tied-pp2-dp4": dict(pp_size=2, dp_size=4),
    "tied-interleaved": dict(pp_size=2, dp_size=2, schedule="interleaved", virtual_stages=2),
}
"""One matrix on both ends of the pipeline: its state is cut over the replicas of both."""


MODELS = {
    "gpt2-pp2-dp2-tp2": (
        dict(architecture="gpt2", hidden_dropout=0.1),
        dict(pp_size=2, dp_size=2, tp_size=2, sequence_parallel=True),
    ),
    "mistral-pp2-dp2-tp2": (
        dict(architecture="mistral", num_key_value_heads=2, sliding_window=3),
        dict(pp_size=2, dp_size=2, tp_size=2),
    ),
    "copied-heads-dp2-tp4": (
        dict(num_attention_heads=4, num_key_value_heads=2),
        dict(dp_size=2, tp_size=4, sequence_parallel=True),
    ),
}
"""Other models, each with a layout."""

DOCUMENTS = {
    "documents-pp2-dp2-tp2": dict(pp_size=2, dp_size=2, tp_size=2, sequence_parallel=True),
    "documents-pp3-dp2": dict(pp_size=3, dp_size=2),
}
"""Layouts whose attention keeps documents apart: later stages are told where these begin."""

PRECISIONS = {
    **{f"{policy}-{layout}": (dict(policy=policy), layout) for policy in ("bf16", "bf16_sr") for layout in LAYOUTS},
    "bf16_sr-everywhere": (dict(policy="bf16_sr", stochastic_rounding=["accumulation", "outputs"]), "pp2-dp4"),
}
"""Other formats than fp64: what a range is made of differs, and where noise comes in."""


RECOMPUTED = {
    "recompute-full": dict(pp_size=2, dp_size=2, tp_size=2, sequence_parallel=True, recompute="full"),
    "recompute-selective": dict(pp_size=2, dp_size=2, tp_size=2, schedule="zb-h1", recompute="selective"),
}
"""Layouts that recompute layers, with dropout."""


BLENDS = {"blend-pp2-dp2-tp2": "pp2-dp2-tp2", "blend-pp2-dp4": "pp2-dp4"}
"""Layouts that read a blend, of which the weights change within step STEP."""


def config_of(layout: str, *, num_steps: int = 3, zero_stage: int = 1, zero_backups: int = 1) -> Config:
    """Three layers (or one a chunk), two sequences of four tokens a replica (of 64 where documents shall end within),
    evaluations after every second step.

    A run takes 0.1 s.
    """
    has_blend, layout = layout in BLENDS, BLENDS.get(layout, layout)
    precision, layout = PRECISIONS.get(layout, (dict(policy="fp64"), layout))
    layouts = {**LAYOUTS, **SCHEDULES, SPARES: dict(dp_size=3, tp_size=2)}
    others = MODELS | {name: (dict(hidden_dropout=0.1), sizes) for name, sizes in RECOMPUTED.items()}
    others |= {name: (dict(tie_word_embeddings=True), sizes) for name, sizes in TIED.items()}
    others |= {name: (dict(architecture="gpt2"), sizes) for name, sizes in DOCUMENTS.items()}
    model, sizes = others[layout] if layout in others else ({}, layouts[layout])
    num_replicas = sizes["dp_size"] if "dp_size" in sizes else max(sizes["stage_replicas"])
    num_layers = max(3, sizes.get("pp_size", 1) * sizes.get("virtual_stages", 1))
    shape = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=num_layers, num_attention_heads=2)
    return tiny_runs.make_config(
        model=shape | model,
        parallel=dict(bucket_mib=0.003, zero_stage=zero_stage, **sizes),
        batch=dict(
            global_batch_size=2 * num_replicas, micro_batch_size=1, sequence_length=64 if layout in DOCUMENTS else 4
        ),
        precision=dict(**precision, sums="exact"),
        run=dict(num_steps=num_steps, evaluate_every=2, evaluate_batches=1),
        elastic=dict(zero_backups=zero_backups),
        data=dict(
            document_mask=layout in DOCUMENTS,
            blend=tiny_runs.blend_from(3 * num_replicas * 4) if has_blend else None,
        ),
    )


def grid_of(layout: str) -> Grid:
    return build_grid(config_of(layout))


def kill_fault(rank: int, phase: str, step: int = STEP, kind: str = "kill") -> FaultConfig:
    return FaultConfig(rank=rank, phase=phase, step=step, kind=kind)


def phases_of(grid: Grid, rank: int) -> list[str]:
    """What a rank goes through in a step: only the first stage reads tokens."""
    return [phase for phase in (*EARLY, *LATE) if phase != "load" or grid.coordinates(rank).pp == 0]


def fault_hooks(injector: FaultInjector) -> RankHooks:
    """Hooks that show a fault injector every instruction and every phase."""
    return RankHooks(on_instruction=lambda step: injector.enter_instruction(step.op.value), phase_hook=injector)


def run(
    config: Config,
    faults: Sequence[FaultConfig] = (),
    *,
    watch: Callable[[int, RankContext], None] = lambda rank, runtime: None,
) -> ElasticRunResult:
    """The configuration in threads with these faults; `watch` may put its own ear to a rank."""
    grid = build_grid(config)

    def prepare(rank: int, phase_hook) -> RankContext:
        runtime = tiny_runs.prepare(config, grid, rank, hooks=fault_hooks(phase_hook))
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


@dataclass(frozen=True)
class Outcome:
    """What is left: the dead, the committed changes, whether it goes on."""

    dead: frozenset[int]
    num_changes: int
    goes_on: bool


def outcome_of(done: ElasticRunResult) -> Outcome:
    return Outcome(frozenset(done.dead), done.num_changes, not done.abort_reason)


def after(config: Config, *changes: Collection[int]) -> Outcome:
    """The outcome of deaths that are dealt with in this order, a set of ranks with each change."""
    grid, dead = build_grid(config), frozenset[int]()
    for number, ranks in enumerate(changes):
        dead |= frozenset(ranks)
        survivability = check_survivability(
            grid,
            zero_stage=config.parallel.zero_stage,
            zero_backups=config.elastic.zero_backups,
            hosts={},
            dead=ranks,
        )
        if not survivability.can_continue:
            return Outcome(dead, number, False)
        grid, _ = grid.without(ranks)
    return Outcome(dead, len(changes), True)
