"""What happens in one step beyond the sums: skipped updates, the audit, requests to stop, the order of tokens."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from parallel3d.data.reader import Reader
from parallel3d.errors import ProtocolError
from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.pipeline.compute_clock import ListTimes
from parallel3d.pipeline.executor import StageResult
from parallel3d.trainer.batching import next_batch
from parallel3d.trainer.context import Transports
from parallel3d.trainer.entry import Contribution
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.step import all_reduce_entry, bubble_of, evaluate, train_step
from tests.support import tiny_runs


class Recorder(Reader):
    """Lanes that note what was read."""

    def __init__(self, lanes):
        self.lanes, self.seen = lanes, {}

    def read(self, lane, cursor, num_tokens):
        tokens, after = self.lanes.read(lane, cursor, num_tokens)
        self.seen[lane, cursor] = tokens
        return tokens, after


def run(body, **changes):
    """body(runtime, recorder) on every rank."""
    config = tiny_runs.make_config(**changes)
    grid = build_grid(config)

    def rank_body(rank, world):
        transports = Transports(make_group=world.make_group(rank), links=world.links(rank), token=world.tokens[rank])
        lanes = Recorder(tiny_runs.topic_lanes(config))
        return body(tiny_runs.build(config, grid, rank, transports, lanes), lanes)

    return run_threads(len(grid.ranks), rank_body)


LAYOUT = dict(tp_size=2, pp_size=2, dp_size=2)


def test_a_gradient_that_is_not_finite_skips_the_update_on_every_rank():
    def body(rank, lanes):
        before = [b.weights.clone() for b in rank.optimizer.buckets]
        reduce = rank.optimizer.finish_reduction

        def poisoned():
            reduce()
            if rank.rank == 5:
                rank.optimizer.buckets[0].owned.grads[3] = math.inf

        rank.optimizer.finish_reduction = poisoned
        report, skipped = train_step(rank), rank.state
        rank.optimizer.finish_reduction = reduce
        same = all(torch.equal(a, b.weights) for a, b in zip(before, rank.optimizer.buckets))
        assert rank.optimizer.version == 1
        second = train_step(rank)
        return report.entry.finite, skipped, same, rank.state, second.entry.finite

    for finite, skipped, same, after, second in run(body, parallel=LAYOUT):
        assert not finite and same and second
        assert (skipped.iteration, skipped.num_updates, skipped.tokens_trained, skipped.tokens_read) == (1, 0, 0, 128)
        assert (after.iteration, after.num_updates, after.tokens_trained, after.tokens_read) == (2, 1, 128, 256)


@pytest.mark.parametrize("request_of", ["stop", "leave"])
def test_one_rank_asks_and_all_know(request_of):
    def body(rank, lanes):
        entry = train_step(rank, **{request_of: rank.rank == 6}).entry
        return entry.stop, entry.leave

    assert run(body, parallel=LAYOUT) == [(request_of == "stop", request_of == "leave")] * 8


def test_an_entry_is_held_before_its_update():
    """A rank that is interrupted in its update holds the entry, and can finish alone."""

    class Interrupted(Exception):
        pass

    def body(rank, lanes):
        def interrupt(version, step):
            raise Interrupted

        plain, rank.optimizer.update = rank.optimizer.update, interrupt
        with pytest.raises(Interrupted):
            train_step(rank)
        rank.optimizer.update = plain
        assert rank.state.iteration == 1 and rank.optimizer.version == 0
        rank.optimizer.update_to(1, rank.update_step())
        rank.optimizer.gather()
        return [bucket.weights.clone() for bucket in rank.optimizer.buckets]

    def undisturbed(rank, lanes):
        train_step(rank)
        rank.optimizer.finish_gather()
        return [bucket.weights.clone() for bucket in rank.optimizer.buckets]

    for ours, theirs in zip(run(body, parallel=LAYOUT), run(undisturbed, parallel=LAYOUT)):
        assert all(torch.equal(mine, yours) for mine, yours in zip(ours, theirs))


def test_an_evaluation_is_an_entry():
    def body(rank, lanes):
        train_step(rank)
        before = rank.state
        entry = evaluate(rank)
        assert not before.is_evaluated and rank.state.is_evaluated and rank.state.evaluations == (entry,)
        assert rank.state.iteration == entry.iteration == 1
        return entry.loss

    losses = run(body, parallel=LAYOUT)
    assert len(set(losses)) == 1 and 4 < losses[0] < 7


def test_a_micro_batch_counted_twice_is_no_entry():
    def body(rank, lanes):
        part = Contribution(num_target_tokens=1, backward_counts={(rank.coordinates.pp, m): 1 for m in range(8)})
        with pytest.raises(ProtocolError, match="micro-batch 0 counted 2 times at stage 0"):
            all_reduce_entry(rank, next_batch(rank.config, rank.state), part, StageResult())
        return True

    assert all(run(body, parallel=dict(pp_size=2, dp_size=2)))


@pytest.mark.parametrize(
    ("busy", "run", "bubble"),
    [
        ([3.0], [4.0], 0.25),
        ([3.0, 1.0, 2.5], [4.0, 5.0, 2.5], 0.4),  # the busiest computes for 3 s of the 5 s that the longest list takes
        ([0.0], [0.0], 0.0),
    ],
)
def test_the_bubble_is_the_busiest_ranks_idle_share(busy, run, bubble):
    assert bubble_of(busy, run) == pytest.approx(bubble)


def test_seconds_ride_behind_the_entry_and_not_in_it():
    """Every rank knows the same bubble, from all of them; the entry does not depend on it."""

    def body(rank, lanes):
        plain = rank.executor.run

        def timed(steps, batch, load):
            result = plain(steps, batch, load)
            result.times = lambda: ListTimes(1.0 + rank.rank, 16.0)
            return result

        rank.executor.run = timed if rank.state.iteration == 0 else plain
        report = train_step(rank)
        return report.telemetry.bubble, report.entry

    bubbles, entries = zip(*run(body, parallel=LAYOUT))
    assert set(bubbles) == {0.5} and len(set(entries)) == 1
    plain = run(lambda rank, lanes: train_step(rank), parallel=LAYOUT)
    assert {report.entry for report in plain} == set(entries)
    assert len({report.telemetry for report in plain}) == 1 and 0 <= plain[0].telemetry.bubble < 1
    assert plain[0].telemetry.memory_bytes > 10e6


@pytest.mark.parametrize("dp,micro,pp", [(2, 1, 1), (4, 1, 2), (1, 4, 2), (2, 2, 1)])
def test_any_split_of_the_batch_reads_the_same_tokens(dp, micro, pp):
    def body(rank, lanes):
        for _ in range(2):
            train_step(rank)
        return lanes.seen

    def digest(results):
        seen = {key: tokens for result in results for key, tokens in result.items()}
        ordered = sorted(seen)
        return hashlib.sha256(np.concatenate([seen[key] for key in ordered]).tobytes()).hexdigest()

    one = run(body)
    sections = dict(parallel=dict(dp_size=dp, pp_size=pp), batch=dict(micro_batch_size=micro))
    assert digest(run(body, **sections)) == digest(one)


@pytest.mark.parametrize("layout", [dict(pp_size=2, dp_size=2), dict(tp_size=2, pp_size=2, sequence_parallel=True)])
def test_lengths_that_change_from_step_to_step(layout, monkeypatch):
    """Messages carry their shapes, lanes read just what a step trains on: as on one process."""

    def batch_of_another_length(config, state):
        return replace(next_batch(config, state), sequence_length=(16, 4, 10)[state.iteration])

    monkeypatch.setattr("parallel3d.trainer.step.next_batch", batch_of_another_length)

    def body(rank, lanes):
        losses = [train_step(rank).entry.loss for _ in range(3)]
        return losses, rank.state.tokens_read, rank.state.cursors

    losses, tokens, cursors = run(body)[0]
    assert tokens == 8 * (16 + 4 + 10)
    for other in run(body, parallel=layout):
        assert other[0] == pytest.approx(losses, rel=1e-11) and other[1:] == (tokens, cursors)


def test_death_of_a_rank_ends_the_generation_for_all_others():
    """Whichever call a rank dies in, no other rank hangs, and the cause is named."""
    config = tiny_runs.make_config(parallel=LAYOUT)
    grid = build_grid(config)

    def body(rank, world):
        transports = Transports(make_group=world.make_group(rank), links=world.links(rank), token=world.tokens[rank])
        runtime = tiny_runs.build(config, grid, rank, transports)
        for _ in range(4):
            train_step(runtime)

    for call in (1, 7, 20, 40):
        world = ThreadWorld(8)
        world.die_at(3, call)
        with pytest.raises(Exception, match=f"rank 3 dies at its call {call}"):
            run_threads(8, body, world=world)
