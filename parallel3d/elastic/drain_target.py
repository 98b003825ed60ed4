"""Which workers a person means who asks by a command that some leave the run. Pure.

rank=3                a worker, whether it computes, waits as a spare or builds its part
stage=1,replica=1     a replica of a stage
replica=1             that replica of all stages
host=NAME             all workers of a host
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.elastic.protocol.survivability import list_words
from parallel3d.errors import LaunchError
from parallel3d.parallel.grid import Grid

FORMS = ({"rank"}, {"replica"}, {"stage", "replica"}, {"host"})
MAX_NAMED = 16
"""Ranks or hosts that a message lists."""


@dataclass(frozen=True, kw_only=True)
class DrainTarget:
    """The workers of a request; what is None does not matter."""

    rank: int | None = None
    stage: int | None = None
    replica: int | None = None
    host: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"rank": self.rank, "stage": self.stage, "replica": self.replica, "host": self.host}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> DrainTarget:
        return DrainTarget(**{name: data[name] for name in ("rank", "stage", "replica", "host")})

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.to_json().items() if value is not None)


@dataclass(frozen=True, kw_only=True)
class DrainChoice:
    """The workers that a request names, or why there are none."""

    ranks: tuple[int, ...] = ()
    refusal: str = ""


def parse_drain_target(text: str) -> DrainTarget:
    """Reads a command's words. Raises LaunchError."""
    parts = [part.partition("=")[::2] for part in text.split(",")]
    values = dict(parts)
    is_known = len(values) == len(parts) and set(values) in FORMS
    if not is_known or not all(value.isdecimal() or name == "host" and value for name, value in values.items()):
        raise LaunchError(
            f"--drain {text}: must name what leaves; use rank=3, replica=1, stage=1,replica=1 or host=NAME"
        )
    host = values.pop("host", None)
    return DrainTarget(host=host, **{name: int(value) for name, value in values.items()})


def choose_workers(target: DrainTarget, grid: Grid, hosts: Mapping[int, str]) -> DrainChoice:
    """Returns the live workers that `target` means; `hosts` has those of all live ones, in the grid or not."""
    if target.rank is not None:
        chosen = [rank for rank in hosts if rank == target.rank]
        missing = f"rank {target.rank} is not in the run, which has {_listed('rank', sorted(hosts))}"
    elif target.host is not None:
        chosen = [rank for rank, host in hosts.items() if host == target.host]
        missing = f"no worker is on host {target.host}: the run is on {_listed('host', sorted({*hosts.values()}))}"
    else:
        chosen, missing = _choose_replicas(target.stage, target.replica or 0, grid)
    return DrainChoice(ranks=tuple(sorted(chosen))) if chosen else DrainChoice(refusal=missing)


def _choose_replicas(stage: int | None, replica: int, grid: Grid) -> tuple[list[int], str]:
    """The ranks of a replica, of one stage or of all that have it, and what to say if there are none."""
    if stage is not None and stage >= grid.pp_size:
        return [], f"the run has no stage {stage}, but {_listed('stage', range(grid.pp_size))}"
    stages = range(grid.pp_size) if stage is None else (stage,)
    found = [grid.tp_ranks((each, replica)) for each in stages if replica in grid.stages[each]]
    there = _listed("replica", sorted({number for each in stages for number in grid.stages[each]}))
    who = "no stage has a" if stage is None else f"stage {stage} has no"
    missing = f"{who} replica {replica}: there {'is' if there.startswith('replica ') else 'are'} {there}"
    return [rank for ranks in found for rank in ranks], missing


def _listed(what: str, values: Iterable[object]) -> str:
    """Returns "ranks 0, 1 and 2", or how many there are if they are many."""
    names = list(values)
    if len(names) > MAX_NAMED:
        return f"{len(names):,} {what}s"
    return f"{what}{'' if len(names) == 1 else 's'} {list_words(names)}"
