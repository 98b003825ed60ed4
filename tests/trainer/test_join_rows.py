"""Workers die and new ones take their places, whatever the run computes and how; beside a save, and after a resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.checkpoint.disk import Disk
from parallel3d.config.schema import Config
from parallel3d.trainer.checkpointing import AsyncSaver, CheckpointSaver
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.entry import NO_SAVE_STATUS, SaveStatus
from tests.support import tiny_runs
from tests.support.join_runs import check_joins, dies, run_with_joins
from tests.support.kill_layouts import KILL_LAYOUTS, config_of
from tests.support.saved_layouts import TEXT, assert_equal, read_all
from tests.trainer.test_checkpointing import GatedDisk, assert_goes_on
from tests.trainer.test_checkpointing import config_of as saving_config

STEPS = 5


def small(layout: str, *, length: int = 4, **changes: dict[str, object]) -> Config:
    return tiny_runs.make_config(
        model=dict(hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2),
        parallel=dict(bucket_mib=0.003, **KILL_LAYOUTS[layout].parallel),
        batch=dict(global_batch_size=8, micro_batch_size=1, sequence_length=length),
        run=dict(num_steps=STEPS, evaluate_every=2) | changes.pop("run", {}),
        **changes,
    )


def muon(layout: str, policy: str) -> Config:
    """A matrix-wise rule: a range of its state is a whole number of matrices."""
    return small(
        layout,
        optimizer=dict(kind="muon", learning_rate=1e-2),
        precision=dict(policy=policy, sums="exact"),
        monitor=dict(norms_every=1),
    )


def fp16(layout: str) -> Config:
    """The loss scale falls and grows: it is part of the train state."""
    scale = dict(initial=2.0**21, growth_interval=2, growth_factor=64.0, backoff_factor=1 / 64)
    return small(layout, precision=dict(policy="fp16", loss_scale=scale, sums="exact"))


ROWS: dict[str, tuple[Config, Sequence[int]]] = {
    **{
        f"zero0-{layout}": (config_of(layout, num_steps=STEPS, zero_stage=0), ranks)
        for layout, ranks in [("pp2-dp2-tp2", (0, 7)), ("pp3-dp2", (3, 4)), ("tied-pp2-dp4", (1, 6))]
    },
    "zero0-no-backups": (config_of("pp3-dp2", num_steps=STEPS, zero_stage=0, zero_backups=0), (0, 5)),
    **{
        layout: (config_of(layout, num_steps=STEPS), ranks)
        for layout, ranks in [
            ("bf16_sr-pp2-dp2-tp2", (3, 4)),
            ("bf16_sr-everywhere", (0, 5)),
            ("bf16-pp3-dp2", (2, 1)),
            ("tied-pp2-dp2-tp2", (1, 6)),
            ("tied-pp3-dp2", (0, 5)),
            ("tied-stages-2-1-3", (1, 4)),
            ("tied-zb-v", (0, 3)),
            ("interleaved-pp3", (2, 5)),
            ("zb-h1", (1, 4)),
            ("zb-v-pp3", (0, 3)),
            ("gpt2-pp2-dp2-tp2", (0, 5)),
            ("copied-heads-dp2-tp4", (2, 5)),
            ("documents-pp3-dp2", (1, 2)),
            ("blend-pp2-dp4", (3, 7)),
            ("recompute-full", (2, 7)),
        ]
    },
    "muon-fp32-pp2-dp2-tp2": (muon("pp2-dp2-tp2", "fp32"), (2, 5)),
    "muon-bf16_sr-pp3-dp2": (muon("pp3-dp2", "bf16_sr"), (0, 3)),
    "fp16-pp2-dp4": (fp16("pp2-dp4"), (4, 3)),
}
"""Configurations, and the ranks that die in steps 1 and 3."""


@pytest.mark.sample(4, rest=7)
@pytest.mark.parametrize("name", ROWS)
def test_two_die_and_two_come(name: str):
    config, (first, second) = ROWS[name]
    check_joins(config, [dies(first, 1), dies(second, 3, "backward")], [2, 4], num_changes=4)


def following(layout: str, kind: str, *, num_steps: int, learning_rate: float, **rule: object) -> Config:
    """Lengths that follow the run, by a state that every rank must have."""
    return small(
        layout,
        length=16,
        warmup=dict(sequence_length=dict(kind=kind, start=8, multiple=4, **rule)),
        run=dict(num_steps=num_steps, evaluate_every=1),
        optimizer=dict(learning_rate=learning_rate),
        precision=dict(policy="fp64", sums="exact"),
    )


GROWING: dict[str, tuple[Config, Sequence[int], Sequence[int]]] = {
    "linear-and-batches": (config_of("warmup-pp2-dp2-tp2", num_steps=STEPS), (0, 6), (8, 12, 12, 16, 16)),
    # the fourth evaluation is worse than the best one, the third
    "adaptive": (
        following("pp3-dp2", "adaptive", num_steps=7, learning_rate=1.0, tolerance=1.0),
        (0, 3),
        (8, 12, 16, 16, 12, 16, 16),
    ),
    # two calm steps after three that are not, of which the third is so by the two values before it
    "variance": (
        following("pp2-dp4", "variance", num_steps=8, learning_rate=0.1, tolerance=2.0, interval=2),
        (5, 0),
        (8, 8, 8, 8, 8, 12, 12, 16),
    ),
}
"""Configurations, the ranks that die in steps 1 and 3, and the lengths of the steps."""


@pytest.mark.sample(1, rest=2)
@pytest.mark.parametrize("name", GROWING)
def test_two_die_and_two_come_while_lengths_change(name: str):
    config, (first, second), lengths = GROWING[name]
    done = check_joins(config, [dies(first, 1), dies(second, 3, "backward")], [2, 4], num_changes=4)
    assert [record["sequence_length"] for _, record in sorted(done.steps.items())] == list(lengths)


class GatedSaver(AsyncSaver):
    """A save is on disk in the step after it; the gate in front of a gated disk opens when the next one is due."""

    def begin(self, training_loss: float | None) -> list[str]:
        disk = self._checkpoint_dir.disk
        if self._save is not None and isinstance(disk, GatedDisk):
            disk.gate.set()
        return super().begin(training_loss)

    def status(self) -> SaveStatus:
        disk = self._checkpoint_dir.disk
        if self._save is not None and (not isinstance(disk, GatedDisk) or disk.gate.is_set()):
            self._save.written.result(60.0)
        return super().status()


class SlowSaver(AsyncSaver):
    """A save is on disk two steps later, when the next one is due."""

    def status(self) -> SaveStatus:
        iteration = self._rank.state.iteration
        if self._save is None or self._save.step == iteration < self._rank.config.run.num_steps:
            return NO_SAVE_STATUS
        self._save.written.result(60.0)
        return super().status()


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 4])
def test_a_join_waits_for_a_save_and_a_resume_goes_on_from_joined_ranks(tmp_path: Path, rank: int):
    """Step 2's save is on its way until step 4: a worker that comes in step 3 waits. The checkpoints of step 6 and 8
    are written with it; from the former, the run goes on through one more death and join."""
    config = saving_config("pp2-dp3", sums="exact", every=2, num_steps=8)

    def saves(folder: str, disk: Disk | None = None) -> Callable[[RankContext], CheckpointSaver]:
        return lambda context: GatedSaver(context, CheckpointDirectory(tmp_path / folder, disk), TEXT)

    whole = run_with_joins(config, [], [], save=saves("whole"))
    done = run_with_joins(config, [dies(rank, 1)], [3], save=saves("joined", GatedDisk(2)))
    assert done.num_changes == 2 and done.widths == (3, 3)
    assert CheckpointDirectory(tmp_path / "joined").steps() == [2, 6, 8]
    assert not [text for text in done.notices if "abandoned" in text]
    assert_goes_on(done, whole, steps=range(1, 9))
    for step in (2, 6, 8):
        name = f"step-{step:08}"
        assert_equal(read_all(tmp_path / "joined" / name), read_all(tmp_path / "whole" / name))
    again = run_with_joins(config, [dies(rank, 7)], [8], start=tmp_path / "joined" / "step-00000006", save=saves("on"))
    assert again.num_changes == 2 and again.widths == (3, 3)
    assert_goes_on(again, whole, steps=range(7, 9))


def test_saves_without_a_pause_keep_no_worker_out(tmp_path: Path):
    """There is a save under way in every step: who comes in step 3 waits for that of step 2, and costs that of 4."""
    config = saving_config("pp2-dp2", sums="exact", every=2, num_steps=8)

    def saver(context: RankContext) -> CheckpointSaver:
        return SlowSaver(context, CheckpointDirectory(tmp_path), TEXT)

    done = run_with_joins(config, [dies(3, 1)], [3], save=saver)
    assert done.num_changes == 2 and done.widths == (2, 2)
    assert CheckpointDirectory(tmp_path).steps() == [2, 6, 8]
    assert "the checkpoint of step 4 is abandoned: the workers have changed meanwhile" in done.notices


def test_of_saves_without_a_pause_no_two_in_turn_are_lost_to_joins(tmp_path: Path):
    """A save begins after each step. A worker that comes right after another waits for a whole save, too: otherwise
    joins that follow each other closely would leave none to be finished."""
    config = saving_config("pp2-dp3", sums="exact", every=1, num_steps=10)

    def saver(context: RankContext) -> CheckpointSaver:
        return SlowSaver(context, CheckpointDirectory(tmp_path), TEXT)

    done = run_with_joins(config, [dies(2, 1), dies(5, 1)], [3, 5], save=saver)
    assert done.num_changes == 4 and done.widths == (3, 3)
    abandoned = [step for step in range(11) if any(f"of step {step} is abandoned" in text for text in done.notices)]
    assert abandoned == [3, 6] and 4 in CheckpointDirectory(tmp_path).steps()
