"""Spares move to another stage, and workers, replicas and hosts leave on request: bit for bit the undisturbed run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from parallel3d.config.schema import Config, FaultConfig
from parallel3d.parallel.grid import PartId
from tests.support import tiny_runs
from tests.support.join_runs import dies, run_with_joins
from tests.support.thread_kills import assert_same_run, run

CUBE = dict(pp_size=2, dp_size=2, tp_size=2)  # stage 0: 0 1 | 2 3, stage 1: 4 5 | 6 7
LONG = dict(pp_size=3, dp_size=2, tp_size=2)  # 0 1 | 2 3, 4 5 | 6 7, 8 9 | 10 11
WIDE = dict(pp_size=2, dp_size=3, tp_size=2)  # 0 1 | 2 3 | 4 5, 6 7 | 8 9 | 10 11
TIED = dict(model=dict(tie_word_embeddings=True))


def leave(step: int, *ranks: int) -> list[FaultConfig]:
    return [FaultConfig(rank=rank, step=step, kind="term") for rank in ranks]


def dies_in_second(rank: int, phase: str) -> list[FaultConfig]:
    """In the second recovery from step 2 on: the first is that from a loss in this step, which this rank must have
    begun (one in the update waits for all of its replica), then spares move."""
    return [FaultConfig(rank=rank, step=3, phase=phase, kind="sleep", seconds=0.0), dies(rank, 3, phase)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Some die, some leave, some join; `widths` at the end."""

    faults: Sequence[FaultConfig]
    widths: tuple[int, ...]
    num_changes: int
    parallel: dict[str, Any] = field(default_factory=lambda: CUBE)
    joins: Sequence[int] = ()
    surplus: Mapping[int, PartId] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        given = dict(self.sections)
        shape = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2)
        return tiny_runs.make_config(
            model=shape | given.pop("model", {}),
            parallel=dict(bucket_mib=0.003, **self.parallel),
            batch=dict(global_batch_size=8, micro_batch_size=1, sequence_length=4),
            precision=dict(policy="fp64", sums="exact") | given.pop("precision", {}),
            run=dict(num_steps=6, evaluate_every=2, evaluate_batches=1),
            **given,
        )


TWO_BREAK = [dies(0, 1), dies(5, 2)]
"""Spares 1 and 4 are left, of different stages: 4 builds (0, 0)."""
ROWS = {
    "to-the-first": Row(faults=TWO_BREAK, widths=(2, 1), num_changes=3),
    "at-once": Row(faults=[dies(0, 2), dies(4, 2, "recovery_report")], widths=(2, 1), num_changes=2),
    "to-the-narrower": Row(
        parallel=dict(pp_size=2, stage_replicas=[3, 2], tp_size=2),
        faults=[dies(0, 1), dies(6, 2)],  # 0 1 | 2 3 | 4 5, 6 7 | 8 9
        widths=(2, 2),
        num_changes=3,
    ),
    "pp3": Row(parallel=LONG, faults=[dies(4, 1), dies(9, 2, "update")], widths=(2, 2, 1), num_changes=3),
    "mover-dies-in-the-change": Row(
        faults=[dies(0, 1), dies(5, 2, "update"), *dies_in_second(4, "recovery_moves")],
        widths=(1, 1),
        num_changes=3,
    ),
    "source-dies-in-the-change": Row(
        parallel=WIDE,
        faults=[dies(0, 1), dies(7, 2, "update"), *dies_in_second(8, "recovery_confirm")],
        widths=(2, 2),
        num_changes=3,
    ),
    "mover-dies-later": Row(faults=[*TWO_BREAK, dies(4, 5)], widths=(1, 1), num_changes=4),
    "others-take-the-rest": Row(faults=TWO_BREAK, joins=(4, 4), widths=(2, 2), num_changes=4),
    "zero0": Row(parallel=dict(**CUBE, zero_stage=0), faults=TWO_BREAK, widths=(2, 1), num_changes=3),
    "tied": Row(faults=TWO_BREAK, widths=(2, 1), num_changes=3, sections=TIED),
    "bf16_sr": Row(faults=TWO_BREAK, widths=(2, 1), num_changes=3, sections=dict(precision=dict(policy="bf16_sr"))),
    "one-leaves": Row(faults=leave(2, 3), widths=(1, 2), num_changes=1),
    "one-leaves-and-is-replaced": Row(faults=leave(2, 3), joins=(4,), widths=(2, 2), num_changes=2),
    "the-leader-leaves": Row(faults=leave(2, 0), widths=(1, 2), num_changes=1),
    "one-of-each-stage-leaves": Row(faults=leave(2, 1, 6), widths=(2, 1), num_changes=2),
    "a-replica-leaves": Row(faults=leave(2, 2, 3), widths=(1, 2), num_changes=1),
    "a-host-leaves": Row(faults=leave(2, 2, 3, 6, 7), widths=(1, 1), num_changes=1),
    "a-host-leaves-and-comes": Row(faults=leave(2, 0, 1, 4, 5), joins=(4, 4, 5, 5), widths=(2, 2), num_changes=3),
    "a-host-leaves-beside-a-loss": Row(
        parallel=WIDE,
        faults=[*leave(2, 2, 3, 8, 9), dies(0, 2, "update")],
        widths=(1, 2),
        num_changes=1,
    ),
}

CHAIN = dict(pp_size=3, dp_size=2)  # 0 1, 2 3, 4 5
WIDE_CHAIN = dict(pp_size=3, dp_size=3)  # 0 1 2, 3 4 5, 6 7 8


def mover_dies(rank: int, phase: str) -> list[FaultConfig]:
    """A spare in the second change that it sees: the first is that which makes it a member. It has had no step."""
    return [fault.model_copy(update=dict(step=1)) for fault in dies_in_second(rank, phase)]


def move(parallel: dict[str, Any], spare: int, **given: Any) -> Row:
    """A new worker joins the whole grid in step 2, built as the first stage; what dies later has it move.

    The coordinator asks no worker to build what is not missing (tests/elastic/test_protocol_moves.py), so that without
    tensor parallelism only this leaves a spare that could move.
    """
    return Row(parallel=parallel, joins=(2,), surplus={spare: (0, 0)}, **given)


TP1_ROWS = {
    **{
        f"stage-{stage}-zero{zero}": move(
            dict(**CHAIN, zero_stage=zero), 6, faults=[dies(rank, 3, phase)], widths=(2, 2, 2), num_changes=2
        )
        for zero in (0, 1)
        for stage, rank, phase in [(1, 3, "update"), (2, 4, "forward")]
    },
    **{
        f"{name}-zero{zero}": move(
            dict(**parallel, zero_stage=zero), spare, faults=faults, widths=widths, num_changes=num_changes
        )
        for zero in (0, 1)
        for name, parallel, spare, faults, widths, num_changes in [
            ("mover-dies-as-it-builds", CHAIN, 6, [dies(4, 3), *mover_dies(6, "build")], (2, 2, 1), 1),
            ("mover-dies-in-the-change", CHAIN, 6, [dies(4, 3), *mover_dies(6, "recovery_moves")], (2, 2, 1), 2),
            ("mover-dies-later", CHAIN, 6, [dies(4, 3), dies(6, 5)], (2, 2, 1), 3),
            (
                "source-dies-in-the-change",
                WIDE_CHAIN,
                9,
                [dies(6, 3), *dies_in_second(7, "recovery_moves")],
                (3, 3, 2),
                2,
            ),
            ("only-source-dies-after-it", CHAIN, 6, [dies(4, 3), *dies_in_second(5, "recovery_groups")], (2, 2, 1), 3),
        ]
    },
}


@pytest.mark.sample(5, rest=4)
@pytest.mark.parametrize("name", ROWS)
def test_moves_and_drains_change_nothing(name: str):
    row = ROWS[name]
    done = run_with_joins(row.config, row.faults, row.joins, moves=True)
    assert_same_run(done, run(row.config))
    assert (done.widths, done.num_changes) == (row.widths, row.num_changes)


@pytest.mark.sample(3, rest=5)
@pytest.mark.parametrize("name", TP1_ROWS)
def test_a_move_without_tensor_parallelism_changes_nothing(name: str):
    row = TP1_ROWS[name]
    done = run_with_joins(row.config, row.faults, row.joins, moves=True, surplus=row.surplus)
    assert_same_run(done, run(row.config))
    assert (done.widths, done.num_changes) == (row.widths, row.num_changes)
