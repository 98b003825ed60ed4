"""Groups that keep their connections over a change of membership.

A group of the last generation can go into the next one if it has the same members and all of them find it in the same
state: between the same two collectives (`Group.state`). All ranks of the grid say at once, in one frame each, in which
states their groups are, and the coordinator answers all on which groups the members differ, so that these decide alike.
A group with a lost member is never kept, nor one in which a collective was under way when the generation ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.group import Group
from parallel3d.parallel.groups import collective_groups, is_world


class KeptGroups:
    """Offers the groups `former`, which this rank has left, to one attempt at the generation of `record`."""

    def __init__(
        self, former: Iterable[Group], record: GenerationRecord, control: ControlChannel, token: AbortToken
    ) -> None:
        self._former = {group.ranks: group for group in former if not is_world(group.name)}
        self._unchanged = unchanged_groups(record.previous, record.grid)
        self._key = f"generation{record.generation}/groups"
        self._num_ranks = len(record.grid.ranks)
        self._control = control
        self._token = token
        self._differing: int | None = None
        """Once it is known: bit n says whether the members of unchanged group n differ on its state."""

    def take(self, name: str, ranks: tuple[int, ...]) -> Group | None:
        """Returns the former group under its new name if all its members keep it.

        All ranks of the grid must call this, for whatever group, before they wait for each other in any: the first call
        waits until all have.
        """
        if not self._unchanged:
            return None
        if self._differing is None:
            states = {number: self._digest(group) for group, number in self._unchanged.items() if self._is_in(group)}
            self._differing = self._control.compare(self._key, self._num_ranks, states, self._token)
        group = self._former.get(ranks)
        if is_world(name) or ranks not in self._unchanged or group is None or path_of(group.name) != path_of(name):
            return None
        if not group.state or self._differing >> self._unchanged[ranks] & 1:
            return None
        state = group.state
        group.renew(name, self._token)
        print(f"{name} keeps the connections of {state}", flush=True)
        return group

    def _is_in(self, ranks: tuple[int, ...]) -> bool:
        return self._control.rank in ranks

    def _digest(self, ranks: tuple[int, ...]) -> str:
        """Of this rank's group and its state; "" where it can't keep it."""
        group = self._former.get(ranks)
        if group is None or not group.state:
            return ""
        return hashlib.blake2b(f"{path_of(group.name)} {group.state}".encode(), digest_size=8).hexdigest()


def unchanged_groups(previous: Grid | None, grid: Grid) -> dict[tuple[int, ...], int]:
    """The groups with the same several ranks as in the grid of the last committed generation, numbered: the same on all
    ranks."""
    if previous is None:
        return {}
    both = collective_groups(previous) & collective_groups(grid)
    return {ranks: number for number, ranks in enumerate(sorted(ranks for ranks in both if len(ranks) > 1))}


def path_of(name: str) -> str:
    """The name of a group without its generation."""
    return name.partition("/")[2]
