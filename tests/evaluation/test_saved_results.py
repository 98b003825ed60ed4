"""Which checkpoint is evaluated next, and which results a run has left behind."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from parallel3d.checkpoint.hold import hold_checkpoint
from parallel3d.commands.evaluate_options import parse_sets
from parallel3d.errors import ConfigError, UserError
from parallel3d.evaluation.result_history import read_result_history
from parallel3d.evaluation.saved_results import (
    ResultFolder,
    RunStart,
    SavedStep,
    is_left_behind,
    plan_evaluations_of,
)
from tests.support.small_checkpoints import assert_weights, save

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def saved(step, tokens=None):
    return SavedStep(step=step, tokens=10 * step if tokens is None else tokens, saved_at=NOON.isoformat())


def due(steps, *, every=100, done=(), failed=(), last=False):
    found = plan_evaluations_of(
        [saved(step) for step in steps],
        every_tokens=every,
        done=[saved(step) for step in done],
        failed=[saved(step) for step in failed],
        is_last_due=last,
    )
    return [each.step for each in found]


def test_the_first_checkpoint_of_each_interval_is_due():
    assert due([4, 8, 12, 16, 20, 24, 28, 32]) == [12, 20, 32]
    assert due([32, 12, 4]) == [12, 32]
    assert due([12, 16, 24], done=[12]) == [24]
    assert due([16, 24], done=[12]) == [24], "12 has been removed since"
    assert due([16, 24]) == [16, 24], "12 was removed before its turn"
    assert due([12, 16, 24], failed=[12]) == [16, 24]
    assert due([1, 2, 3], every=1) == [1, 2, 3]


def test_the_last_one_is_due_at_the_end():
    assert due([4], last=True) == [4]
    assert due([12, 16], done=[12], last=True) == [16]
    assert due([12, 16], done=[12, 16], last=True) == due([16], failed=[16], last=True) == []


def test_results_after_the_step_from_which_a_run_goes_on_are_left_behind():
    starts = [RunStart(time_s=NOON.timestamp() - 50, step=0), RunStart(time_s=NOON.timestamp() + 50, step=8)]
    assert [is_left_behind(saved(step), starts) for step in (4, 8, 12)] == [False, False, True]
    assert not is_left_behind(saved(12), starts[:1])


def test_results_of_other_settings_and_of_other_lines_never_mix(tmp_path):
    folder = ResultFolder(tmp_path, "wiki")
    folder.prepare({"files": ["a"]})
    folder.prepare({"files": ["a"]})
    with pytest.raises(UserError, match="has results of other settings"):
        folder.prepare({"files": ["b"]})
    for step in (12, 4):
        written = tmp_path / "written"
        model = {"step": step, "tokens": 10 * step, "saved_at": NOON.isoformat()}
        written.write_text(json.dumps({"model": model, "results": {}}))
        folder.publish(written, step)
    assert [each.step for each in folder.reports()] == [4, 12]
    restart = RunStart(time_s=NOON.timestamp() + 50, step=8)
    assert [each.step for each in folder.reports([restart])] == [4]


@pytest.mark.parametrize("damaged", ['{"model": {"st', "[]", '{"model": {"step": 3}, "results": {}}'])
def test_a_damaged_result_is_named_and_hides_no_other_set(tmp_path, damaged):
    for name in ("bad", "good"):
        folder = ResultFolder(tmp_path, name)
        folder.prepare({})
        model = {"step": 4, "tokens": 40, "saved_at": NOON.isoformat()}
        folder.path_of(4).write_text(json.dumps({"model": model, "results": {"all": {"loss": 2.0}}}))
    path = ResultFolder(tmp_path, "bad").path_of(8)
    path.write_text(damaged)
    with pytest.raises(UserError, match=f"{path.name} is not the result of an evaluation"):
        ResultFolder(tmp_path, "bad").reports()
    complaints: list[str] = []
    history = read_result_history(tmp_path, [], on_damage=complaints.append)
    assert [*history] == ["good"] and str(path) in complaints[0]


def test_a_held_checkpoint_outlives_its_removal(tmp_path):
    path = save(tmp_path, 1)
    with hold_checkpoint(path, ".reading") as (held, _):
        save(tmp_path, 2, keep_last=1)
        assert held is not None and not path.exists()
        assert_weights(held, 1)
    assert sorted(each.name for each in tmp_path.iterdir() if not each.is_symlink()) == ["step-00000002"]
    with hold_checkpoint(path, ".reading") as (held, _):
        assert held is None


def test_mistakes_in_sets(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("text")
    sets = {"a": f"{text} --stride 4", "b": f"x={text}", "c": "--slice unseen"}
    assert [each.stride for each in parse_sets(tmp_path, sets).values()] == [4, None, None]
    for wrong, said in (
        (f"{text} --slice all", "--slice has no effect with files"),
        ("--slice none", "invalid choice: 'none'"),
        (f"{text}s", "a.txts: no such file"),
        ("--follow", "have no place here"),
        ("'", "No closing quotation"),
    ):
        with pytest.raises(ConfigError, match="evaluation.sets.wrong") as error:
            parse_sets(tmp_path, {**sets, "wrong": wrong})
        assert said in str(error.value)
