"""1F1B, also called PipeDream-flush (Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training")."""

from __future__ import annotations

from parallel3d.pipeline.schedules.schedule import Component, Schedule


class OneFOneB(Schedule):
    """A forward while fewer than P - stage micro-batches are forwarded and not yet backwarded, else a backward::

    stage 0   F0 F1 F2 .  .  .  .  B0    F3 B1
    stage 1      F0 F1 .  .  B0    F2 B1    F3
    stage 2         F0 B0    F1 B1    F2 B2
    """

    name = "1f1b"
    summary = "one forward, one backward (PipeDream-flush); a stage holds the activations of at most pp_size."
    is_default = True

    def in_flight_budgets(self, component: Component) -> list[int]:
        num_stages, extra = component.num_stages, component.extra_in_flight
        return [num_stages - stage + extra for stage in component.stage_of]


SCHEDULE = OneFOneB()
