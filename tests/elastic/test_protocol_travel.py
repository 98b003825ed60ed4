"""How the membership protocol travels, explored: entries by digest, records as differences, a coordinator that is lost,
workers that are wrongly taken for dead, hosts that die with what they were relaying. And wrong rules for all of it."""

from __future__ import annotations

import pytest

from parallel3d.elastic.protocol.actions import Action, Propose
from parallel3d.elastic.protocol.membership import GenerationRecord, StateReport
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.parallel.grid import Grid
from tests.support.protocol_model import Model
from tests.support.protocol_search import explore
from tests.support.protocol_steps import uniform
from tests.support.protocol_takeover import TakeoverModel
from tests.support.protocol_world import NO_GENERATION, Violation, Worker, World

HOSTS = {0: "a", 1: "b", 2: "a", 3: "b"}


@pytest.mark.parametrize(
    ("grid", "hosts", "faults"),
    [
        pytest.param(uniform(1, 3), None, {"false_deaths": 1, "deaths": 1}, marks=pytest.mark.full),
        (uniform(1, 2), None, {"false_deaths": 1, "suspicions": 1}),
        (uniform(2, 2), HOSTS, {"host_deaths": 1}),
        pytest.param(uniform(2, 2), HOSTS, {"host_deaths": 1, "deaths": 1}, marks=pytest.mark.full),
    ],
)
def test_false_deaths_and_hosts(grid: Grid, hosts: dict[int, str] | None, faults: dict[str, int]):
    model = Model(grid, num_iterations=1, hosts=hosts)
    found = explore(model, model.start(**faults))
    assert "released" in found.ends and found.num_worlds > 500


@pytest.mark.parametrize(
    ("grid", "faults"),
    [
        (uniform(1, 2), {"takeovers": 1, "deaths": 1}),
        (uniform(1, 2), {"takeovers": 2}),
        (uniform(1, 3), {"takeovers": 1}),
        pytest.param(uniform(1, 2), {"takeovers": 2, "suspicions": 1}, marks=pytest.mark.full),
    ],
)
def test_a_successor_in_every_phase(grid: Grid, faults: dict[str, int]):
    model = TakeoverModel(grid, num_iterations=1, reduced=False)
    found = explore(model, model.start(**faults))
    assert found.ends.keys() == {"released", "halted"} and found.num_worlds > 1000


RELAYED = {0: "a", 1: "b", 2: "b"}
"""Two workers of one guardian, beside another."""


@pytest.mark.parametrize(
    "faults",
    [{"relay_stops": 1}, pytest.param({"relay_stops": 1, "suspicions": 1}, marks=pytest.mark.full)],
)
def test_a_relay_stops_in_the_middle_of_a_batch(faults: dict[str, int]):
    """Its workers run on, and take part in what needs no coordinator."""
    model = Model(uniform(1, 3), num_iterations=1, hosts=RELAYED, reduced=False)
    found = explore(model, model.start(**faults))
    assert found.ends.keys() == {"released", "halted"} and found.num_worlds > 1000


class LosesOneWithAGuardian(Model):
    """The coordinator takes only the first worker of a silent guardian for dead."""

    def lost_with_guardian(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return ranks[:1]


def test_all_workers_of_a_guardian_are_lost_with_it():
    model = LosesOneWithAGuardian(uniform(1, 3), num_iterations=1, hosts=RELAYED, reduced=False)
    with pytest.raises(Violation):
        explore(model, model.start(relay_stops=1))


class DifferenceFromProposed(MembershipProtocol):
    """Sends the difference from the last record that was proposed, which a worker may never have committed."""

    _last: GenerationRecord | None = None

    def _propose(self, lead: StateReport, entries: bytes = b"") -> list[Action]:
        *others, propose = super()._propose(lead, entries)
        assert isinstance(propose, Propose)
        base, self._last = self._last, propose.record
        return [*others, Propose(record=propose.record, base=base, behind=propose.behind, entries=propose.entries)]


def test_a_worker_that_lacks_the_base_gets_the_whole_record():
    model = Model(uniform(1, 3), num_iterations=1, protocol=DifferenceFromProposed)
    assert "released" in explore(model, model.start(deaths=2)).ends
    assert any(frame[0] == "request_record" for frame in model.requests)


class ForgetsTheEntries(MembershipProtocol):
    """Sends the record alone to workers that lack its entries."""

    def _behind(self, lead: StateReport) -> tuple[int, ...]:
        return ()


class TrustsADigest(MembershipProtocol):
    """Goes on from the newest position that was ever reported, though its holder died before it sent the entries."""

    _promised: StateReport | None = None

    def _find_newest(self) -> StateReport:
        newest = super()._find_newest()
        if self._promised is None or newest.position > self._promised.position:
            self._promised = newest
        return self._promised


class IgnoresTheBase(Model):
    """A worker applies every difference to the record that it has."""

    def lacks_base(self, worker: Worker, base: int) -> bool:
        return False


class ResumesFromAnyone(TakeoverModel):
    """The successor goes on from the record of any worker, not from the newest."""

    def base_of(self, shard_maps: dict[int, int]) -> int:
        held = [number for number in shard_maps.values() if number != NO_GENERATION]
        return min(held, key=lambda number: self.record(number).generation, default=NO_GENERATION)


class ForgetsTheFirstCommit(TakeoverModel):
    """The successor sends the commit only to workers that have committed an earlier generation."""

    def send_commit(self, world: World, behind: tuple[int, ...], generation: int) -> World:
        some = tuple(rank for rank in behind if world.workers[rank].shard_map != NO_GENERATION)
        return super().send_commit(world, some, generation)


class CountsFromTheCommitted(TakeoverModel):
    """The successor's first number follows the committed one, not the highest that a worker has received."""

    def newest_of(self, generations: list[int], committed: int) -> int:
        return committed


@pytest.mark.parametrize(
    ("model_type", "protocol", "grid", "faults", "wrong"),
    [
        (Model, ForgetsTheEntries, uniform(2, 2), {"deaths": 1}, "lacks the entries up to"),
        (Model, TrustsADigest, uniform(1, 2), {"deaths": 1, "suspicions": 1}, "stuck"),
        (IgnoresTheBase, DifferenceFromProposed, uniform(1, 3), {"deaths": 2}, "the difference from another record"),
        (
            ResumesFromAnyone,
            MembershipProtocol,
            uniform(1, 3),
            {"takeovers": 1, "deaths": 1},
            "wrongly after a takeover",
        ),
        (ForgetsTheFirstCommit, MembershipProtocol, uniform(1, 2), {"takeovers": 1}, "the ranges of generation -1"),
        (
            CountsFromTheCommitted,
            MembershipProtocol,
            uniform(1, 2),
            {"takeovers": 1, "suspicions": 1},
            "reported twice",
        ),
    ],
)
def test_a_wrong_rule_is_found(
    model_type: type[Model], protocol: type[MembershipProtocol], grid: Grid, faults: dict[str, int], wrong: str
):
    reduced = not issubclass(model_type, TakeoverModel)
    model = model_type(grid, num_iterations=1, protocol=protocol, reduced=reduced)
    with pytest.raises(Violation, match=wrong):
        explore(model, model.start(**faults))
