"""Ranks die that hold an embedding shared with another stage's ranks: what this layout adds to the kill matrix.

The deaths themselves are rows of tests/support/kill_cells.py. After a loss the ranges of the matrix are cut again over
both stages, also on the stage that has lost no rank. `assert_same_run` compares the copies of all replicas of both.
"""

import pytest
import torch

from parallel3d.optim import distributed_optimizer
from parallel3d.optim.reshard import move_bucket
from parallel3d.trainer.generation import shard_maps_of
from tests.support import tiny_runs
from tests.support.kill_cells import SHARED_MATRIX_LAYOUTS, Outcome, kill_fault
from tests.support.kill_layouts import config_of, grid_of
from tests.support.thread_kills import assert_same_run, outcome_of, run, undisturbed
from tests.trainer.test_kill_costs import elements_of


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


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [(0, 6), (0, 1), (1, 7)], ids=str)
def test_a_drained_rank_hands_over_to_both_ends(ranks):
    config = config_of("tied-pp2-dp4", num_steps=5)
    done = run(
        config, [*(kill_fault(rank, "forward", kind="term") for rank in ranks), kill_fault(5, "backward", step=4)]
    )
    assert set(done.dead) == {*ranks, 5} and done.num_changes in (2, 3) and not done.abort_reason
    assert_same_run(done, undisturbed("tied-pp2-dp4", 5))


# --- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 3])
def test_the_end_without_a_loss_is_cut_again_too(rank, monkeypatch):
    """Stage 1 keeps its own ranges; of the matrix each of its ranks receives the elements of its new range that its old
    one lacked."""
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


# --- that it can fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*SHARED_MATRIX_LAYOUTS[:-1], "tied-pp2-dp4"])  # ZB-V has both ends on a stage
def test_a_matrix_that_each_stage_trains_alone_is_detected(layout, monkeypatch):
    """Reduced over its own stage only, the copies differ: `assemble` refuses."""
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

        def recorded(iteration, *rest):
            runtime.optimizer.finish_gather()
            seen.setdefault((runtime.coordinates.tp, iteration), []).append(weight.detach().clone())
            begin(iteration, *rest)

        runtime.optimizer.begin_iteration = recorded

    run(config_of("tied-pp2-dp2-tp2", num_steps=5), watch=watch)
    assert len(seen) == 2 * 5
    for copies in seen.values():
        assert len(copies) == 4 and all(torch.equal(copy, copies[0]) for copy in copies)
    assert not torch.equal(seen[0, 1][0], seen[0, 5][0])
