"""Eager 1F1B (Zhuang et al. 2023, "On optimizing the communication of model parallelism"): a longer warmup."""

from __future__ import annotations

from parallel3d.pipeline.schedules.schedule import Component, Schedule


class EagerOneFOneB(Schedule):
    """Each stage runs ahead of the next by two micro-batches instead of one, so that a slow link hides."""

    name = "eager-1f1b"
    summary = "1f1b that holds up to 2 * pp_size - 1 micro-batches, so that messages overlap with computing."

    def in_flight_budgets(self, component: Component) -> list[int]:
        num_stages, extra = component.num_stages, component.extra_in_flight
        return [2 * (num_stages - stage) - 1 + extra for stage in component.stage_of]


SCHEDULE = EagerOneFOneB()
