"""What happens in one step beyond the sums: skipped updates, the audit, requests to stop, the order of tokens."""

import hashlib
import math
from dataclasses import replace

import cells
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.comm.abort import AbortToken
from parallel3d.data.lanes import Cursor
from parallel3d.errors import ProtocolError
from parallel3d.testing.threads import ThreadWorld, run_threads
from parallel3d.trainer.build import Transports, build_grid
from parallel3d.trainer.entry import Contribution, EntryLayout, TrainState
from parallel3d.trainer.step import agree, train_step


class Recorder:
    """Lanes that note what was read."""

    def __init__(self, lanes):
        self.lanes, self.seen = lanes, {}

    def read(self, lane, cursor, num_tokens):
        tokens, after = self.lanes.read(lane, cursor, num_tokens)
        self.seen[lane, cursor] = tokens
        return tokens, after


def run(body, **changes):
    """body(runtime, recorder) on every rank."""
    config = cells.make_config(**changes)
    grid = build_grid(config)

    def rank_body(rank, world):
        transports = Transports(make_group=world.make_group(rank), links=world.links(rank), token=world.tokens[rank])
        lanes = Recorder(cells.topic_lanes(config))
        return body(cells.build(config, grid, rank, transports, lanes), lanes)

    return run_threads(len(grid.ranks), rank_body)


LAYOUT = dict(tp_size=2, pp_size=2, dp_size=2)


def test_a_gradient_that_is_not_finite_skips_the_update_on_every_rank():
    def body(rank, lanes):
        before = [b.weights.clone() for b in rank.optimizer.buckets]
        state = TrainState.start(rank.layout.num_slots)
        reduce = rank.optimizer.finish_reduction

        def poisoned():
            reduce()
            if rank.rank == 5:
                rank.optimizer.buckets[0].owned_grads[3] = math.inf

        rank.optimizer.finish_reduction = poisoned
        state, report = train_step(rank, state)
        rank.optimizer.finish_reduction = reduce
        same = all(torch.equal(a, b.weights) for a, b in zip(before, rank.optimizer.buckets))
        after, second = train_step(rank, state)
        return report.entry.finite, state, same, after, second.entry.finite

    for finite, state, same, after, second in run(body, parallel=LAYOUT):
        assert not finite and same and second
        assert (state.iteration, state.num_updates, state.tokens_trained, state.tokens_read) == (1, 0, 0, 128)
        assert (after.iteration, after.num_updates, after.tokens_trained, after.tokens_read) == (2, 1, 128, 256)


def test_one_rank_asks_and_all_stop():
    def body(rank, lanes):
        _, report = train_step(rank, TrainState.start(rank.layout.num_slots), stop=rank.rank == 6)
        return report.entry.stop

    assert run(body, parallel=LAYOUT) == [True] * 8


def test_a_micro_batch_counted_twice_is_no_entry():
    def body(rank, lanes):
        part = Contribution(num_target_tokens=1, audit={(rank.place.pp, m): 1 for m in range(8)})
        with pytest.raises(ProtocolError, match="micro-batch 0 counted 2 times at stage 0"):
            agree(rank, 1, part)
        return True

    assert all(run(body, parallel=dict(pp_size=2, dp_size=2)))


@pytest.mark.parametrize("dp,micro,pp", [(2, 1, 1), (4, 1, 2), (1, 4, 2), (2, 2, 1)])
def test_any_split_of_the_batch_reads_the_same_tokens(dp, micro, pp):
    def body(rank, lanes):
        state = TrainState.start(rank.layout.num_slots)
        for _ in range(2):
            state, _ = train_step(rank, state)
        return lanes.seen

    def digest(results):
        seen = {key: tokens for result in results for key, tokens in result.items()}
        ordered = sorted(seen, key=lambda key: (key[0], key[1].to_ints()))
        return hashlib.sha256(np.concatenate([seen[key] for key in ordered]).tobytes()).hexdigest()

    one = run(body)
    sections = dict(parallel=dict(dp_size=dp, pp_size=pp), batch=dict(micro_batch_size=micro))
    assert digest(run(body, **sections)) == digest(one)


@pytest.mark.parametrize("layout", [dict(pp_size=2, dp_size=2), dict(tp_size=2, pp_size=2, sequence_parallel=True)])
def test_lengths_that_change_from_step_to_step(layout):
    """Messages carry their shapes, lanes read just what a step trains on: as on one process."""

    def body(rank, lanes):
        plain = rank.train_batch
        rank.train_batch = lambda iteration: replace(plain(iteration), sequence_length=(16, 4, 10)[iteration - 1])
        state, losses = TrainState.start(rank.layout.num_slots), []
        for _ in range(3):
            state, report = train_step(rank, state)
            losses.append(report.entry.loss)
        return losses, state.tokens_read, state.cursors

    losses, tokens, cursors = run(body)[0]
    assert tokens == 8 * (16 + 4 + 10)
    for other in run(body, parallel=layout):
        assert other[0] == pytest.approx(losses, rel=1e-11) and other[1:] == (tokens, cursors)


def test_death_of_a_rank_ends_the_epoch_for_all_others():
    """Whatever call it dies in: nobody hangs, the cause is named."""
    config = cells.make_config(parallel=LAYOUT)
    grid = build_grid(config)

    def body(rank, world):
        transports = Transports(make_group=world.make_group(rank), links=world.links(rank), token=world.tokens[rank])
        runtime = cells.build(config, grid, rank, transports)
        state = TrainState.start(8)
        for _ in range(4):
            state, _ = train_step(runtime, state)

    for call in (1, 7, 20, 40):
        world = ThreadWorld(8)
        world.die_at(3, call)
        with pytest.raises(Exception, match=f"rank 3 dies at its call {call}"):
            run_threads(8, body, world=world)


cursors = st.builds(Cursor, *[st.integers(0, 2**40)] * 3)


@given(st.lists(cursors, min_size=4, max_size=4), st.floats(0, 1e30), st.integers(1, 2**40))
def test_entries_survive_their_vector(positions, squared_norm, num_tokens):
    layout = EntryLayout(num_stages=2, num_micro_batches=3, num_slots=4)
    parts = [
        Contribution(
            squared_norm=squared_norm,
            num_target_tokens=num_tokens,
            cursors=dict(enumerate(positions)),
            audit={(0, m): 1 for m in range(3)},
        ),
        Contribution(loss_sum=2.5, audit={(1, m): 1 for m in range(3)}),
    ]
    total = [sum(values) for values in zip(*map(layout.pack, parts))]
    entry = layout.unpack(7, total)
    assert entry.cursors == tuple(positions) and entry.num_target_tokens == num_tokens and entry.loss_sum == 2.5
    assert entry.squared_norm == squared_norm and entry.finite and not entry.stop and entry.iteration == 7


def test_folding_an_entry_twice_changes_nothing():
    layout = EntryLayout(num_stages=1, num_micro_batches=1, num_slots=1)
    part = Contribution(num_target_tokens=5, cursors={0: Cursor(0, 1, 2)}, audit={(0, 0): 1})
    entry = layout.unpack(1, layout.pack(part))
    state = TrainState.start(1).fold(entry)
    assert state.fold(entry) is state and state.cursors == (Cursor(0, 1, 2),) and state.tokens_read == 5


def test_token_is_live_until_aborted():
    token = AbortToken()
    token.check()
    token.abort("first")
    token.abort("second")
    with pytest.raises(Exception, match="first"):
        token.check()
