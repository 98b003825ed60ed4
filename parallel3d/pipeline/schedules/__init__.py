"""Pipeline schedules, one file each. A file of this folder that defines SCHEDULE is one, and so is every entry point of
the group parallel3d.schedules; nothing else names it."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from parallel3d.pipeline.schedules.schedule import Schedule
from parallel3d.user_code import installed


def _find_schedules() -> dict[str, Schedule]:
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    found: list[Schedule] = [module.SCHEDULE for module in modules if hasattr(module, "SCHEDULE")]
    found += installed("parallel3d.schedules")
    found.sort(key=lambda schedule: (not schedule.is_default, schedule.min_chunks, schedule.name))
    return {schedule.name: schedule for schedule in found}


SCHEDULES: dict[str, Schedule] = _find_schedules()
"""By name."""


def default_schedule(num_chunks: int) -> str:
    """The schedule of a configuration that names none, for this number of chunks a stage."""
    return next(
        schedule.name
        for schedule in SCHEDULES.values()
        if schedule.is_default and schedule.find_broken_rule(2, num_chunks) is None
    )
