"""Ranks that are threads, with the bytes of their tensors counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from parallel3d.config.schema import Config
from parallel3d.costs.layered_parameters import LayeredParameters
from parallel3d.inprocess.live_bytes import LiveBytes
from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.models.make import shardings_of
from parallel3d.trainer.context import RankContext, Transports
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.step import train_step
from tests.support.tiny_runs import build

COLLECTIVES = ("all_reduce_async", "reduce_scatter_async", "all_gather_async", "all_reduce_max")


def parts_of(config: Config) -> LayeredParameters:
    return LayeredParameters.of(shardings_of(config.model), config.model.num_hidden_layers)


def run_counted(config: Config, *, steps: int) -> list[tuple[RankContext, int]]:
    """Each rank after these steps, and the most bytes that its tensors took; what threads copy to hand it to each other
    does not count."""
    grid = build_grid(config)

    def body(rank: int, world: ThreadWorld) -> tuple[RankContext, int]:
        make = world.make_group(rank)
        transports = Transports(
            make_group=lambda name, ranks: _uncounted(make(name, ranks), COLLECTIVES),
            links=_uncounted(world.links(rank), ("send", "receive")),
            token=world.tokens[rank],
        )
        with LiveBytes() as memory:
            runtime = build(config, grid, rank, transports)
            memory.peak = memory.live
            for _ in range(steps):
                train_step(runtime)
            return runtime, memory.peak

    return run_threads(len(grid.ranks), body, world=ThreadWorld(len(grid.ranks), slots=config.parallel.p2p_slots))


def _uncounted(transport: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        if hasattr(transport, name):
            setattr(transport, name, _outside(getattr(transport, name)))
    return transport


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            result = function(*args, **kwargs)
        if hasattr(result, "wait"):
            result.wait = _outside(result.wait)
        return result

    return call
