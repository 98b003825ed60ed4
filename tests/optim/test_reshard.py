"""Reshards of the optimizer state keep every bit after every survivable loss.

Ranks are threads without a coordinator: the test decides which ranks live.
"""

import itertools

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from parallel3d.errors import ProtocolError
from parallel3d.inprocess.world import run_threads
from parallel3d.optim.bucket import Bucket
from parallel3d.optim.reshard import ReshardPlan
from parallel3d.optim.shard_map import plan_shard_map
from parallel3d.parallel.grid import Grid
from tests.support.optimizer_ranks import NUM_STEPS, Rank, update_step
from tests.support.tiers import examples


class Deaths:
    """`before[step]` are the ranks that die before iteration `step` + 1, wave after wave. After each wave the live
    ranks build their ranges again; they commit those of the last."""

    def __init__(self, tp_size, dp_size, zero_stage, zero_backups, before, hosts=None, whole=True):
        self.layout = dict(tp_size=tp_size, dp_size=dp_size, zero_stage=zero_stage, zero_backups=zero_backups)
        self.hosts = hosts or {}
        self.before = before
        self.whole = whole
        """Whether the weights had been gathered before the deaths: then they need not travel."""
        self.grid = Grid.uniform(tp_size=tp_size, pp_size=1, dp_size=dp_size)

    def is_survivable(self):
        """Whether each range has a live holder at every change, and a replica is left at the end."""
        grid, live = self.grid, set(self.grid.ranks)
        for step in sorted(self.before):
            live -= set().union(*self.before[step])
            smaller, _ = grid.without(set(grid.ranks) - live)
            if smaller.stages_lost():
                return False
            for tp in range(self.layout["tp_size"]):
                options = {key: self.layout[key] for key in ("zero_stage", "zero_backups")}
                if plan_shard_map(grid, 0, tp, hosts=self.hosts, **options).lost_ranges(set(grid.ranks) - live):
                    return False
            grid = smaller
        return True

    def run(self, policy="fp64"):
        """Returns for each rank the rank and the weights after each step that it completed; None for dead ranks."""
        return run_threads(len(self.grid.ranks), lambda number, world: self._train(number, world, policy))

    def _train(self, number, world, policy):
        rank = Rank(number, world, policy=policy, hosts=self.hosts, overlap_gather=True, **self.layout)
        live, has_place, history, generation = set(self.grid.ranks), True, {}, 0
        for step in range(NUM_STEPS):
            if self.before.get(step):
                previous = rank.grid
                whole = self.whole or self.layout["zero_stage"] == 0
                for wave in self.before[step]:
                    rank.optimizer.leave()
                    if step and has_place and len(previous.stages[0]) > 1:
                        assert rank.optimizer.is_gathered == whole
                    live, generation = live - wave, generation + 1
                    if number not in live:
                        return None
                    num_bytes = rank.move(generation, previous, live, weights_gathered=whole)
                    assert num_bytes == self._missing_bytes(rank, previous, live, whole)
                has_place = rank.regroup(generation, previous, live, weights_gathered=whole)
                if not has_place:
                    assert rank.optimizer.state_bytes() == 0
                    rank.grid, _ = previous.without(set(previous.ranks) - live)
            if has_place:
                rank.step(step)
                if self.whole or step + 1 not in self.before:
                    history[step] = rank.weights()
        return rank, history

    def _missing_bytes(self, rank, previous, live, whole):
        """The bytes that the new ranges have and the old ones lacked, without padding: two moments, and master weights
        unless these are gathered weights."""
        smaller, _ = previous.without(set(previous.ranks) - live)
        total = 0
        for bucket in rank.buckets:
            before, after = (
                {
                    index
                    for number in shard_map.ranges_of(rank.rank)
                    for index in bucket.plan.range_of(number, shard_map.num_ranges)
                    if index < bucket.plan.num_elements
                }
                for shard_map in (rank.shard_maps_on(previous).stage, rank.shard_maps_on(smaller).stage)
            )
            is_copy = bucket.weights.dtype is torch.bfloat16
            size = 4 if is_copy else bucket.weights.itemsize
            total += (3 if is_copy or not whole else 2) * size * len(after - before)
        return total


UNDISTURBED = {}


def undisturbed(tp_size, dp_size, policy):
    """The weights after every step and the whole state at the end, by tensor-parallel rank, on one replica."""
    key = tp_size, dp_size, policy
    if key not in UNDISTURBED:
        ranks = Deaths(tp_size, dp_size, 0, 0, {}).run(policy)
        UNDISTURBED[key] = [(history, rank.state()) for rank, history in ranks[:tp_size]]
    return UNDISTURBED[key]


def assert_bitwise_undisturbed(deaths, policy="fp64"):
    """Compares weights after every step, and every range of state that any rank holds; padding is zero."""
    survivors = [result for result in deaths.run(policy) if result is not None]
    assert any(history for _, history in survivors)
    for rank, history in survivors:
        theirs, whole = undisturbed(rank.tp_size, rank.dp_size, policy)[rank.coordinates.tp]
        for step, weights in history.items():
            assert all(torch.equal(weights[name], theirs[step][name]) for name in weights), step
        for bucket, held, everything in zip(rank.buckets, rank.state(), whole):
            (reference,) = everything.values()
            assert bool(held) == (NUM_STEPS - 1 in history)
            for (start, stop), state in held.items():
                end = max(start, min(stop, bucket.plan.num_elements))
                assert torch.equal(state[:, : end - start], reference[:, start:end])
                assert not state[:, end - start :].any()


@st.composite
def random_deaths(draw):
    tp_size, dp_size = draw(st.sampled_from([(1, 2), (1, 3), (1, 4), (1, 5), (2, 2), (2, 3)]))
    num_ranks = tp_size * dp_size
    steps = draw(st.lists(st.integers(0, NUM_STEPS - 1), min_size=1, max_size=3, unique=True))
    before, left = {}, set(range(num_ranks))
    for step in sorted(steps):
        dead = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, max_size=2, unique=True))
        before[step] = draw(st.sampled_from([[set(dead)], [{rank} for rank in dead]]))
        left -= set(dead)
        assume(left)
    hosts = dict(enumerate(draw(st.sampled_from(["a" * num_ranks, ("ab" * num_ranks)[:num_ranks]]))))
    zero_stage, zero_backups = draw(st.sampled_from([(1, 1), (1, 1), (1, 1), (0, 0)]))
    return Deaths(tp_size, dp_size, zero_stage, zero_backups, before, hosts, whole=draw(st.booleans()))


@settings(max_examples=examples(60))
@given(random_deaths(), st.sampled_from(["fp64", "fp32", "bf16"]))
def test_whatever_can_be_survived_is_survived_bitwise(deaths, policy):
    assume(deaths.is_survivable())
    assert_bitwise_undisturbed(deaths, policy)


@pytest.mark.parametrize("policy", ["fp64", "bf16"])
@pytest.mark.parametrize("order", [(0, 1, 2), (3, 2, 1), (1, 3, 0)])
def test_from_four_replicas_to_one(order, policy):
    assert_bitwise_undisturbed(Deaths(1, 4, 1, 1, {step + 1: [{rank}] for step, rank in enumerate(order)}), policy)


def test_before_the_first_step_all_state_is_what_the_seed_makes():
    assert_bitwise_undisturbed(Deaths(1, 3, 1, 1, {0: [{1}], 1: [{0}]}))


def test_spares_hand_over_what_they_hold():
    """tp 2 x dp 2: rank 2 dies, and rank 3 becomes a spare with a range that only rank 1 also has."""
    deaths = Deaths(2, 2, 1, 1, {1: [{2}]})
    assert_bitwise_undisturbed(deaths)
    ranks = [result and result[0] for result in deaths.run()]
    assert ranks[3].state() == [{}] * len(ranks[3].buckets) and all(ranks[0].state())


def test_a_spare_may_be_the_only_holder():
    """tp 2 x dp 3: ranks 2 and 5 die. Range 1 of tp 1 was held by ranks 3 and 5, and rank 3 is a spare now."""
    deaths = Deaths(2, 3, 1, 1, {2: [{2, 5}]})
    assert deaths.is_survivable()
    assert set(plan_shard_map(deaths.grid, 0, 1, zero_stage=1, zero_backups=1, hosts={}).holders[1]) == {3, 5}
    assert_bitwise_undisturbed(deaths)


@settings(max_examples=examples(25))
@given(st.permutations(range(5)), st.integers(1, NUM_STEPS - 1), st.sampled_from(["fp64", "bf16"]), st.booleans())
@example([0, 1, 2, 3, 4], 2, "fp64", False)
def test_until_the_commit_the_old_shard_map_stays(order, step, policy, whole):
    """Ranges are built four times, for the same holders or fewer, always from those of the old shard map."""
    first, second, *_ = order
    deaths = Deaths(1, 5, 1, 1, {step: [{first}, set(), {second}, set()]}, whole=whole)
    assume(deaths.is_survivable())
    assert_bitwise_undisturbed(deaths, policy)


@pytest.mark.parametrize("policy", ["fp64", "bf16"])
def test_a_death_before_the_confirmation_is_resolved_from_the_old_shard_map(policy):
    """Rank 3 dies; the others have built ranges for three when rank 1 dies too. They start again from those of four."""

    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=4, zero_backups=1, policy=policy)
        rank.step(0)
        rank.optimizer.finish_gather()
        if number == 3:
            return None
        whole, before = rank.grid, rank.state()
        rank.optimizer.leave()
        rank.move(1, whole, {0, 1, 2})
        assert all(torch.equal(now[span], was[span]) for now, was in zip(rank.state(), before) for span in was)
        if number == 1:
            return None
        rank.optimizer.discard()
        rank.move(2, whole, {0, 2})
        assert rank.regroup(2, whole, {0, 2})
        for step in range(1, NUM_STEPS):
            rank.step(step)
        return rank.weights()

    first, _, third, _ = run_threads(4, body)
    expected = undisturbed(1, 4, policy)[0][0][NUM_STEPS - 1]
    assert all(torch.equal(ours[name], expected[name]) for ours in (first, third) for name in expected)


def test_a_rank_that_was_behind_updates_before_it_hands_over():
    """Rank 0 still has the gradients from which the others have updated; state of another version is refused."""

    def body(number, world, brings):
        rank = Rank(number, world, tp_size=1, dp_size=3, zero_backups=1)
        rank.reduce(0)
        if number != 0 or brings:
            rank.optimizer.update_to(1, update_step(0))
        if number == 2:
            return None
        rank.move(1, rank.grid, {0, 1})
        rank.regroup(1, rank.grid, {0, 1})
        return rank.weights()

    expected = undisturbed(1, 3, "fp64")[0][0][0]
    for weights in run_threads(3, lambda number, world: body(number, world, True))[:2]:
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    with pytest.raises(
        ProtocolError, match=r"expected state of .* iteration (0|1), .*; got state of .* iteration (?!\1)"
    ):
        run_threads(3, lambda number, world: body(number, world, False))


def test_no_reshard_moves_a_parameter():
    """Layers keep their views of weights and gradients through all changes."""

    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=3, zero_backups=1)
        addresses = [(p.data_ptr(), p.main_grad.data_ptr()) for p in rank.stage.parameters()]
        rank.step(0)
        rank.optimizer.finish_gather()
        if number == 0:
            return None
        rank.move(1, rank.grid, {1, 2})
        rank.regroup(1, rank.grid, {1, 2})
        assert addresses == [(p.data_ptr(), p.main_grad.data_ptr()) for p in rank.stage.parameters()]
        return [len(bucket.weights) for bucket in rank.buckets], [b.plan.length(2) for b in rank.buckets]

    for lengths, planned in run_threads(3, body)[1:]:
        assert lengths == planned


def test_a_range_without_a_holder_is_an_error():
    """Without backups the dead rank's range is lost."""

    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=2)
        if number == 1:
            with pytest.raises(AssertionError, match="no live rank holds elements 0 to"):
                rank.move(1, rank.grid, {1})

    run_threads(2, body)


def test_phases_come_in_their_order():
    """Faults are injected there: `reduce_scatter` before any range is complete, `backup` after the rank's own are."""
    seen = []

    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=2, zero_backups=1, phase_hook=seen.append if number == 0 else len)
        rank.step(0)
        return len(rank.buckets)

    num_buckets = run_threads(2, body)[0]
    assert [name for name, _ in itertools.groupby(seen)] == ["reduce_scatter", "backup", "update", "all_gather"]
    assert seen.count("update") == num_buckets


@pytest.mark.parametrize("zero_stage", [1, 0])
def test_a_rank_that_comes_back_keeps_no_range_of_the_time_before(zero_stage):
    """It was taken for dead while it ran on, the other one has trained without it, and now it joins as a new rank does.
    Its old ranges have the spans of the new ones, and are of an earlier step."""
    both = Grid.uniform(tp_size=1, pp_size=1, dp_size=2)
    alone, _ = both.without({1})

    def change(rank, generation, old, new, live):
        old, new = rank.shard_maps_on(old), rank.shard_maps_on(new)
        plan = ReshardPlan(generation=generation, old=old, new=new, live=live)
        before = [bucket.owned for bucket in rank.buckets]
        rank.optimizer.leave()
        rank.optimizer.reshard(plan, rank.world.links(rank.rank, generation))
        rank.optimizer.commit()
        if rank.rank == 1 or zero_stage == 0:  # the ranges of rank 0 without ZeRO are the same, and up to date
            is_kept = rank.rank == 0
            assert all((bucket.owned is shard) == is_kept for bucket, shard in zip(rank.buckets, before))

    def train(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=2, zero_stage=zero_stage, zero_backups=1)
        rank.step(0)
        if number == 0:
            change(rank, 1, both, alone, {0})
            rank.join(1, alone)
            rank.optimizer.gather()
            rank.step(1)
        else:
            rank.optimizer.start_from(2, Bucket.initial_shard)  # as joining.load_train_state does
        change(rank, 2, alone, both, {0, 1})
        rank.join(2, both)
        rank.optimizer.gather()
        for step in range(2, NUM_STEPS):
            rank.step(step)
        return rank.weights()

    ((history, _),) = undisturbed(1, 2, "fp64")
    for weights in run_threads(2, train):
        assert all(torch.equal(weights[name], history[NUM_STEPS - 1][name]) for name in weights)


def test_gradients_are_kept_until_a_change_is_committed():
    """Rank 2 alone has the entry of step 1, and is taken for dead: the others build ranges without it. But before they
    commit, the coordinator is lost, and rank 2 is a member again for its successor. Now they need that update."""

    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=3, zero_backups=1)
        rank.reduce(0)
        rank.optimizer.leave()
        if number == 2:
            rank.optimizer.update_to(1, update_step(0))
        else:
            rank.move(1, rank.grid, {0, 1})
        rank.optimizer.discard()
        rank.optimizer.update_to(1, update_step(0))
        rank.move(2, rank.grid, {0, 1, 2})
        rank.regroup(2, rank.grid, {0, 1, 2})
        rank.step(1)
        return rank.weights()

    expected = undisturbed(1, 3, "fp64")[0][0][1]
    for weights in run_threads(3, body):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
