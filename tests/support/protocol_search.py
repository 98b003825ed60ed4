"""Visits the worlds of a model: all that can be reached, or one random way."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tests.support.protocol_model import Model
from tests.support.protocol_world import Violation, World


class Explored(NamedTuple):
    num_worlds: int
    """Worlds that go on."""
    ends: dict[str, int]
    """How often a move ends a run this way."""


def explore(model: Model, start: World, *, max_worlds: int = 10**6) -> Explored:
    """Visits every world that can be reached; raises Violation with a way to a wrong one.

    A failed assertion counts as one.
    """
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    todo = [start]
    ends: dict[str, int] = {}
    with _without_collector():
        while todo:
            world, label = todo.pop(), ""
            try:
                for label, make in model.moves(world):
                    following = make()
                    if following.ended:
                        ends[following.ended] = ends.get(following.ended, 0) + 1
                    elif following not in came_from:
                        came_from[following] = (world, label)
                        todo.append(following)
            except (Violation, AssertionError) as error:
                raise Violation(f"{error}\n{_way(came_from, world)}\n  {label}") from None
            assert len(came_from) <= max_worlds, f"more than {max_worlds} worlds"
    return Explored(len(came_from), ends)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Worlds hold no cycles: the garbage collector would only look through all of them, again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def walk(model: Model, start: World, seed: int, *, fault_rate: float = 0.05, max_moves: int = 5000) -> World:
    """One random way to its end."""
    rng = random.Random(seed)
    world, labels = start, []
    for _ in range(max_moves):
        label = ""
        try:
            moves = model.moves(world)
            if not moves:
                return world
            faults = list(model._faults(world))
            steps = moves[: len(moves) - len(faults)]
            label, make = rng.choice(faults if faults and rng.random() < fault_rate else steps)
            world = make()
        except Violation as error:
            raise Violation("\n  ".join([str(error), *labels, label])) from None
        labels.append(label)
    raise Violation("\n  ".join([f"no end after {max_moves} moves", *labels[-100:]]))


def _way(came_from: dict[World, tuple[World, str] | None], world: World) -> str:
    labels = []
    while (step := came_from[world]) is not None:
        world, label = step
        labels.append(f"  {label}")
    return "\n".join(reversed(labels))
