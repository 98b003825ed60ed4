"""Workers die at every place and in every phase: the run goes on as if nothing had happened, or says why it can't.

Ranks are threads with the real trainer, the real coordinator's protocol and exact sums: whatever the faults, losses,
gradients, weights and evaluations are bitwise those of the undisturbed run.

How many changes of membership there are is exact wherever the protocol makes it so:

    one death                                      one
    a second one in the recovery, before the go    one: nothing was in force yet
    a second one after the go (new groups)         two
    two deaths two or more steps apart             two: a step that is over was made by all
    two deaths in one step                         one or two, as the coordinator hears of the second before all have
                                                   confirmed the change for the first, or after; `outcomes` lists them

Of deaths that may leave an entry behind (all-reduce, update, all-gather, evaluation) there is one in a step: whoever
is told of another's death first leaves the step by a shorter way, on which that phase does not come.
"""

import itertools
import random

import pytest

from parallel3d.trainer.generation import shard_maps_of
from tests.support import tiny_runs
from tests.support.thread_cells import (
    AFTER_GO,
    BEFORE_GO,
    DOCUMENTS,
    EARLY,
    LATE,
    LAYOUTS,
    MAY_LEAVE_AN_ENTRY,
    MODELS,
    PRECISIONS,
    RECOMPUTED,
    SCHEDULES,
    STEP,
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

# --- one death --------------------------------------------------------------------------------------------------------


SINGLE = [
    pytest.param(layout, rank, phase, id=f"{layout}-rank{rank}-{phase}")
    for layout in LAYOUTS
    for rank in grid_of(layout).ranks
    for phase in phases_of(grid_of(layout), rank)
]


@pytest.mark.each_value
@pytest.mark.parametrize("layout, rank, phase", SINGLE)
def test_one_death(layout, rank, phase):
    done = run(config_of(layout), [kill_fault(rank, phase)])
    assert outcome_of(done) == Outcome(frozenset({rank}), 1, True)
    assert_same_run(done, undisturbed(layout))


@pytest.mark.sample(3)
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce_scatter", "backup", "all_reduce", "update"])
@pytest.mark.parametrize("layout, rank", [(layout, rank) for layout in MODELS for rank in (0, 3, 6)])
def test_one_death_with_another_model(layout, rank, phase):
    done = run(config_of(layout), [kill_fault(rank, phase)])
    assert outcome_of(done) == Outcome(frozenset({rank}), 1, True)
    assert_same_run(done, undisturbed(layout))


@pytest.mark.each_value
@pytest.mark.parametrize(
    "layout, rank, phase",
    [
        pytest.param(layout, rank, phase, id=f"{layout}-rank{rank}-{phase}")
        for layout in SCHEDULES
        for rank in grid_of(layout).ranks
        for number, phase in enumerate(phases_of(grid_of(layout), rank))
        if layout != "interleaved-pp3" or (number + rank) % 3 == 0
    ],
)
def test_one_death_under_every_schedule(layout, rank, phase):
    """What the loss leaves is run by another plan, chunks and all: of the same sums."""
    done = run(config_of(layout), [kill_fault(rank, phase)])
    assert outcome_of(done) == Outcome(frozenset({rank}), 1, True)
    assert_same_run(done, undisturbed(layout))


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("layout, rank", [(layout, rank) for layout in RECOMPUTED for rank in (0, 6)])
def test_one_death_with_recomputed_layers(layout, rank, phase):
    done = run(config_of(layout), [kill_fault(rank, phase)])
    assert outcome_of(done) == Outcome(frozenset({rank}), 1, True)
    assert_same_run(done, undisturbed(layout))


@pytest.mark.sample(3)
@pytest.mark.parametrize("phase", ["forward", "send", "backward", "all_reduce"])
@pytest.mark.parametrize("layout, rank", [(layout, rank) for layout in DOCUMENTS for rank in (0, 3, 5)])
def test_one_death_where_documents_are_kept_apart(layout, rank, phase):
    done = run(config_of(layout), [kill_fault(rank, phase)])
    assert outcome_of(done) == Outcome(frozenset({rank}), 1, True)
    assert_same_run(done, undisturbed(layout))


def test_documents_end_within_the_sequences_of_these_runs():
    config = config_of("documents-pp3-dp2", num_steps=1)
    together = config.model_copy(update={"data": config.data.model_copy(update={"document_mask": False})})
    assert run(config).steps[1]["loss"] != run(together).steps[1]["loss"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", SCHEDULES)
def test_two_deaths_at_two_stages_under_every_schedule(layout):
    """No pipeline is whole any more: every micro-batch of one of them changes its replica, chunk after chunk."""
    done = run(config_of(layout, num_steps=5), [kill_fault(0, "backward"), kill_fault(3, "forward", 4)])
    assert outcome_of(done) == Outcome(frozenset({0, 3}), 2, True)
    assert_same_run(done, undisturbed(layout, 5))
    assert done.steps[5]["planned_bubble"] != done.steps[1]["planned_bubble"]
    assert all(0 <= record["bubble"] < 1 for record in done.steps.values() if "bubble" in record)


@pytest.mark.sample(5)
@pytest.mark.parametrize("phase", phases_of(grid_of("pp2-dp4"), 0))
@pytest.mark.parametrize("layout", PRECISIONS)
def test_one_death_in_another_precision(layout, phase):
    """A rank of each stage in turn; what is moved, and a repeated update's noise, are as in the undisturbed run."""
    rank = 1 if phase in ("load", "backward", "backup", "update") else grid_of(layout).ranks[-1]
    done = run(config_of(layout), [kill_fault(rank, phase)])
    assert outcome_of(done) == Outcome(frozenset({rank}), 1, True)
    assert_same_run(done, undisturbed(layout))


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["bf16", "bf16_sr"])
def test_several_deaths_in_another_precision(policy):
    """The state moves twice, and a replica dies while it does."""
    layout = f"{policy}-pp2-dp4"
    deaths = [
        kill_fault(0, "update"),
        kill_fault(2, "recovery_moves"),
        kill_fault(5, "backup", 4),
        kill_fault(3, "all_reduce", 4),
    ]
    done = run(config_of(layout, num_steps=5), deaths)
    assert set(done.dead) == {0, 2, 3, 5} and not done.abort_reason
    assert_same_run(done, undisturbed(layout, 5))


# --- a second death in the recovery -----------------------------------------------------------------------------------


def recovery_cells():
    """For each layout some first deaths, in phases that take turns, and every possible second one."""
    turns = itertools.count()
    firsts = {"pp2-dp2-tp2": (0, 6), "pp3-dp2": (3,), "pp2-dp4": (5,)}
    for layout, ranks in firsts.items():
        grid = grid_of(layout)
        for first in ranks:
            left, _ = grid.without({first})
            phases = phases_of(grid, first)
            for second, recovery in itertools.product(sorted(set(grid.ranks) - {first}), (*BEFORE_GO, AFTER_GO)):
                if recovery == AFTER_GO and not left.holds(second):
                    continue  # a spare has no groups
                phase = phases[next(turns) % len(phases)]
                name = f"{layout}-rank{first}-{phase}-then-rank{second}-{recovery}"
                yield pytest.param(layout, first, phase, second, recovery, id=name)


@pytest.mark.sample(6)
@pytest.mark.parametrize("layout, first, phase, second, recovery", list(recovery_cells()))
def test_a_second_death_in_the_recovery(layout, first, phase, second, recovery):
    config = config_of(layout)
    done = run(config, [kill_fault(first, phase), kill_fault(second, recovery)])
    in_one = [{first, second}] if recovery in BEFORE_GO else [{first}, {second}]
    expected = after(config, *map(frozenset, in_one))
    assert outcome_of(done) == expected
    if expected.goes_on:
        assert_same_run(done, undisturbed(layout))
    else:
        assert "no replica left" in done.abort_reason or "no holder left" in done.abort_reason


@pytest.mark.each_value
@pytest.mark.parametrize("phase", BEFORE_GO)
@pytest.mark.parametrize("trio", [(0, 2, 3), (0, 1, 4), (1, 6, 4), (7, 5, 2), (3, 4, 5)], ids=str)
def test_three_deaths_before_the_go_are_one_change(trio, phase):
    config = config_of("pp2-dp4")
    first, *others = trio
    done = run(config, [kill_fault(first, "backward"), *(kill_fault(rank, phase) for rank in others)])
    expected = after(config, frozenset(trio))
    if expected.goes_on:
        assert outcome_of(done) == expected
        assert_same_run(done, undisturbed("pp2-dp4"))
    else:  # the first two may be too many already
        assert done.abort_reason and done.num_changes == 0 and set(done.dead) <= set(trio)


def test_both_ranks_of_a_replica():
    """0 and 1 share the layers of stage 0, replica 0: all of it is gone, and the other replica holds its state."""
    config = config_of("pp2-dp2-tp2")
    for recovery in BEFORE_GO:
        done = run(config, [kill_fault(0, "forward"), kill_fault(1, recovery)])
        assert outcome_of(done) == Outcome(frozenset({0, 1}), 1, True)
        assert_same_run(done, undisturbed("pp2-dp2-tp2"))


# --- several deaths in the steps --------------------------------------------------------------------------------------


def random_faults(layout, seed):
    """Two or three deaths of different replicas, in two steps that are not neighbours."""
    numbers, grid = random.Random(f"{layout} {seed}"), grid_of(layout)
    replicas = [(stage, replica) for stage in range(grid.pp_size) for replica in sorted(grid.stages[stage])]
    faults, closed = [], set()
    for replica in numbers.sample(replicas, numbers.choice((2, 3))):
        rank, step = numbers.choice(grid.tp_ranks(replica)), numbers.choice((2, 4))
        phases = phases_of(grid, rank)
        phase = numbers.choice([phase for phase in phases if step not in closed or phase not in MAY_LEAVE_AN_ENTRY])
        closed |= {step} if phase in MAY_LEAVE_AN_ENTRY else set()
        faults.append(kill_fault(rank, phase, step))
    return faults


def outcomes(config, faults):
    """All that may come of deaths in steps that are not neighbours: those of one step in any order and company."""
    by_step = [
        list(waves_of(set(early), {fault.rank for fault in group if fault.phase in LATE}))
        for _, group in itertools.groupby(sorted(faults, key=lambda fault: fault.step), key=lambda fault: fault.step)
        for group in [list(group)]
        for early in [[fault.rank for fault in group if fault.phase in EARLY]]
    ]
    return {after(config, *itertools.chain(*waves)) for waves in itertools.product(*by_step)}


def waves_of(ranks, late):
    """Ordered partitions of `ranks`, those who die after the step's entry at the end."""
    if not ranks:
        yield [frozenset(late)] if late else []
        return
    for size in range(1, len(ranks) + 1):
        for first in itertools.combinations(sorted(ranks), size):
            for rest in waves_of(ranks - set(first), late):
                yield [frozenset(first), *rest]


def name_of(layout, faults):
    return "-".join([layout, *(f"rank{fault.rank}-step{fault.step}-{fault.phase}" for fault in faults)])


RANDOM = [
    pytest.param(layout, seed, id=name_of(layout, random_faults(layout, seed)))
    for layout in LAYOUTS
    for seed in range(12)
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout, seed", RANDOM)
def test_several_deaths(layout, seed):
    config, faults = config_of(layout, num_steps=5), random_faults(layout, seed)
    done = run(config, faults)
    expected = outcomes(config, faults)
    assert outcome_of(done) in expected, expected
    if not done.abort_reason:
        assert set(done.dead) == {fault.rank for fault in faults}
        assert_same_run(done, undisturbed(layout, 5))


def test_random_deaths_do_not_all_end_alike():
    """The cells above hold runs that must go on, runs that must halt and runs that may do either."""
    kinds = {frozenset(o.goes_on for o in outcomes(config_of(p.values[0]), random_faults(*p.values))) for p in RANDOM}
    assert {frozenset({True}), frozenset({False})} <= kinds


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("order", [(0, 1, 2, 4, 5, 6), (7, 0, 6, 3, 5, 1), (2, 7, 1, 6, 3, 4)], ids=str)
def test_down_to_one_replica_of_each_stage(order, zero_stage):
    """A death a step, each in another phase: the run ends with two ranks of eight, each holding all of its stage."""
    config = config_of("pp2-dp4", num_steps=8, zero_stage=zero_stage)
    phases = ("forward", "backward", "reduce_scatter", "backup", "send", "all_reduce")
    done = run(config, [kill_fault(rank, phase, 2 + n) for n, (rank, phase) in enumerate(zip(order, phases))])
    assert outcome_of(done) == Outcome(frozenset(order), 6, True)
    assert_same_run(done, undisturbed("pp2-dp4", 8))


# --- what can not go on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "update"])
def test_without_backups_the_first_death_ends_the_run_and_says_why(phase):
    done = run(config_of("pp2-dp4", zero_backups=0), [kill_fault(2, phase)])
    assert outcome_of(done) == Outcome(frozenset({2}), 0, False)
    assert done.abort_reason == (
        "range 2 of the optimizer state of stage 0, tp 0 has no holder left: rank 2, its only holder, was lost "
        "(elastic.zero_backups is 0)"
    )


def test_a_stage_without_a_replica_is_named():
    done = run(config_of("pp2-dp2-tp2"), [kill_fault(6, "backward"), kill_fault(5, "recovery_moves")])
    assert done.abort_reason.startswith(
        "stage 1 has no replica left: lost pp1 dp0 tp1 (rank 5) and pp1 dp1 tp0 (rank 6)"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
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


# --- what it costs ----------------------------------------------------------------------------------------------------


def count_iterations(config, faults):
    """The run, and how often each rank has begun each iteration."""
    begun = []

    def watch(rank, runtime):
        begin = runtime.optimizer.begin_iteration

        def noted(iteration, *rest):
            begun.append((rank, iteration))
            begin(iteration, *rest)

        runtime.optimizer.begin_iteration = noted

    return run(config, faults, watch=watch), begun


@pytest.mark.each_value
@pytest.mark.parametrize("phase", ["forward", "all_reduce", "update", "evaluate"])
@pytest.mark.parametrize("layout, rank", [("pp2-dp2-tp2", 5), ("pp3-dp2", 2), ("pp2-dp4", 0)])
def test_who_takes_its_leave_costs_no_step(layout, rank, phase):
    """Told in step 2, whatever it is at; says so with its part of step 3, hands over after it. Nothing is repeated."""
    config = config_of(layout, num_steps=4)
    done, begun = count_iterations(config, [kill_fault(rank, phase, kind="term")])
    assert outcome_of(done) == Outcome(frozenset({rank}), 1, True)
    assert_same_run(done, undisturbed(layout, 4))
    assert len(begun) == len(set(begun))
    assert [step for number, step in begun if number == rank] == [1, 2, 3]


@pytest.mark.sample(4)
@pytest.mark.parametrize("phase", [phase for phase in (*EARLY, *LATE) if phase != "load"])
def test_a_death_costs_at_most_the_step_it_happens_in(phase):
    """After the entry is held by anybody the step is not repeated: all finish it from what they have."""
    done, begun = count_iterations(config_of("pp2-dp4"), [kill_fault(6, phase)])
    repeated = {step for number, step in set(begun) if begun.count((number, step)) > 1}
    if phase != "all_reduce":  # the dead rank's part was there: the others may have the entry or not
        assert repeated == ({STEP} if phase in EARLY else set())
    assert repeated <= {STEP}
    assert max(begun.count(each) for each in begun) <= 2
    assert_same_run(done, undisturbed("pp2-dp4"))


@pytest.mark.each_value
@pytest.mark.parametrize("phase, num_rows", [("backup", 2), ("update", 3)])
@pytest.mark.parametrize("rank", [0, 3, 5, 6])
def test_only_what_is_missing_travels(rank, phase, num_rows):
    """Four ranges of two holders become three: the survivors get what their new ranges have and they had not. Two
    moments, and the weights if some rank had not gathered the newest ones."""
    config, grid = config_of("pp2-dp4"), grid_of("pp2-dp4")
    done = run(config, [kill_fault(rank, phase)])
    left, _ = grid.without({rank})
    survivors = left.dp_ranks(rank // 4, 0)
    one = tiny_runs.prepare(config, grid, survivors[0])
    before, after = (shard_maps_of(config, one.coordinates, each, {}).stage for each in (grid, left))
    num_elements = sum(
        len(elements_of(bucket.plan, after, other) - elements_of(bucket.plan, before, other))
        for bucket in one.optimizer.buckets
        for other in survivors
    )
    assert done.moved_bytes == num_rows * 8 * num_elements > 0


def elements_of(plan, shard_map, rank):
    """What a rank holds of a bucket, padding left out."""
    spans = [plan.range_of(number, shard_map.num_ranges) for number in shard_map.ranges_of(rank)]
    return {index for span in spans for index in span if index < plan.num_elements}
