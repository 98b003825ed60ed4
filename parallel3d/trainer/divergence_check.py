"""Decides whether training has diverged; the run then ends with exit code 6, on all ranks after the same entry. Pure.

The decision reads the train state alone, so that all ranks agree, including one that has just recovered from a loss.
Further signs of divergence belong here.
"""

from __future__ import annotations

from parallel3d.trainer.state import TrainState

MAX_SKIPPED_AT_MIN_SCALE = 1
"""Consecutive non-finite steps allowed at the smallest loss scale; one more counts as divergence."""


def find_divergence(state: TrainState, *, since: int = 0) -> str:
    """The sign of divergence in `state`, as text; "" when there is none. Entries up to step `since` are not judged.

    Signs are the first non-finite loss or gradient without a loss scale; with a dynamic scale (fp16), which overflows
    on purpose now and then, the second in a row at the smallest scale; and the monitors' rules (monitor/divergence.py)
    if `monitor.divergence` is "stop".
    """
    newest = state.entries[-1] if state.entries else None
    if newest is None or newest.iteration <= since:
        return ""
    if newest.finite:
        return state.monitor.stop_reason
    what = "the loss or a gradient is not finite"
    if not state.loss_scale.is_dynamic:
        return what
    if state.loss_scale.num_skipped_at_min_scale <= MAX_SKIPPED_AT_MIN_SCALE:
        return ""
    return f"{what}, {state.loss_scale.num_skipped_at_min_scale} times in a row at the smallest loss scale"
