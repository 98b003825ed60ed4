"""Bytes and seconds of a step's collectives and messages, by axis of the grid, and what of them nothing hides. Pure.

    tp   two gathers and two sums of (tokens, hidden) a layer and pass. Forward nothing runs beside them. Backward a
         gather of the gradient is waited for too; the inputs' gathers run beside the products for the inputs'
         gradients, the inputs' sums beside those for the weights
    dp   gradients, reduced while the last backward pass runs; weights, gathered under the first forward pass; backups
         of the reduced gradients, one message for each range
    pp   an activation and a gradient a micro-batch and border, beside the next pass. Those on the longest path through
         the step are waited for: they fill and drain the pipeline, and 1f1b waits for a round trip in every round

On CPUs nothing hides tp and dp: the cores that exchange are those that compute. A ring sends (n - 1) / n of the tensor.
Shares of the bandwidths are guesses, as in `rehearsal/roofline.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from parallel3d.config.schema import Config
from parallel3d.config.specs.policies import POLICY_SPECS
from parallel3d.costs.machines import Machines
from parallel3d.costs.rank_memory import MicroBatchSizes, StageMemory
from parallel3d.costs.stage_work import PassSeconds
from parallel3d.costs.state_bytes import EXACT_SUM_BYTES
from parallel3d.rehearsal.device_rows import ReachedRates


@dataclass(frozen=True, kw_only=True)
class AxisTraffic:
    """What one rank sends in a step along one axis."""

    num_bytes: int
    total_s: float
    """Time in which this rank sends."""
    exposed_s: float
    """The part of `total_s` in which nothing else runs."""
    bandwidth: float
    """Bytes/s that a rank has on this axis."""
    chain_s: float = 0.0
    """Time for which a step waits for messages of one rank after the other, of which this rank sends a few: it may be
    longer than `total_s`."""
    chain_length: int = 0
    """Those messages."""


NO_TRAFFIC = AxisTraffic(num_bytes=0, total_s=0.0, exposed_s=0.0, bandwidth=0.0)


def collective_s(num_bytes: float, size: int, bandwidth: float, rates: ReachedRates) -> float:
    """Seconds of a ring's one pass: a gather, or a sum that leaves each rank its part."""
    if size == 1:
        return 0.0
    return num_bytes * (size - 1) / size / (rates.collective * bandwidth) + rates.collective_start_s * log2(size)


def strides_of(config: Config) -> Mapping[str, int]:
    """The distance of neighbours on each axis, in ranks."""
    parallel = config.parallel
    replicas = parallel.dp_size or 1
    if parallel.order == "pp_dp_tp":
        return {"tp": 1, "dp": parallel.tp_size, "pp": parallel.tp_size * replicas}
    return {"tp": 1, "pp": parallel.tp_size, "dp": parallel.tp_size * parallel.pp_size}


@dataclass(frozen=True, kw_only=True)
class LayerTraffic:
    """The tensor-parallel collectives of one layer and micro-batch: seconds that are waited for."""

    forward_s: float
    backward_s: float
    total_s: float
    num_bytes: int
    bandwidth: float


def layer_traffic(config: Config, sizes: MicroBatchSizes, machines: Machines, passes: PassSeconds) -> LayerTraffic:
    """The collectives of one layer."""
    tp = config.parallel.tp_size
    bandwidth = machines.bandwidth(size=tp, stride=1)
    if tp == 1:
        return LayerTraffic(forward_s=0.0, backward_s=0.0, total_s=0.0, num_bytes=0, bandwidth=bandwidth)
    whole = sizes.num_tokens * config.model.hidden_size * sizes.itemsize
    one = collective_s(whole, tp, bandwidth, machines.device.rates)
    # without sharded tokens a sum is an all-reduce, of two passes, and nothing is gathered: as many passes
    forward = 4 * one
    overlapped = 4 * one  # inputs' gathers and sums; those of a plain region are two all-reduces
    hidden = 0.0 if machines.device.is_cpu else min(overlapped, sum(passes.layer_products))
    gathered_again = 2 * one if config.parallel.sequence_parallel else 0.0
    again = 3 if config.parallel.sequence_parallel else 2  # all but the sum of the layer's last product
    repeated = again * one if config.parallel.recompute == "full" else 0.0
    backward = gathered_again + overlapped - hidden + repeated
    passes_over = (10 if config.parallel.sequence_parallel else 8) + repeated / one
    return LayerTraffic(
        forward_s=forward,
        backward_s=backward,
        total_s=one * passes_over,
        num_bytes=int(passes_over * whole * (tp - 1) / tp),
        bandwidth=bandwidth,
    )


def replica_traffic(
    config: Config, memory: StageMemory, machines: Machines, *, forward_s: float, backward_s: float
) -> AxisTraffic:
    """The reduction of gradients and the gather of weights, under one micro-batch's backward and forward pass."""
    parallel, spec = config.parallel, POLICY_SPECS[config.precision.policy]
    replicas = parallel.dp_size or 1
    if replicas == 1:
        return NO_TRAFFIC
    bandwidth = machines.bandwidth(size=replicas, stride=strides_of(config)["dp"])
    is_exact = config.precision.sums == "exact"
    grads = memory.state.num_parameters * (EXACT_SUM_BYTES if is_exact else spec.grad.num_bytes)
    weights = memory.state.num_parameters * spec.compute.num_bytes
    rates = machines.device.rates
    starts_s = rates.collective_start_s * log2(replicas) * (memory.state.num_buckets - 1)
    reduce_s = collective_s(grads, replicas, bandwidth, rates) + starts_s
    gather_s = collective_s(weights, replicas, bandwidth, rates) + starts_s
    backup = grads / replicas if memory.state.backup else 0.0
    backup_s = backup / (rates.collective * bandwidth)
    if parallel.zero_stage == 0:
        reduce_s, gather_s, weights = 2 * reduce_s, 0.0, grads
    terms = is_exact or "accumulation" in config.precision.stochastic_rounding
    hides = not machines.device.is_cpu
    hides_reduce = hides and parallel.overlap_grad_reduce and not terms
    reduce_exposed = max(0.0, reduce_s - backward_s) if hides_reduce else reduce_s
    gather_exposed = max(0.0, gather_s - forward_s) if hides and parallel.overlap_param_gather else gather_s
    return AxisTraffic(
        num_bytes=int((grads + weights) * (replicas - 1) / replicas + backup),
        total_s=reduce_s + gather_s + backup_s,
        exposed_s=reduce_exposed + gather_exposed + backup_s,
        bandwidth=bandwidth,
    )


def message_seconds(config: Config, sizes: MicroBatchSizes, machines: Machines) -> tuple[float, float]:
    """Seconds of one message between neighbouring stages, and the bandwidth that a rank has for it."""
    stride = strides_of(config)["pp"]
    is_near = machines.is_within_host(size=config.parallel.pp_size, stride=stride)
    bandwidth = machines.device.link_bandwidth if is_near else machines.device.network_bandwidth
    rates = machines.device.rates
    return rates.collective_start_s + sizes.messages.activation_bytes / (rates.collective * bandwidth), bandwidth
