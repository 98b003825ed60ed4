"""Tables of the membership protocol's model: its settings, interned protocols and records, ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import lcm
from typing import Any

from parallel3d.elastic.protocol.actions import Action
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.elastic.protocol.vacancies import GridTarget
from parallel3d.optim.shard_map import ShardMap, plan_moves, plan_shard_map
from parallel3d.parallel.grid import Grid
from tests.support.protocol_world import Frame, Share, Violation, Worker, World, freeze


class ModelTables:
    """Settings and look-ups of a model. Protocols and records stand in a world as numbers, so that it can be hashed."""

    def __init__(
        self,
        grid: Grid,
        *,
        num_iterations: int,
        zero_stage: int = 1,
        zero_backups: int = 1,
        hosts: Mapping[int, str] | None = None,
        protocol: type[MembershipProtocol] = MembershipProtocol,
        reduced: bool = True,
        max_replicas: int | None = None,
        widths: tuple[int, ...] = (),
    ):
        self.grid = grid
        self.num_iterations = num_iterations
        self.zero_stage = zero_stage
        self.zero_backups = zero_backups
        self.hosts = dict.fromkeys(grid.ranks, "") if hosts is None else hosts
        self.reduced = reduced
        self.target = GridTarget.of(grid, max_replicas=max_replicas)
        if widths:
            self.target = replace(self.target, widths=widths)
        self.num_elements = lcm(*range(1, max(self.target.widths) + 1))
        self._first = protocol(grid, zero_stage=zero_stage, zero_backups=zero_backups, target=self.target)
        self._protocols: list[MembershipProtocol] = []
        self._protocol_ids: dict[Any, int] = {}
        self._answers: dict[tuple[int, Frame], tuple[int, list[Action]]] = {}
        self._records: list[GenerationRecord] = []
        self.requests: set[Frame] = set()
        """Every request for a whole record."""
        self._frozen: dict[int, tuple[Any, Any]] = {}
        self._record_ids: dict[Any, int] = {}
        self.share = cache(self._share)
        self.sources = cache(self._sources)

    @property
    def records(self) -> list[GenerationRecord]:
        """Every record that was proposed."""
        return self._records

    @property
    def reports(self) -> set[Frame]:
        """Every report that the protocol has received."""
        return {event for _, event in self._answers if event[0] == "report"}

    def protocol(self, world: World) -> MembershipProtocol:
        return self._protocols[world.protocol]

    def record(self, number: int) -> GenerationRecord:
        return self._records[number]

    @staticmethod
    def _check(condition: bool, message: str) -> None:
        if not condition:
            raise Violation(message)

    def _put(self, world: World, rank: int, worker: Worker) -> World:
        workers = world.workers
        return world._replace(workers=(*workers[:rank], worker, *workers[rank + 1 :]))

    def _intern(self, protocol: MembershipProtocol) -> int:
        key = freeze(vars(protocol), self._frozen)
        if key not in self._protocol_ids:
            self._protocol_ids[key] = len(self._protocols)
            self._protocols.append(protocol)
        return self._protocol_ids[key]

    def _intern_record(self, record: GenerationRecord) -> int:
        key = freeze(record, self._frozen)
        if key not in self._record_ids:
            self._record_ids[key] = len(self._records)
            self._records.append(record)
        return self._record_ids[key]

    def _shard_map(self, record: GenerationRecord, grid: Grid, stage: int, tp: int) -> ShardMap:
        return plan_shard_map(
            grid, stage, tp, zero_stage=self.zero_stage, zero_backups=self.zero_backups, hosts=record.hosts
        )

    def _elements(self, shard_map: ShardMap, number: int) -> range:
        size = self.num_elements // shard_map.num_ranges
        return range(number * size, (number + 1) * size)

    def _share(self, number: int, rank: int) -> Share:
        record = self.record(number)
        at = record.grid.coordinates(rank)
        shard_map = self._shard_map(record, record.grid, at.pp, at.tp)
        own, *backed_up = shard_map.ranges_of(rank)
        return Share(
            group=record.grid.dp_ranks(at.pp, at.tp),
            own=tuple(self._elements(shard_map, own)),
            back=tuple(element for number in backed_up for element in self._elements(shard_map, number)),
            back_owner=shard_map.holders[backed_up[0]][0] if backed_up else rank,
        )

    def _sources(self, number: int, rank: int) -> tuple[tuple[int, int], ...]:
        """(source, element) of everything that a rank needs to enter a record."""
        record = self.record(number)
        if record.previous is None or not record.grid.holds(rank):
            return ()
        at = record.grid.coordinates(rank)
        old, new = (self._shard_map(record, grid, at.pp, at.tp) for grid in (record.previous, record.grid))
        held = self._table(old, record.members)
        return tuple(
            (move.source, element)
            for move in plan_moves(held, self._table(new, record.grid.ranks), self.num_elements)
            if move.target == rank
            for element in range(move.start, move.stop)
        )

    def _table(self, shard_map: ShardMap, ranks: tuple[int, ...]) -> dict[int, list[range]]:
        table = {rank: [self._elements(shard_map, number) for number in shard_map.ranges_of(rank)] for rank in ranks}
        return {rank: ranges for rank, ranges in table.items() if ranges}
