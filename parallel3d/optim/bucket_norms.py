"""Norms of the gradients and states of a rank's buckets: its parts of the sums over the model.

Float norms stay on the device until the iteration's numbers are read together. The norms of weights and second moments
that an update has measured are those of the state before the next one; any other state is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isnan

from torch import Tensor

from parallel3d.kernels.range_kernels import RangeKernels
from parallel3d.optim.bucket import Bucket
from parallel3d.optim.measure import measure_state, measure_state_exactly, norms_of
from parallel3d.optim.state_norms import StateNorms
from parallel3d.optim.update_rules.update_rule import EXP_AVG_SQ
from parallel3d.parallel.host_numbers import HostNumbers
from parallel3d.precision.exact_sums import sum_of_squares
from parallel3d.precision.fixed_point import ExactSum


def squared_norm(
    buckets: Sequence[Bucket], tp_rank: int, kernels: RangeKernels, numbers: HostNumbers
) -> Callable[[], ExactSum]:
    """The squared norm of those of the owned gradients that rank `tp_rank` counts, once `numbers` are read."""
    exact, parts = ExactSum(), list[Tensor]()
    for bucket in buckets:
        for part in bucket.counted(tp_rank):
            if bucket.fixed is None:
                parts.append(bucket.owned.grads[part])
            else:
                exact += sum_of_squares(bucket.owned.sums[part], bucket.fixed)
    read = numbers.add(kernels.squared_norms(parts))
    return lambda: exact + ExactSum.of(read())


def state_norms(
    buckets: Sequence[Bucket], tp_rank: int, kernels: RangeKernels, numbers: HostNumbers
) -> Callable[[], StateNorms]:
    """Norms of those of the owned weights, and of exp_avg_sq if the rule has it, that rank `tp_rank` counts."""
    norms: list[Callable[[], StateNorms]] = []
    measured = [bucket.updated_norms for bucket in buckets if bucket.updated_norms is not None]
    if measured and kernels.add_norms is not None:
        norms.append(partial(_norms_of_updates, numbers.add(kernels.add_norms(measured))))
    for bucket in buckets:
        if bucket.updated_norms is None:
            norms.extend(_measure(bucket, part, numbers) for part in bucket.counted(tp_rank) if part.stop > part.start)
    return lambda: sum((each() for each in norms), start=StateNorms())


def _measure(bucket: Bucket, part: slice, numbers: HostNumbers) -> Callable[[], StateNorms]:
    states, rule = bucket.owned.states, bucket.rule
    exp_avg_sq = states[rule.states.index(EXP_AVG_SQ)][part] if EXP_AVG_SQ in rule.states else None
    weights = bucket.owned.master[part]
    if bucket.fixed is not None:
        exact = measure_state_exactly(weights, exp_avg_sq)
        return lambda: exact
    read = numbers.add(measure_state(weights, exp_avg_sq))
    return lambda: norms_of(read())


def _norms_of_updates(read: Callable[[], list[float]]) -> StateNorms:
    """A kernel's maximum may pass over a NaN, its sum does not."""
    squared, total, largest = read()
    return norms_of([squared, total, total if isnan(total) else largest])
