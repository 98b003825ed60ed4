"""All rules between fields. Each stands in the file of the section that it judges; rule.py describes rules."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.config.rule import Rule
from parallel3d.config.schema import Config
from parallel3d.config.sections import (
    batch,
    chat,
    checkpoint,
    curriculum,
    data,
    data_rules,
    debug,
    elastic,
    evaluation,
    lr_schedule,
    model,
    monitor,
    optimizer,
    parallel,
    precision,
    restart,
    run,
    warmup,
    warmup_rules,
)
from parallel3d.errors import Problem

SECTIONS = (
    model,
    parallel,
    batch,
    precision,
    optimizer,
    lr_schedule,
    warmup,
    curriculum,
    warmup_rules,
    data,
    chat,
    data_rules,
    elastic,
    checkpoint,
    evaluation,
    monitor,
    restart,
    debug,
    run,
)

RULES = tuple(value for section in SECTIONS for value in vars(section).values() if isinstance(value, Rule))
"""Every rule that a section's file defines."""


def broken_rules(config: Config, world_size: int | None, broken: set[str]) -> Iterator[Problem]:
    """The problems of all rules that read no field in `broken`."""
    for rule in RULES:
        if not any(_overlap(field, bad) for field in rule.fields for bad in broken):
            yield from rule.problems(config, world_size)


def _overlap(field: str, other: str) -> bool:
    """Whether one of two dotted names is the other, or a part of it."""
    return f"{field}.".startswith(f"{other}.") or f"{other}.".startswith(f"{field}.")
