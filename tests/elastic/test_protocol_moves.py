"""Spares that build another part, and departures on request, explored. And simpler rules, all of them wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.config.schema import TimeoutConfig
from parallel3d.elastic.coordinator.failover_coordinator import ResumedProtocol
from parallel3d.elastic.protocol.actions import Action, ChangeRequest
from parallel3d.elastic.protocol.membership import GenerationRecord, StateReport
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.elastic.protocol.vacancies import GridTarget
from parallel3d.elastic.settings import ElasticSettings
from parallel3d.errors import OutOfPlaceError, ProtocolError
from parallel3d.parallel.grid import Grid, PartId
from tests.elastic.test_protocol_worlds import decision
from tests.support.protocol_moves import MovesModel
from tests.support.protocol_search import explore
from tests.support.protocol_steps import agree, make, on_lost, uniform
from tests.support.protocol_takeover import TakeoverModel
from tests.support.protocol_world import Step, Violation, Worker, World
from tests.support.tiers import examples

CHAIN = uniform(2, 1)
"""Two stages of one replica; the second may get another one, and new workers come to either."""
WIDER = (1, 2)


@pytest.mark.parametrize(
    ("num_iterations", "faults"),
    [
        (2, {"deaths": 1}),
        pytest.param(2, {"suspicions": 1}, marks=pytest.mark.full),
        pytest.param(2, {"drains": 1}, marks=pytest.mark.full),
        pytest.param(1, {"deaths": 1, "suspicions": 1}, marks=pytest.mark.full),
    ],
)
def test_a_spare_moves_in_every_phase(num_iterations: int, faults: dict[str, int]):
    model = MovesModel(CHAIN, num_iterations=num_iterations, widths=WIDER)
    assert "released" in explore(model, model.start(joins=1, moves=1, **faults)).ends
    assert has_grown(model)


@pytest.mark.parametrize(
    ("num_iterations", "faults"),
    [
        (1, {"takeovers": 1}),
        pytest.param(1, {"takeovers": 1, "deaths": 1}, marks=pytest.mark.full),
        pytest.param(2, {"takeovers": 1}, marks=pytest.mark.full),
        pytest.param(1, {"takeovers": 2}, marks=pytest.mark.full),
        pytest.param(1, {"takeovers": 1, "suspicions": 1}, marks=pytest.mark.full),
    ],
)
def test_a_successor_while_a_spare_moves(num_iterations: int, faults: dict[str, int]):
    model = TakeoverModel(CHAIN, num_iterations=num_iterations, widths=WIDER)
    found = explore(model, model.start(joins=1, moves=1, **faults))
    assert found.ends.keys() == {"released", "halted"} and has_grown(model)


@pytest.mark.sample(1, rest=3)
@pytest.mark.parametrize(
    ("grid", "widths", "faults"),
    [
        pytest.param(CHAIN, WIDER, {"moves": 1}, marks=pytest.mark.full),
        pytest.param(uniform(1, 2), (), {"deaths": 1}, marks=pytest.mark.full),
        (uniform(1, 2), (), {}),
        pytest.param(uniform(1, 2), (), {"joins": 0, "drains": 1}, marks=pytest.mark.full),
        pytest.param(uniform(1, 3), (), {"joins": 0, "deaths": 1}, marks=pytest.mark.full),
    ],
)
def test_the_reduction_leaves_no_takeover_out(grid: Grid, widths: tuple[int, ...], faults: dict[str, int]):
    """The same records, the same ends, with it and without: by all frames, those that a successor gets too late as
    well."""
    found = {}
    for reduced in (True, False):
        model = TakeoverModel(grid, num_iterations=1, widths=widths, reduced=reduced)
        ends = explore(model, model.start(**{"joins": 1, "takeovers": 1, **faults})).ends.keys()
        found[reduced] = ends, {decision(record) for record in model.records}
    assert found[True] == found[False]


@pytest.mark.parametrize(
    ("grid", "faults", "max_replicas"),
    [
        (uniform(1, 2), {"drains": 2, "joins": 1}, 3),
        (uniform(1, 2), {"drains": 2, "deaths": 1}, None),
        pytest.param(uniform(1, 2), {"drains": 1, "joins": 1, "deaths": 1}, 3, marks=pytest.mark.full),
        pytest.param(uniform(1, 2, tp=2), {"drains": 2}, None, marks=pytest.mark.full),
    ],
)
def test_any_worker_leaves_in_every_phase(grid: Grid, faults: dict[str, int], max_replicas: int | None):
    model = MovesModel(grid, num_iterations=2, max_replicas=max_replicas)
    assert "released" in explore(model, model.start(**faults)).ends
    assert any(record.draining for record in model.records)


@pytest.mark.full
def test_a_successor_while_workers_join_and_leave():
    model = TakeoverModel(uniform(1, 2), num_iterations=1)
    found = explore(model, model.start(joins=1, drains=1, takeovers=1))
    assert found.ends.keys() == {"released", "halted"}
    assert any(set(record.draining) - set(model.grid.ranks) for record in model.records)


def has_grown(model: MovesModel) -> bool:
    return any(len(record.grid.stages[1]) == 2 for record in model.records)


def test_a_spare_leaves_the_membership_to_build_and_comes_back():
    protocol = make(uniform(2, 2, tp=2))  # stage 0: 0 1 | 2 3, stage 1: 4 5 | 6 7
    agree(protocol, host="one")
    on_lost(protocol, 0, 5)
    agree(protocol, host="one")
    assert protocol.choose_moves({}, {}) == {4: (0, 0)}
    assert protocol.choose_moves({8: (0, 0)}, {8: "one"}) == {}  # spare 1 has got a partner
    assert protocol.choose_moves({8: (0, 0)}, {8: "two"}) == {4: (0, 0)}  # on another host it is none
    with pytest.raises(OutOfPlaceError, match="has the number of another one"):
        protocol.admit(4, (0, 0), "one")
    protocol.release(4)
    assert protocol.live == {1, 2, 3, 6, 7} and protocol.choose_moves({4: (0, 0)}, {4: "one"}) == {}
    assert on_lost(protocol, 4) == [] and protocol.pending is None  # as a new worker that dies
    protocol.release(4)
    assert protocol.admit(4, (0, 0), "one") == [ChangeRequest(rank=2, generation=1)]
    protocol.suspect(2, 1, "a worker joins")
    record = agree(protocol, 3, host="one")
    assert record.grid.tp_ranks((0, 0)) == (4, 1) and record.joiners == (1, 4) and record.newcomers == (1, 4)


def test_workers_that_leave_do_not_move():
    protocol = make(uniform(2, 2, tp=2))
    agree(protocol, host="one")
    on_lost(protocol, 0, 5)
    agree(protocol, host="one")
    protocol._draining = frozenset({4})
    assert protocol.choose_moves({}, {}) == {}


@settings(max_examples=examples(200))
@given(
    widths=st.sampled_from([(2, 2), (1, 2), (2, 1, 2)]),
    max_replicas=st.sampled_from([None, 3]),
    events=st.lists(
        st.tuples(st.sampled_from(["start", "ready", "fail", "die", "drain", "change"]), st.integers(0, 9))
    ),
)
def test_without_tensor_parallelism_nothing_is_left_that_could_move(
    widths: tuple[int, ...], max_replicas: int | None, events: list[tuple[str, int]]
):
    """No death leaves a part of a replica, and a new worker builds only what is missing and nobody else builds: each
    that is ready has a place, whatever else dies, leaves or comes."""
    grid = Grid.of_replicas(widths, tp_size=1)
    protocol = make(grid, target=GridTarget.of(grid, max_replicas=max_replicas))
    building: dict[int, PartId] = {}
    agree(protocol)
    for number, (event, chosen) in enumerate(events):
        live = sorted(protocol.live)
        rank = live[chosen % len(live)]
        if event == "start" and protocol.pending is None and (part := protocol.choose_part(building)) is not None:
            building[len(grid.ranks) + number] = part
        elif event == "ready" and building:
            joiner = min(building)
            protocol.admit(joiner, building.pop(joiner), f"host{joiner}")
        elif event == "fail" and building:
            del building[max(building)]
        elif event == "die" and protocol.can_spare([rank]):
            on_lost(protocol, rank)
        elif event == "drain":
            protocol.announce_drain(rank)
        elif event == "change":
            leader = protocol.committed.leader
            if protocol.pending is None:
                protocol.suspect(leader, protocol.committed.generation, "a change")
            agree(protocol, number)
        if protocol.pending is None:
            assert protocol.choose_moves(building, {}) == {}
            assert all(protocol._next_grid(joining=protocol._ready).holds(each) for each in protocol._ready)


class KeepsMovers(MembershipProtocol):
    """Waits for the reports of spares that build."""

    def release(self, rank: int) -> None:
        self._released |= {rank}


class KeepsParts(MembershipProtocol):
    """Takes a worker that has moved for what it was before."""

    def admit(self, rank: int, part: PartId, host: str) -> list[Action]:
        return super().admit(rank, self._parts.get(rank, part), host)


class WantsTheirState(MembershipProtocol):
    """All members of the committed generation must hold ranges by its shard map."""

    def _find_newest(self) -> StateReport:
        members = frozenset() if self.committed is None else frozenset(self.committed.members)
        for report in self._reports.values():
            if report.rank in members and self.committed and report.state_generation != self.committed.generation:
                raise ProtocolError(f"rank {report.rank} holds no ranges")
        return super()._find_newest()


class MovesMembers(MovesModel):
    """Workers with coordinates build other parts, too."""

    def _moves_of_spares(self, world: World) -> Iterator[Step]:
        protocol = self.protocol(world)
        if world.moves and protocol.pending is None and not protocol.over:
            yield "rank 1 moves", lambda: self._move(world, 1, (0, 0))


class KeepsOldState(MovesModel):
    """A spare that builds another part still says that it holds what it held."""

    def rebuild(self, worker: Worker, part: PartId) -> Worker:
        return super().rebuild(worker, part)._replace(part=worker.part)


@pytest.mark.parametrize(
    ("model_type", "protocol", "faults", "wrong"),
    [
        (MovesModel, KeepsMovers, {"suspicions": 1}, "places rank 2, which has built"),
        (MovesModel, KeepsParts, {}, "places rank 2, which has built"),
        (MovesModel, WantsTheirState, {"suspicions": 1}, "holds no ranges"),
        (MovesMembers, MembershipProtocol, {}, "ended|holds|places|stuck|halted"),
        (KeepsOldState, MembershipProtocol, {}, "places rank 2, which has built"),
    ],
)
def test_a_wrong_rule_is_found(
    model_type: type[MovesModel], protocol: type[MembershipProtocol], faults: dict[str, int], wrong: str
):
    model = model_type(CHAIN, num_iterations=2, widths=WIDER, protocol=protocol)
    with pytest.raises(Violation, match=wrong):
        explore(model, model.start(joins=1, moves=1, **faults))


class SuccessorKeepsTheDrained(TakeoverModel):
    """A successor lets those in again that have handed over and wait for their commit."""

    def is_about_to_leave(self, record: GenerationRecord, rank: int) -> bool:
        return False


class SuccessorForgetsDrains(TakeoverModel):
    """Nobody tells a successor who was about to leave; those go on asking for changes with which to leave."""

    def leaving(self, live: Mapping[int, Worker]) -> list[int]:
        return []

    def _take_over(self, world: World, *, keeps_frames: bool, late: tuple[int, ...] = ()) -> World:
        was_draining = [worker.draining for worker in world.workers]
        world = super()._take_over(world, keeps_frames=keeps_frames, late=late)
        for rank, draining in enumerate(was_draining):
            world = self._put(world, rank, world.workers[rank]._replace(draining=draining))
        return world


@pytest.mark.parametrize(
    ("model_type", "wrong"),
    [(SuccessorKeepsTheDrained, "stuck"), (SuccessorForgetsDrains, "8 changes of membership without a step")],
)
def test_a_wrong_rule_of_a_successor_is_found(model_type: type[TakeoverModel], wrong: str):
    model = model_type(uniform(1, 2), num_iterations=1)
    with pytest.raises(Violation, match=wrong):
        explore(model, model.start(joins=1, drains=1, takeovers=1))


def test_a_successor_knows_who_has_left_to_build():
    grid = uniform(2, 2, tp=2)
    committed = GenerationRecord(
        generation=3,
        grid=grid.without([0, 5])[0],
        previous=grid,
        members=(1, 2, 3, 4, 6, 7),
        parts={1: (0, 1), 4: (1, 0)},
    )
    timeout = TimeoutConfig(multiplier=1.0, min_s=1.0, max_s=1.0)
    elastic = ElasticSettings(
        grid=grid, zero_stage=1, zero_backups=1, heartbeat_timeout=timeout, watchdog_timeout=timeout
    )
    protocol = ResumedProtocol(elastic, committed, newest_generation=3)
    assert protocol.has_left(4, (0, 0)) and not protocol.has_left(4, (1, 0)) and not protocol.has_left(4, None)
    assert not protocol.has_left(2, (0, 0)) and not protocol.has_left(8, (0, 0))
