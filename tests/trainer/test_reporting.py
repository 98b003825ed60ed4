"""The trainer's reports: the records of a run, and the summary of one that had nothing left to do."""

from __future__ import annotations

from dataclasses import replace

from parallel3d.inprocess.world import ThreadWorld
from parallel3d.monitor.saved_notice import SavedNotice
from parallel3d.trainer.context import Transports
from parallel3d.trainer.generation import start_rank
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.reporting import StepReporter
from parallel3d.trainer.step import train_step
from tests.support import tiny_runs


def reporter_of(num_steps: int, *, resumed: bool):
    """(records, reporter) of a run on one rank that has trained `num_steps`, or was resumed after them."""
    config = tiny_runs.make_config()
    grid, world, records = build_grid(config), ThreadWorld(1), []
    rank = tiny_runs.prepare(config, grid, 0)
    start_rank(rank, grid, Transports(make_group=world.make_group(0), links=world.links(0), token=world.tokens[0]))
    reporter = StepReporter(rank, records.append, data_wait_s=lambda: 0.0, describe=lambda: {"world": 1})
    for _ in range(num_steps):
        before = rank.state.tokens_read
        reporter.begin_step()
        report = train_step(rank)
        if not resumed:
            reporter.end_step(report, range(before, rank.state.tokens_read))
    rank.resumed_from = num_steps if resumed else 0
    reporter.begin_generation(last_reported_step=num_steps)
    reporter.end_run()
    return records, reporter


def test_a_run_reports_its_steps_and_its_speed():
    records, reporter = reporter_of(2, resumed=False)
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2]
    summary = records[-1]
    assert summary["kind"] == "summary" and summary["world"] == 1 and summary["steps"] == 2
    assert summary["seconds"] > 0 and summary["tokens_per_s"] > 0
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    assert reporter.mean_loss_since(1) == losses[1] and reporter.mean_loss_since(2) is None


def test_the_peak_is_that_of_ten_steps_in_a_row():
    records, reporter = reporter_of(13, resumed=False)
    steps = [record for record in records if record["kind"] == "step"]
    assert records[-1]["peak_tokens_per_s"] == max(step["mean_tokens_per_s"] for step in steps[9:])
    assert reporter_of(9, resumed=False)[0][-1]["peak_tokens_per_s"] is None


def test_a_finished_run_that_is_resumed_reports_no_speed():
    """There is none: "seconds 0.0, tokens/s 0" would be false. A notice says why."""
    records, _ = reporter_of(2, resumed=True)
    notices = [record["text"] for record in records if record["kind"] == "notice"]
    assert notices == ["nothing left to train: the checkpoint of step 2 is the end of the run"]
    summary = records[-1]
    assert summary["steps"] == 2 and summary["final_loss"] is not None
    figures = ("seconds", "tokens_per_s", "peak_tokens_per_s", "flops_per_s", "evaluation_seconds", "mfu")
    assert {summary[name] for name in figures} == {None}


def test_a_new_leader_reports_all_steps_that_the_last_one_took_along():
    """Its host may have been out of reach for long before it was lost: more steps than a change repeats."""
    records, reporter = reporter_of(6, resumed=False)
    reporter._rank.resumed_from = 0
    made = [record for record in records if record["kind"] == "step"]
    records.clear()
    reporter.begin_generation(last_reported_step=2)
    assert [record for record in records if record["kind"] == "step"] == made[2:]
    assert [record["step"] for record in made[2:]] == [3, 4, 5, 6] and all("step_s" in record for record in made)


def test_the_notice_of_a_save_has_the_seconds_of_its_snapshot():
    """The save of the step at which the snapshot was taken: not a later one, nor one at the end of the run."""
    records, reporter = reporter_of(3, resumed=False)
    reporter.end_snapshot(0.25)
    records.clear()
    reporter.notices([*(str(SavedNotice(step=step, path="x", megabytes=1.0)) for step in (3, 4)), "step 3 is slow"])
    assert [record.get("snapshot_s") for record in records] == [0.25, None, None]


def test_only_the_leader_publishes():
    records, reporter = reporter_of(1, resumed=False)
    rank = reporter._rank
    rank.generation = replace(rank.current, grid=build_grid(tiny_runs.make_config(parallel=dict(dp_size=2))))
    rank.rank = 1
    records.clear()
    reporter.begin_generation(last_reported_step=0)
    reporter.end_run()
    reporter.leader_notice("once")
    assert records == [] and not reporter.wants_evaluation
    reporter.notices(["of this rank"])
    assert records == [{"kind": "notice", "text": "of this rank"}]
