"""Workers die that hold an embedding together with another stage's: the run goes on bit for bit, or says why it can't.

As test_kill_matrix.py, with one matrix on both ends of the pipeline. After a loss its ranges are cut anew over both
stages, also on the one that has lost nobody. `assert_same_run` compares the copies of all replicas of both.
"""

import itertools

import pytest
import torch

from parallel3d.elastic.protocol.survivability import check_survivability
from parallel3d.optim import distributed_optimizer
from parallel3d.optim.reshard import move_bucket
from parallel3d.parallel.grid import Grid
from parallel3d.trainer.generation import shard_maps_of
from tests.support import tiny_runs
from tests.support.thread_cells import (
    AFTER_GO,
    BEFORE_GO,
    TIED,
    Outcome,
    after,
    assert_same_run,
    config_of,
    grid_of,
    kill_fault,
    outcome_of,
    phases_of,
    run,
    undisturbed,
)

PHASES = ("reduce_scatter", "backup", "all_reduce", "update", "all_gather")
"""Where the shared matrix is under way."""


def single_cells():
    """Every coordinate of the smaller layouts; phases by turns, three a rank, of which two touch the matrix. (Without
    `send`: with few micro-batches not every rank has something to receive after it.)"""
    turns = itertools.count()
    for layout in ("tied-pp2-dp2-tp2", "tied-pp3-dp2", "tied-stages-2-1-3", "tied-interleaved"):
        grid = grid_of(layout)
        for rank in grid.ranks:
            if not survives(grid, {rank}):
                continue
            others = [phase for phase in phases_of(grid, rank) if phase not in (*PHASES, "send")]
            turn = next(turns)
            for phase in (PHASES[2 * turn % 5], PHASES[(2 * turn + 1) % 5], others[turn % len(others)]):
                yield pytest.param(layout, rank, phase, id=f"{layout}-rank{rank}-{phase}")


def survives(grid: Grid, dead: set[int]) -> bool:
    return check_survivability(grid, zero_stage=1, zero_backups=1, hosts={}, dead=dead).can_continue


@pytest.mark.sample(5)
@pytest.mark.parametrize("layout, rank, phase", list(single_cells()))
def test_one_death(layout, rank, phase):
    done = run(config_of(layout), [kill_fault(rank, phase)])
    assert outcome_of(done) == Outcome(frozenset({rank}), 1, True)
    assert_same_run(done, undisturbed(layout))


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["tied-pp2-dp2-tp2", "tied-stages-2-1-3"])
@pytest.mark.parametrize("phase", ["backward", "backup", "update"])
def test_without_zero_every_replica_of_both_ends_holds_all(layout, phase):
    """All but one replica of each end die: the first in a step, the others before the change for it is in force."""
    config, grid = config_of(layout, zero_stage=0), grid_of(layout)
    first, *others = [rank for end in grid.embedding_stages for rank in grid.dp_ranks(end, 0)[1:]]
    done = run(config, [kill_fault(first, phase), *(kill_fault(rank, "recovery_moves") for rank in others)])
    assert outcome_of(done) == Outcome(frozenset({first, *others}), 1, True)
    assert_same_run(done, undisturbed(layout))


# --- two deaths -------------------------------------------------------------------------------------------------------


def pairs():
    """One of each end, and two of one end; the second death in all phases of the recovery by turns."""
    turns = itertools.cycle(itertools.product((*BEFORE_GO, AFTER_GO), PHASES))
    for layout in ("tied-pp2-dp4", "tied-stages-2-1-3"):
        embedding_ranks = grid_of(layout).embedding_ranks(0)
        for first, second in itertools.combinations(embedding_ranks, 2):
            if len(embedding_ranks) > 5 and {first, second}.isdisjoint({1, 6}):
                continue  # enough of the large one
            recovery, phase = next(turns)
            name = f"{layout}-rank{first}-{phase}-then-rank{second}-{recovery}"
            yield pytest.param(layout, first, phase, second, recovery, id=name)


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout, first, phase, second, recovery", list(pairs()))
def test_two_deaths(layout, first, phase, second, recovery):
    """Owner and backup of a range of the matrix are owner and backup of a range of their stage: who takes both is told
    both ranks."""
    config = config_of(layout)
    done = run(config, [kill_fault(first, phase), kill_fault(second, recovery)])
    expected = after(config, *([{first, second}] if recovery in BEFORE_GO else [{first}, {second}]))
    assert outcome_of(done) == expected
    if expected.goes_on:
        assert_same_run(done, undisturbed(layout))
        return
    named = [f"ranks {a} and {b} were lost" for a, b in ((first, second), (second, first))]
    assert any(words in done.abort_reason for words in (*named, "no replica left"))


def test_the_pairs_end_both_ways():
    fates = {survives(grid_of(p.values[0]), {p.values[1], p.values[3]}) for p in pairs()}
    assert fates == {True, False}


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("order", [(0, 1, 2, 4, 5, 6), (7, 0, 6, 3, 5, 1)], ids=str)
def test_down_to_one_replica_of_each_end(order, zero_stage):
    config = config_of("tied-pp2-dp4", num_steps=8, zero_stage=zero_stage)
    phases = itertools.cycle(("update", "reduce_scatter", "backup", "all_gather", "all_reduce", "forward"))
    done = run(config, [kill_fault(rank, phase, 2 + n) for n, (rank, phase) in enumerate(zip(order, phases))])
    assert outcome_of(done) == Outcome(frozenset(order), 6, True)
    assert_same_run(done, undisturbed("tied-pp2-dp4", 8))


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [(0, 6), (0, 1), (1, 7)], ids=str)
def test_who_leaves_hands_over_to_both_ends(ranks):
    config = config_of("tied-pp2-dp4", num_steps=5)
    done = run(
        config, [*(kill_fault(rank, "forward", kind="term") for rank in ranks), kill_fault(5, "backward", step=4)]
    )
    assert set(done.dead) == {*ranks, 5} and done.num_changes in (2, 3) and not done.abort_reason
    assert_same_run(done, undisturbed("tied-pp2-dp4", 5))


# --- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 3])
def test_the_end_that_has_lost_nobody_is_cut_anew_too(rank, monkeypatch):
    """Stage 1 keeps its own ranges; of the matrix each of its ranks gets what its new range has and its old had not."""
    config, grid = config_of("tied-pp2-dp4"), grid_of("tied-pp2-dp4")
    left, _ = grid.without({rank})
    received = {}

    def counted(bucket, number, change, *, rank, version, links):
        shards, num_bytes = move_bucket(bucket, number, change, rank=rank, version=version, links=links)
        if rank in grid.dp_ranks(1, 0):
            tied = bucket.plan.key.tied
            received[tied] = received.get(tied, 0) + num_bytes
        return shards, num_bytes

    monkeypatch.setattr(distributed_optimizer, "move_bucket", counted)
    assert_same_run(run(config, [kill_fault(rank, "backup")]), undisturbed("tied-pp2-dp4"))
    one = tiny_runs.prepare(config, grid, 4)
    plan = one.optimizer.buckets[-1].plan
    before, after = (shard_maps_of(config, one.coordinates, each, {}).of(plan.key) for each in (grid, left))
    missing = sum(
        len(elements_of(plan, after, other) - elements_of(plan, before, other)) for other in grid.dp_ranks(1, 0)
    )
    assert plan.key.tied and received == {False: 0, True: 2 * 8 * missing} and missing > 0


def elements_of(plan, shard_map, rank):
    spans = [plan.range_of(number, shard_map.num_ranges) for number in shard_map.ranges_of(rank)]
    return {index for span in spans for index in span if index < plan.num_elements}


# --- that it can fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", TIED)
def test_a_matrix_that_each_stage_trains_alone_is_found_out(layout, monkeypatch):
    """Reduced over its own stage only, each copy goes its own way: `assemble` refuses."""
    from parallel3d.parallel import groups

    monkeypatch.setattr(groups.Groups, "tied", property(lambda self: self.dp))
    with pytest.raises(AssertionError, match="embedding.weight differs between replicas"):
        run(config_of(layout, zero_stage=0))


def test_the_copies_on_both_ends_are_the_same_bits_after_every_step():
    seen = {}

    def watch(number, runtime):
        if runtime.coordinates.pp not in runtime.first_grid.embedding_stages:
            return
        weight = runtime.optimizer.buckets[-1].parameters[0]
        begin = runtime.optimizer.begin_iteration

        def noted(iteration, *rest):
            runtime.optimizer.finish_gather()
            seen.setdefault((runtime.coordinates.tp, iteration), []).append(weight.detach().clone())
            begin(iteration, *rest)

        runtime.optimizer.begin_iteration = noted

    run(config_of("tied-pp2-dp2-tp2", num_steps=5), watch=watch)
    assert len(seen) == 2 * 5
    for copies in seen.values():
        assert len(copies) == 4 and all(torch.equal(copy, copies[0]) for copy in copies)
    assert not torch.equal(seen[0, 1][0], seen[0, 5][0])
