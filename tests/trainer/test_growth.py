"""Runs that grow beyond the workers with which they began, and shrink again: bit for bit those that did neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.config.schema import Config, FaultConfig
from parallel3d.errors import ConfigError
from parallel3d.trainer.checkpointing import AsyncSaver
from tests.support import tiny_runs
from tests.support.join_runs import dies, run_with_joins
from tests.support.saved_layouts import TEXT
from tests.support.thread_kills import assert_same_run, run
from tests.trainer.test_checkpointing import assert_goes_on

STAGES = dict(pp_size=2, dp_size=2)


def leaves(rank: int, step: int) -> FaultConfig:
    return FaultConfig(rank=rank, step=step, kind="term")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Workers join in some steps, others die or leave."""

    parallel: dict[str, Any] = field(default_factory=lambda: STAGES)
    most: int = 3
    joins: Sequence[int] = (2,)
    faults: Sequence[FaultConfig] = ()
    num_changes: int = 1
    widths: tuple[int, ...] = (2, 3)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    lengths: tuple[int, ...] = (4,) * 6
    """Of the sequences of each step."""

    def config(self, max_replicas: int | None) -> Config:
        shape = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2)
        given = dict(self.sections)
        return tiny_runs.make_config(
            model=shape | given.pop("model", {}),
            parallel=dict(bucket_mib=0.003, **self.parallel),
            batch=dict(global_batch_size=8, micro_batch_size=1, sequence_length=4) | given.pop("batch", {}),
            precision=dict(policy="fp64", sums="exact") | given.pop("precision", {}),
            run=dict(num_steps=6, evaluate_every=2, evaluate_batches=1),
            elastic=dict(max_replicas=max_replicas),
            **given,
        )


TIED = dict(model=dict(tie_word_embeddings=True))
MUON = dict(optimizer=dict(kind="muon", learning_rate=1e-2), precision=dict(policy="fp32"))
ROWS = {
    "2-4-3": Row(parallel=dict(dp_size=2), most=4, joins=(2, 3), faults=[dies(0, 5)], num_changes=3, widths=(3,)),
    "2-4-3-at-once": Row(
        parallel=dict(dp_size=2), most=4, joins=(2, 2), faults=[dies(3, 4, "update")], num_changes=2, widths=(3,)
    ),
    "22-23": Row(),
    "22-33": Row(joins=(2, 4), num_changes=2, widths=(3, 3)),
    "22-23-22": Row(faults=[dies(4, 4)], num_changes=2, widths=(2, 2)),
    "22-23-13": Row(faults=[dies(0, 4)], num_changes=2, widths=(1, 3)),
    "22-23-joiner-dies": Row(faults=[dies(4, 1, "recovery_moves")], joins=(2, 4), num_changes=2),
    "22-23-source-dies": Row(faults=[dies(0, 2, "recovery_confirm")], widths=(1, 3)),
    "22-23-leader-dies-after": Row(faults=[dies(0, 2, "recovery_groups")], num_changes=2, widths=(1, 3)),
    "1-3-1": Row(parallel=dict(dp_size=1), joins=(1, 2), faults=[dies(0, 3), leaves(1, 4)], num_changes=4, widths=(1,)),
    "tp2": Row(parallel=dict(dp_size=2, tp_size=2), joins=(2, 2), widths=(3,)),
    "tp2-half": Row(parallel=dict(dp_size=2, tp_size=2), joins=(2, 4), widths=(3,)),
    "zero0": Row(parallel=dict(**STAGES, zero_stage=0), faults=[dies(4, 4)], num_changes=2, widths=(2, 2)),
    "tied": Row(sections=TIED, faults=[dies(0, 4)], num_changes=2, widths=(1, 3)),
    "tied-zb-v": Row(
        parallel=dict(**STAGES, schedule="zb-v", virtual_stages=2),
        sections=dict(model=dict(tie_word_embeddings=True, num_hidden_layers=4)),
        joins=(2, 3),
        num_changes=2,
        widths=(3, 3),
    ),
    "bf16_sr": Row(sections=dict(precision=dict(policy="bf16_sr"))),
    "muon": Row(sections=MUON, joins=(2, 3), num_changes=2, widths=(3, 3)),
    "norms": Row(sections=dict(monitor=dict(norms_every=1))),
    "warmup": Row(sections=dict(warmup=dict(batch_size=dict(start=3, duration=4)))),
    "lengths": Row(
        sections=dict(
            warmup=dict(sequence_length=dict(kind="adaptive", start=4, multiple=4)),
            batch=dict(sequence_length=12),
        ),
        joins=(3,),
        faults=[dies(0, 5)],
        num_changes=2,
        widths=(1, 3),
        lengths=(4, 4, 8, 8, 12, 12),
    ),
    "leave-2-4-3": Row(
        parallel=dict(dp_size=2), most=4, joins=(2, 3), faults=[leaves(1, 4)], num_changes=3, widths=(3,)
    ),
    "leave-22-11": Row(most=2, joins=(), faults=[leaves(0, 2), leaves(3, 4)], num_changes=2, widths=(1, 1)),
}


@pytest.mark.sample(4, rest=6)
@pytest.mark.parametrize("name", ROWS)
def test_a_run_that_grows_is_the_same_run(name: str):
    """Compared with a run that could not grow, whose buckets are padded for fewer replicas."""
    row = ROWS[name]
    done = run_with_joins(row.config(row.most), row.faults, row.joins)
    assert_same_run(done, run(row.config(None)))
    assert (done.num_changes, done.widths) == (row.num_changes, row.widths)
    assert tuple(done.steps[step]["sequence_length"] for step in sorted(done.steps)) == row.lengths


def test_a_checkpoint_of_a_wider_grid_is_one_like_any_other(tmp_path: Path):
    config = Row(sections=dict(checkpoint=dict(every=4, keep_last=9))).config(3)
    grown = run_with_joins(
        config, [], [2], save=lambda context: AsyncSaver(context, CheckpointDirectory(tmp_path), TEXT)
    )
    assert grown.widths == (2, 3)
    resumed = run_with_joins(config, [], [5], start=tmp_path / "step-00000004")
    assert resumed.widths == (2, 3)
    assert_goes_on(resumed, grown, steps=range(5, 7))


@pytest.mark.parametrize(
    ("start", "most", "says"), [(None, 9, "makes 8"), (None, 8, None), (3, 4, "makes 3"), (4, 4, None)]
)
def test_each_replica_needs_a_micro_batch(start: int | None, most: int, says: str | None):
    row = Row(sections=dict(warmup=dict(batch_size=dict(start=start, duration=4))) if start else {})
    if says is None:
        assert row.config(most).elastic.max_replicas == most
    else:
        with pytest.raises(ConfigError, match=f"elastic.max_replicas.*{says}"):
            row.config(most)
