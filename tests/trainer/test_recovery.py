"""One rank's way into the next generation, at the places that no fault of its own reaches: entries that it lacks,
suspicions that only it has, the first generation and the last step.

All runs are compared bit for bit with the undisturbed one.
"""

from collections import Counter
from dataclasses import replace

import pytest

from parallel3d.errors import GenerationEnded
from parallel3d.inprocess.scheduler import RankDied
from parallel3d.inprocess.thread_streams import ThreadStream
from parallel3d.parallel.tree_group import TreeGroup
from tests.support.kill_cells import Outcome, kill_fault
from tests.support.kill_layouts import AFTER_GO, BEFORE_GO, config_of, grid_of
from tests.support.thread_kills import assert_same_run, outcome_of, run, undisturbed


@pytest.fixture
def block_result(monkeypatch):
    """block_result(ranks, phase, reports) -> watch: in step 2 these ranks give their part to the all-reduce of `phase`,
    and once never get its result: they wait until the generation is over, as on a network that is slower for some.
    `reports[rank]` becomes what each rank held at each of its reports: iteration, evaluation, version of its ranges."""
    blocked, were_blocked, finished = set(), set(), Counter()
    wait_for = TreeGroup.wait_for

    def wait_unless_blocked(self, work):
        """Hands the result on, waits until it is everywhere, so that no death keeps it from others, then returns it."""
        wait_for(self, work)
        me, key = self.ranks[self.rank], (self.name, self._num_posted)
        scheduler = (self.parent or self.children[0])._scheduler
        scheduler.run_locked(lambda: finished.update([key]))
        scheduler.wait(me, lambda: finished[key] >= self.size, lambda: "for the result to be everywhere")
        if me in blocked:
            scheduler.wait(me, lambda: False, lambda: "for the end of the generation")

    def arrange(ranks, phase, reports):
        def watch(rank, runtime):
            phase_hook = runtime.hooks.phase_hook

            def enter(entered):
                state = runtime.state
                if entered == "recovery_report":
                    held = (state.iteration, state.is_evaluated, runtime.optimizer.version)
                    reports.setdefault(rank, []).append(held)
                    blocked.discard(rank)
                elif entered == phase and state.iteration == (1 if phase == "all_reduce" else 2):
                    blocked.update({rank} & set(ranks) - were_blocked)
                    were_blocked.add(rank)
                phase_hook(entered)

            runtime.hooks = replace(runtime.hooks, phase_hook=enter)

        return watch

    monkeypatch.setattr(TreeGroup, "wait_for", wait_unless_blocked)
    return arrange


# --- entries that a rank lacks ----------------------------------------------------------------------------------------


@pytest.mark.sample(2, rest=8)
@pytest.mark.parametrize("layout", ["pp2-dp2-tp2", "pp3-dp2", "pp2-dp4"])
@pytest.mark.parametrize("who", ["one", "its group", "all but the dead"])
@pytest.mark.parametrize("phase", ["update", "all_gather"])
def test_who_lacks_the_newest_entry_takes_it_from_the_record(block_result, layout, who, phase):
    """The dead rank has the entry of step 2, of the others some or all have not. If anybody alive has it, it is taken
    over and its update made; else the step is made again."""
    grid = grid_of(layout)
    dead = grid.dp_ranks(1, 0)[0]
    blocked = {
        "one": {grid.dp_ranks(0, 0)[-1]},
        "its group": set(grid.dp_ranks(1, 0)) - {dead},
        "all but the dead": set(grid.ranks) - {dead},
    }[who]
    reports = {}
    done = run(config_of(layout), [kill_fault(dead, phase)], watch=block_result(blocked, "all_reduce", reports))
    assert all(
        reports[rank][1] == (1, False, 1) for rank in blocked
    )  # the second report of each: the first begins the run
    assert all(reports[rank][1] == (2, False, 2) for rank in set(grid.ranks) - blocked - {dead})
    assert outcome_of(done) == Outcome(frozenset({dead}), 1, True)
    assert_same_run(done, undisturbed(layout))


@pytest.mark.parametrize("dead, first, second", [(0, {1, 2, 3, 4}, {5, 6, 7}), (1, {0, 2, 3, 5, 6, 7}, {4})])
def test_a_node_of_the_tree_holds_the_sum_and_its_neighbour_does_not(monkeypatch, dead, first, second):
    """In step 2 a rank dies between its two children: what is below the second one never gets the result."""
    send, wait_for, reports, entered, finished = ThreadStream.send, TreeGroup.wait_for, {}, set(), set()

    def watch(rank, runtime):
        phase_hook = runtime.hooks.phase_hook

        def enter(phase):
            if phase == "all_reduce" and runtime.state.iteration == 1:
                entered.add(rank)
            if phase == "recovery_report":
                reports.setdefault(rank, []).append(runtime.state.iteration)
            phase_hook(phase)

        runtime.hooks = replace(runtime.hooks, phase_hook=enter)

    def finish(self, work):
        wait_for(self, work)
        if (rank := self.ranks[self.rank]) in entered:
            (self.parent or self.children[0])._scheduler.run_locked(lambda: finished.add(rank))

    def send_unless_dead(self, header, data):
        if (self._rank, self._peer) == (dead, min(second)) and dead in entered:
            self._scheduler.wait(dead, lambda: first <= finished, lambda: "for the first child's subtree")
            raise RankDied(f"rank {dead} dies")
        send(self, header, data)

    monkeypatch.setattr(TreeGroup, "wait_for", finish)
    monkeypatch.setattr(ThreadStream, "send", send_unless_dead)
    done = run(config_of("pp2-dp4"), [], watch=watch)
    assert {rank: reports[rank][1] for rank in first | second} == {
        **dict.fromkeys(first, 2),
        **dict.fromkeys(second, 1),
    }
    assert outcome_of(done) == Outcome(frozenset({dead}), 1, True)
    assert_same_run(done, undisturbed("pp2-dp4"))


@pytest.mark.parametrize("layout", ["pp2-dp2-tp2", "pp2-dp4"])
def test_who_lacks_the_newest_evaluation_takes_it_too(block_result, layout):
    """All but two ranks wait for it in vain; one of the two goes on to step 3 and dies there."""
    grid = grid_of(layout)
    dead, knows = 0, grid.ranks[-1]
    blocked = set(grid.ranks) - {dead, knows}
    reports = {}
    done = run(config_of(layout), [kill_fault(dead, "load", step=3)], watch=block_result(blocked, "evaluate", reports))
    assert all(reports[rank][1] == (2, False, 2) for rank in blocked) and reports[knows][1] == (2, True, 2)
    assert outcome_of(done) == Outcome(frozenset({dead}), 1, True)
    assert_same_run(done, undisturbed(layout))


@pytest.mark.parametrize("recovery", [*BEFORE_GO, AFTER_GO])
def test_an_entry_outlives_the_recovery_that_brought_it(block_result, recovery):
    """One of two ranks that hold the entry dies, the other dies in the recovery. If it dies with its report, the entry
    is lost; after the commit all have it; in between those that were fast enough to read the record."""
    dead, second = 4, 1
    blocked = set(range(8)) - {dead, second}
    reports = {}
    faults = [kill_fault(dead, "all_gather"), kill_fault(second, recovery)]
    done = run(config_of("pp2-dp4"), faults, watch=block_result(blocked, "all_reduce", reports))
    behind, newest = (1, False, 1), (2, False, 2)
    possible = {"recovery_report": {behind}, AFTER_GO: {newest}}.get(recovery, {behind, newest})
    assert all(reports[rank][1] == behind and reports[rank][-1] in possible for rank in blocked)
    assert outcome_of(done) == Outcome(frozenset({dead, second}), 2 if recovery == AFTER_GO else 1, True)
    assert_same_run(done, undisturbed("pp2-dp4"))


# --- suspicions -------------------------------------------------------------------------------------------------------


def leave_once(who, phase, step):
    """watch(rank, runtime): that rank leaves its generation in this phase, for a reason that no other rank has seen."""

    def watch(rank, runtime):
        phase_hook, done = runtime.optimizer._phase_hook, []

        def suspicious(entered):
            phase_hook(entered)
            if rank == who and entered == phase and runtime.state.iteration >= step - 1 and not done:
                done.append(entered)
                raise GenerationEnded("link with rank 9 broke")

        runtime.optimizer._phase_hook = suspicious

    return watch


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", ["reduce_scatter", "backup", "update", "all_gather"])
@pytest.mark.parametrize("rank", [0, 5])
def test_a_suspicion_is_a_change_with_the_same_members(rank, phase):
    done = run(config_of("pp2-dp2-tp2"), watch=leave_once(rank, phase, 2))
    assert outcome_of(done) == Outcome(frozenset(), 1, True)
    assert_same_run(done, undisturbed("pp2-dp2-tp2"))


def test_a_suspicion_that_never_ends_ends_the_run():
    def watch(rank, runtime):
        if rank == 3:
            runtime.optimizer.finish_reduction = lambda: (_ for _ in ()).throw(GenerationEnded("no way through"))

    done = run(config_of("pp2-dp2-tp2"), watch=watch)
    assert done.abort_reason == "8 changes of membership without a step: rank 3: no way through" and not done.dead


# --- the first generation, the last step ------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["pp2-dp2-tp2", "pp2-dp4"])
@pytest.mark.parametrize("phase, num_changes", [*((phase, 0) for phase in BEFORE_GO), (AFTER_GO, 1)])
@pytest.mark.parametrize("ranks", [(0,), (5, 2)], ids=str)
def test_a_run_may_lose_ranks_before_it_has_begun(layout, phase, num_changes, ranks):
    """No rank holds any state yet: even two neighbours may be lost, and the remaining ranks start from the seed."""
    done = run(config_of(layout), [kill_fault(rank, phase, step=1) for rank in ranks])
    assert set(done.dead) == set(ranks) and not done.abort_reason
    assert done.num_changes == num_changes if len(ranks) == 1 else num_changes <= done.num_changes <= 2 * num_changes
    assert_same_run(done, undisturbed(layout))


@pytest.mark.each_value
@pytest.mark.parametrize("phase", ["backward", "update", "all_gather", "evaluate"])
@pytest.mark.parametrize("layout, rank", [("pp2-dp2-tp2", 0), ("pp2-dp2-tp2", 7), ("pp3-dp2", 2), ("pp2-dp4", 6)])
def test_the_last_step_is_made_by_those_who_are_left(layout, rank, phase):
    """No rank ends before all are done: those that are wait, and take part in the change."""
    done = run(config_of(layout), [kill_fault(rank, phase, step=3)])
    assert outcome_of(done) == Outcome(frozenset({rank}), 1, True)
    assert_same_run(done, undisturbed(layout), gradients=phase == "backward")


@pytest.mark.parametrize("rank", [0, 3, 6])
def test_the_first_step_may_be_made_by_fewer(rank):
    done = run(config_of("pp2-dp2-tp2"), [kill_fault(rank, "backup", step=1)])
    assert outcome_of(done) == Outcome(frozenset({rank}), 1, True)
    assert_same_run(done, undisturbed("pp2-dp2-tp2"))


# --- who leaves and who stands by -------------------------------------------------------------------------------------


def test_a_spare_takes_part_in_every_change_and_ends_with_the_run(block_result):
    """Rank 1 loses its place with rank 0; then rank 7 is lost, and rank 1 reports and hands over like all others."""
    reports = {}
    faults = [kill_fault(0, "forward"), kill_fault(7, "backward", step=4)]
    done = run(config_of("pp2-dp2-tp2", num_steps=5), faults, watch=block_result((), "", reports))
    assert outcome_of(done) == Outcome(frozenset({0, 7}), 2, True)
    assert reports[1] == [(0, False, 0), (1, False, 1), (1, False, 1)]  # it stands still, the others go on
    assert [iteration for iteration, *_ in reports[2]] == [0, 1, 3]
    assert_same_run(done, undisturbed("pp2-dp2-tp2", 5))


@pytest.mark.parametrize("recovery", BEFORE_GO)
def test_a_spare_may_be_the_only_one_with_some_state(recovery):
    """Ranks 2 and 5 of three replicas of two: of tp 1, range 1 was held by 3 and 5, and 3 has lost its place with 2."""
    done = run(config_of("dp3-tp2"), [kill_fault(2, "backward"), kill_fault(5, recovery)])
    assert outcome_of(done) == Outcome(frozenset({2, 5}), 1, True) and done.run is not None
    assert_same_run(done, undisturbed("dp3-tp2"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [(0, 6), (1, 3), (2, 3)], ids=str)
def test_two_may_leave_together_and_a_third_may_die(ranks):
    """Those who leave hand over what they hold: all of a stage's state but the dead one's backup may go with them."""
    config = config_of("pp2-dp4", num_steps=5)
    done = run(
        config, [*(kill_fault(rank, "forward", kind="term") for rank in ranks), kill_fault(5, "backward", step=4)]
    )
    assert set(done.dead) == {*ranks, 5} and done.num_changes in (2, 3) and not done.abort_reason
    assert_same_run(done, undisturbed("pp2-dp4", 5))


def test_a_leaver_that_dies_on_its_way_out_was_only_lost():
    done = run(
        config_of("pp2-dp4", num_steps=4),
        [kill_fault(6, "forward", kind="term"), kill_fault(6, "recovery_moves", step=2)],
    )
    assert outcome_of(done) == Outcome(frozenset({6}), 1, True)
    assert_same_run(done, undisturbed("pp2-dp4", 4))


def test_without_the_last_replica_of_a_stage_nobody_may_leave():
    """Rank 3 dies, then rank 2, the stage's last, is asked to leave: it stays, and the run stops and says why."""
    done = run(
        config_of("pp3-dp2", num_steps=5), [kill_fault(3, "forward"), kill_fault(2, "forward", step=4, kind="term")]
    )
    assert done.abort_reason.startswith("stage 1 has no replica left") and set(done.dead) == {3}
