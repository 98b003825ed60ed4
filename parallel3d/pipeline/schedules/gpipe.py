"""GPipe: every forward before the first backward (Huang et al. 2019). Holds the activations of all micro-batches."""

from __future__ import annotations

from parallel3d.pipeline.schedules.schedule import Component, Schedule


class GPipe(Schedule):
    """F0 F1 F2 F3 B0 B1 B2 B3 on every stage."""

    name = "gpipe"
    summary = "every forward before the first backward; a stage holds the activations of all its micro-batches."
    limits_in_flight = False
    backwards_wait = True

    def in_flight_budgets(self, component: Component) -> list[int]:
        return [component.num_micro_batches] * len(component.stage_of)

    def prefers_backward(self, component: Component) -> bool:
        return False


SCHEDULE = GPipe()
