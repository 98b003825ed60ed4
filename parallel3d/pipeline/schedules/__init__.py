"""Pipeline schedules, one file each. A file of this folder that defines SCHEDULE is one, and so is every entry point of
the group parallel3d.schedules; nothing else names it. One more may be named as "package:object"."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from parallel3d.errors import ConfigError, Problem
from parallel3d.pipeline.schedules.schedule import Schedule
from parallel3d.user_code import FIX, errors_named, explain, installed, load_object


def _find_schedules() -> dict[str, Schedule]:
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    found: list[Schedule] = [module.SCHEDULE for module in modules if hasattr(module, "SCHEDULE")]
    found += installed("parallel3d.schedules")
    found.sort(key=lambda schedule: (not schedule.is_default, schedule.min_chunks, schedule.name))
    return {schedule.name: schedule for schedule in found}


SCHEDULES: dict[str, Schedule] = _find_schedules()
"""By name."""


def find_schedule(name: str) -> Schedule:
    """The schedule of a name in SCHEDULES, or the user's that is called "package:object"; raises ConfigError."""
    return SCHEDULES[name] if name in SCHEDULES else _load_schedule(name)


def schedule_code(name: str) -> AbstractContextManager[None]:
    """Names the user's file and line in an error of a schedule that the user wrote."""
    return errors_named(f"parallel.schedule {name}", find_schedule(name))


@cache
def _load_schedule(name: str) -> Schedule:
    found, rule = load_object(name, field="parallel.schedule"), ""
    try:
        schedule = found() if isinstance(found, type) else found
    except Exception as error:  # whatever the user's class raises
        rule = explain(error, found)
    else:
        if isinstance(schedule, Schedule) and hasattr(schedule, "name"):
            return schedule
        rule = f"is {type(schedule).__name__}, not a Schedule of parallel3d.pipeline.schedules.schedule with a name"
    raise ConfigError([Problem(field="parallel.schedule", value=name, rule=rule, fix=FIX)])


def default_schedule(num_chunks: int) -> str:
    """The schedule of a configuration that names none, for this number of chunks a stage."""
    return next(
        schedule.name
        for schedule in SCHEDULES.values()
        if schedule.is_default and schedule.find_broken_rule(2, num_chunks) is None
    )
