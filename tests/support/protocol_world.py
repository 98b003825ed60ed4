"""A world of the membership protocol's model checker as one immutable value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, NamedTuple

from parallel3d.elastic.protocol.membership import NO_GENERATION

RUN, LEFT, ABORTED, RESOLVED, CONFIRMED, SPARE, DONE, GONE, DEAD = (
    "run", "left", "aborted", "resolved", "confirmed", "spare", "done", "gone", "dead",
)  # fmt: skip

Frame = tuple[Any, ...]
MISSING = -1
"""The version of an element that a worker does not hold."""


class Violation(Exception):
    """A broken invariant; the message ends with the way there."""


class Worker(NamedTuple):
    """One worker's state; DEAD and GONE ones stay, since what they have sent may still arrive."""

    mode: str = LEFT
    generation: int = NO_GENERATION
    """The newest generation that it knows."""
    shard_map: int = NO_GENERATION
    """The committed record (its index) by whose shard map it holds `held`."""
    run: int = NO_GENERATION
    """The record in whose generation `step`, `own` and `back` count."""
    step: int = 3
    own: bool = False
    back: bool = False
    held: tuple[int, ...] = ()
    """Version of each element of its stage."""
    proposed: int = NO_GENERATION
    """The record that it is about to enter."""
    new: tuple[int, ...] = ()
    """Its ranges by that record's shard map."""
    draining: bool = False
    inbox: tuple[Frame, ...] = ()
    outbox: tuple[Frame, ...] = ()
    part: tuple[int, int] = (0, 0)
    """The part of the model that it has built: a stage and a tensor-parallel rank."""
    asked: int = NO_GENERATION
    """The generation in which it was asked to request a change."""
    has_moved: bool = False
    """It has left its generation and built another part, and holds no state."""
    evicted: bool = False
    """It runs although the coordinator takes it for dead."""

    @property
    def position(self) -> int:
        """The newest entry that it holds."""
        return self.step // 4 if self.step % 4 >= 2 else self.step // 4 - 1

    @property
    def alive(self) -> bool:
        return self.mode not in (DEAD, GONE)

    @property
    def has_abort(self) -> bool:
        return bool(self.inbox) and any(frame[0] == "abort_generation" for frame in self.inbox)

    def has_gradients(self, iteration: int) -> bool:
        return self.step // 4 == iteration and self.own and self.back


class World(NamedTuple):
    """Everything."""

    protocol: int
    workers: tuple[Worker, ...]
    deaths: int
    """Deaths that may still happen; so with the other faults."""
    suspicions: int = 0
    drains: int = 0
    false_deaths: int = 0
    """The coordinator takes a worker for dead that runs on."""
    host_deaths: int = 0
    joins: int = 0
    """New workers that may still come."""
    moves: int = 0
    """Spares that may still build another part."""
    takeovers: int = 0
    """Losses of the coordinator (protocol_takeover.py)."""
    relay_stops: int = 0
    """A guardian stops, in the middle of a batch: its workers run on, but nothing goes up or down any more."""
    silent: tuple[int, ...] = ()
    """The workers of a guardian that has stopped, and the coordinator does not know yet."""
    unseen: tuple[int, ...] = ()
    """Dead, and the coordinator does not know yet."""
    ended: str = ""


Step = tuple[str, Callable[[], World]]


class Share(NamedTuple):
    """A rank's part of its stage's shard map in one generation."""

    group: tuple[int, ...]
    own: tuple[int, ...]
    back: tuple[int, ...]
    back_owner: int

    @property
    def elements(self) -> tuple[int, ...]:
        return self.own + self.back


TEXT = ("reason", "_reasons", "why")
_HASHABLE = (int, str, bool, frozenset, NoneType)


def freeze(value: Any, memo: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """A hashable stand-in that leaves out texts; `memo` remembers those of frozen dataclasses."""
    kind = type(value)
    if kind in _HASHABLE:
        return value
    if kind in (tuple, list):
        return tuple([freeze(item, memo) for item in value])
    if isinstance(value, Mapping):
        return tuple([(key, freeze(value[key], memo)) for key in sorted(value) if key not in TEXT])
    if not is_dataclass(value):
        return value
    if memo is not None and id(value) in memo:
        return memo[id(value)][1]
    frozen = tuple([freeze(getattr(value, name), memo) for name in _names(kind)])
    if memo is not None:
        memo[id(value)] = value, frozen  # holding it keeps its id its own
    return frozen


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name not in TEXT)
