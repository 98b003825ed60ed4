"""The cost of a death or a drain, and the messages of deaths that end the run."""

import pytest

from parallel3d.trainer.generation import shard_maps_of
from tests.support import tiny_runs
from tests.support.kill_cells import STEP, Outcome, kill_fault
from tests.support.kill_layouts import BASE, EARLY, LATE, config_of, grid_of
from tests.support.thread_kills import assert_same_run, outcome_of, run, undisturbed

# --- costs ------------------------------------------------------------------------------------------------------------


def count_iterations(config, faults):
    """Returns the run, and (rank, iteration) each time that a rank starts an iteration."""
    started = []

    def watch(rank, runtime):
        begin = runtime.optimizer.begin_iteration

        def counted(iteration, *rest):
            started.append((rank, iteration))
            begin(iteration, *rest)

        runtime.optimizer.begin_iteration = counted

    return run(config, faults, watch=watch), started


def attempts_of(done):
    """By step, how often the leader has computed it, as its record says."""
    return {step: record["num_attempts"] for step, record in done.steps.items() if "num_attempts" in record}


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", ["forward", "all_reduce", "update", "evaluate"])
@pytest.mark.parametrize("layout, rank", [("pp2-dp2-tp2", 5), ("pp3-dp2", 2), ("pp2-dp4", 0)])
def test_a_drain_costs_no_step(layout, rank, phase):
    """Requested in step 2, in any phase; announced in the entry of step 3, followed by the handover. No step is
    repeated."""
    config = config_of(layout, num_steps=4)
    done, started = count_iterations(config, [kill_fault(rank, phase, kind="term")])
    assert outcome_of(done) == Outcome(frozenset({rank}), 1, True)
    assert_same_run(done, undisturbed(layout, 4))
    assert len(started) == len(set(started)) and attempts_of(done) == {}
    assert [step for number, step in started if number == rank] == [1, 2, 3]


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", [phase for phase in (*EARLY, *LATE) if phase != "load"])
def test_a_death_costs_at_most_the_step_it_happens_in(phase):
    """Once a rank holds the entry the step is not repeated: all finish it from what they have."""
    done, started = count_iterations(config_of("pp2-dp4"), [kill_fault(6, phase)])
    repeated = {step for number, step in set(started) if started.count((number, step)) > 1}
    if phase != "all_reduce":  # the dead rank's part was there: the others may have the entry or not
        assert repeated == ({STEP} if phase in EARLY else set())
    assert repeated <= {STEP}
    assert max(started.count(each) for each in started) <= 2
    assert attempts_of(done) == {step: 2 for step in repeated if started.count((0, step)) == 2}
    assert_same_run(done, undisturbed("pp2-dp4"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", ["backup", "update"])
@pytest.mark.parametrize("rank", [0, 3, 5, 6])
def test_only_what_is_missing_travels(rank, phase):
    """Four ranges with two holders each become three: survivors receive only the elements of their new ranges that
    they lacked. Two moments, and the weights if a rank had not gathered the newest ones: after a death in the update
    the gather that the dead rank has started may or may not have reached everybody."""
    config, grid = config_of("pp2-dp4"), grid_of("pp2-dp4")
    gathered = set()

    def watch(number, runtime):
        reshard = runtime.optimizer.reshard

        def watched(change, links):
            if change.old is not None:
                gathered.add(change.weights_gathered)
            return reshard(change, links)

        runtime.optimizer.reshard = watched

    done = run(config, [kill_fault(rank, phase)], watch=watch)
    (weights_gathered,) = gathered
    assert weights_gathered or phase == "update"
    left, _ = grid.without({rank})
    survivors = left.dp_ranks(rank // 4, 0)
    one = tiny_runs.prepare(config, grid, survivors[0])
    before, after = (shard_maps_of(config, one.coordinates, each, {}).stage for each in (grid, left))
    num_elements = sum(
        len(elements_of(bucket.plan, after, other) - elements_of(bucket.plan, before, other))
        for bucket in one.optimizer.buckets
        for other in survivors
    )
    num_rows = 2 if weights_gathered else 3
    assert done.moved_bytes == num_rows * 8 * num_elements > 0


def elements_of(plan, shard_map, rank):
    """The elements of a bucket that a rank holds, without padding."""
    spans = [plan.range_of(number, shard_map.num_ranges) for number in shard_map.ranges_of(rank)]
    return {index for span in spans for index in span if index < plan.num_elements}


# --- fatal deaths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "update"])
def test_without_backups_the_first_death_ends_the_run_with_the_reason(phase):
    done = run(config_of("pp2-dp4", zero_backups=0), [kill_fault(2, phase)])
    assert outcome_of(done) == Outcome(frozenset({2}), 0, False)
    assert done.abort_reason == (
        "range 2 of the optimizer state of stage 0, tp 0 has no holder left: rank 2, its only holder, was lost "
        "(elastic.zero_backups is 0)"
    )


def test_a_stage_without_a_replica_is_named():
    done = run(config_of("pp2-dp2-tp2"), [kill_fault(7, "backward"), kill_fault(5, "recovery_moves")])
    assert done.abort_reason.startswith(
        "stage 1 has no replica left: lost pp1 dp0 tp1 (rank 5) and pp1 dp1 tp1 (rank 7)"
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", BASE)
def test_with_all_state_everywhere_only_a_stage_without_replica_ends_the_run(layout):
    """Under zero_stage 0 all but one replica of each stage may die at once."""
    config, grid = config_of(layout, zero_stage=0), grid_of(layout)
    dead = [grid.tp_ranks((stage, replica))[0] for stage in range(grid.pp_size) for replica in grid.replicas[stage][1:]]
    first, *others = dead
    done = run(config, [kill_fault(first, "backup"), *(kill_fault(rank, "recovery_report") for rank in others)])
    assert outcome_of(done) == Outcome(frozenset(dead), 1, True)
    assert_same_run(done, undisturbed(layout))
    done = run(
        config, [kill_fault(first, "all_reduce"), *(kill_fault(rank, "recovery_moves") for rank in (*others, 0))]
    )
    assert done.abort_reason and done.num_changes == 0 and done.abort_reason.startswith("stage ")
