"""Layouts as short strings, such as `tp2.pp2.dp2.sp.zero0.gpipe`, for overrides of the section `parallel`.

A layout defines the whole grid: a missing size is 1, `dp2/1` gives each stage its own number of replicas, and layers
are split by cost. `v2` means 2 virtual stages, with the default schedule for them unless one is named; without it,
grids of one stage and schedules without chunks have 1, and a schedule that needs a certain number has that. All other
settings stay as configured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.config.derived import stage_replicas
from parallel3d.config.layout_parts import LAYOUT_PARTS, NAMED_PARTS
from parallel3d.config.schema import Config
from parallel3d.errors import UserError
from parallel3d.pipeline.schedules import SCHEDULES, default_schedule

GRID_DEFAULTS: dict[str, Any] = {
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "stage_replicas": None,
    "layers_per_stage": None,
}
"""The fields of section `parallel` that every layout sets, named or not."""

DEFAULT_LAYOUTS = (
    ("tp2.sp", "tp2"),
    ("pp2",),
    ("dp2",),
    ("tp2.pp2.dp2.sp", "tp2.pp2.dp2", "pp2.dp2", "tp2.pp2", "tp2.dp2"),
)
"""The default layouts to try: of each tuple the first that fits a configuration."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A name and the fields of section `parallel` that it sets."""

    name: str
    fields: Mapping[str, Any]

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides for `load_config`."""
        return tuple(f"parallel.{name}={json.dumps(value)}" for name, value in self.fields.items())


def parse_layout(text: str) -> Layout:
    """The layout that `text` names. Raises UserError that names a wrong part."""
    fields = dict(GRID_DEFAULTS)
    seen: set[str] = set()
    for part in text.strip().split("."):
        name, value = _parse_part(part, text)
        if name in seen:
            raise UserError(f"layout {text!r} says twice what parallel.{name} is")
        seen.add(name)
        fields[name] = value
    if isinstance(fields["dp_size"], list):
        fields["stage_replicas"], fields["dp_size"] = fields["dp_size"], None
    fields |= _complete_schedule(fields)
    return Layout(name=text.strip(), fields=fields)


def _complete_schedule(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule and the number of chunks, as far as the named parts decide them."""
    name, num_chunks = fields.get("schedule"), fields.get("virtual_stages")
    if num_chunks is not None:
        return {} if name else {"schedule": default_schedule(num_chunks)}
    if fields["pp_size"] == 1:
        return {"schedule": name or default_schedule(1), "virtual_stages": 1}
    if name and (fixed := SCHEDULES[name].min_chunks) == SCHEDULES[name].max_chunks:
        return {"virtual_stages": fixed}
    return {}


def parse_layouts(text: str) -> tuple[Layout, ...]:
    """The layouts of a comma-separated list."""
    return tuple(parse_layout(part) for part in text.split(","))


def current_layout(config: Config) -> Layout:
    """The layout of a resolved configuration itself, under its short name, without overrides."""
    replicas = stage_replicas(config)
    widths = replicas[:1] if len(set(replicas)) == 1 else replicas
    parallel = config.parallel
    name = f"tp{parallel.tp_size}.pp{parallel.pp_size}.dp{'/'.join(map(str, widths))}"
    return Layout(name=name, fields={})


def alternative_layouts(config: Config) -> Iterator[Layout]:
    """Layouts of straight grids that could continue the run of a resolved configuration, the best first.

    More ranks come first. Of equally many ranks, in this order: no rank holds more of the model, tensor parallelism
    does not grow (it may already fill a host), a replica has fewer ranks, tensor parallelism is wider.
    """
    tp_size, replicas = config.parallel.tp_size, stage_replicas(config)
    model_ranks = tp_size * len(replicas)

    def fitness(grid: tuple[int, int, int]) -> tuple[bool, bool, int, int]:
        tp, pp, _ = grid
        return tp * pp < model_ranks, tp > tp_size, tp * pp, -tp

    for num_ranks in range(sum(replicas) * tp_size, 0, -1):
        for tp, pp, dp in sorted(_grids(num_ranks), key=fitness):
            if (tp, (dp,) * pp) != (tp_size, replicas):
                yield parse_layout(f"tp{tp}.pp{pp}.dp{dp}")


def _grids(num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """All (tp, pp, dp) of a product."""
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for tp in divisors:
        yield from ((tp, pp, num_ranks // tp // pp) for pp in divisors if num_ranks // tp % pp == 0)


def default_layouts(fits: Callable[[Layout], bool]) -> Iterator[Layout]:
    """A few layouts that together use every axis, as far as they fit."""
    for alternatives in DEFAULT_LAYOUTS:
        yield from [layout for layout in map(parse_layout, alternatives) if fits(layout)][:1]


def _parse_part(part: str, text: str) -> tuple[str, Any]:
    """The field of section `parallel` and its value."""
    if part in NAMED_PARTS:
        return NAMED_PARTS[part]
    if part in SCHEDULES:
        return "schedule", part
    if match := re.fullmatch(r"(tp|pp)([1-9]\d*)", part):
        return f"{match[1]}_size", int(match[2])
    if match := re.fullmatch(r"v([1-9]\d*)", part):
        return "virtual_stages", int(match[1])
    if match := re.fullmatch(r"dp([1-9]\d*(?:/[1-9]\d*)*)", part):
        counts = [int(count) for count in match[1].split("/")]
        return "dp_size", counts[0] if len(counts) == 1 else counts
    raise UserError(f"layout {text!r}: {part!r} is not a part of a layout, which consists of {LAYOUT_PARTS}")
