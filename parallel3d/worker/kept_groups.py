"""Groups that keep their connections over a change of membership.

A group of the last generation can go into the next one if it has the same members and all of them find it in the same
state: between the same two collectives (`Group.state`). They compare through the key-value store, so that all decide
alike. A group with a lost member never can, nor one in which a collective was under way when the generation ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.group import Group
from parallel3d.parallel.groups import collective_groups


class KeptGroups:
    """Offers the groups `former`, which this rank has left, to one attempt at a new generation.

    `previous` is the grid of the last committed generation. It decides which groups are worth a comparison, and is the
    same on all ranks.
    """

    def __init__(self, former: Iterable[Group], previous: Grid | None, control: ControlChannel, token: AbortToken):
        self._former = {(path_of(group.name), group.ranks): group for group in former}
        self._unchanged = frozenset() if previous is None else collective_groups(previous)
        self._control = control
        self._token = token

    def take(self, name: str, ranks: tuple[int, ...], number: int) -> Group | None:
        """Returns the former group under its new name if all its members keep it. Collective."""
        if ranks not in self._unchanged:
            return None
        group = self._former.get((path_of(name), ranks))
        state = "" if group is None else group.state
        self._control.set(f"{name}/state/{number}", state.encode())
        states = self._control.get_all([f"{name}/state/{each}" for each in range(len(ranks))], self._token)
        if group is None or not state or any(each != state.encode() for each in states):
            return None
        group.renew(name, self._token)
        print(f"{name} keeps the connections of {state}", flush=True)
        return group


def path_of(name: str) -> str:
    """The name of a group without its generation."""
    return name.partition("/")[2]
