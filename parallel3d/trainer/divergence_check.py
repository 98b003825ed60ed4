"""Signs that training has diverged: a run that shows one ends, exit code 6, on all ranks after the same entry. Pure.

A sign is read from the folded state alone, so that every rank sees it, also one that has just recovered from a loss.
Further signs belong here, too.
"""

from __future__ import annotations

from parallel3d.trainer.state import TrainState

MAX_SKIPPED_AT_MIN_SCALE = 1
"""Steps in a row whose gradients may be infinite at the smallest loss scale; the next one has diverged."""


def find_divergence(state: TrainState, *, since: int = 0) -> str:
    """By what `state` has diverged, for a person; "" when it has not. Entries up to step `since` were judged before.

    A loss or gradient that is not finite: without a loss scale the first one, with a dynamic scale (fp16), which
    overflows on purpose now and then, the second in a row that comes although the scale can't become smaller. And
    what the monitors take for divergence (monitor/divergence.py), where that shall end a run.
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
