"""Estimates the memory of a configuration whose ranks all live in this process."""

from __future__ import annotations

from pathlib import Path

from parallel3d.config.derived import num_parameters, stage_replicas
from parallel3d.config.schema import Config
from parallel3d.optim.update_rules import rules_of
from parallel3d.pipeline.check import check_plan
from parallel3d.precision.policy import policy_of
from parallel3d.trainer.batching import plan_batch
from parallel3d.trainer.message_sizes import estimate_message_sizes
from parallel3d.trainer.plans import build_grid, plan_schedule, split_layers


def estimate_bytes(config: Config) -> int:
    """Estimates all ranks' weights, gradients, optimizer states and activations, and the copies for a comparison."""
    policy, replicas = policy_of(config.precision), stage_replicas(config)
    weight, grad, state = policy.compute.itemsize, policy.grad.itemsize, policy.state.itemsize
    num_holders = len(replicas) * (1 + config.elastic.zero_backups)
    if config.parallel.zero_stage == 0:
        num_holders = sum(replicas)
    exact_sum_bytes = 8 if config.precision.sums == "exact" else 0
    everywhere = 3 * weight + grad + exact_sum_bytes  # a rank keeps two copies of its weights
    num_states = max(len(rule.states) for rule in rules_of(config.optimizer.kind)) + (1 if policy.has_master else 0)
    where_held = num_states * state + grad
    for_comparison = 2 * (2 * weight + 2 * grad)  # weights and gradients, first and last, of this run and one process
    mean = [count / len(replicas) for count in (sum(replicas), min(num_holders, sum(replicas)))]
    per_parameter = mean[0] * everywhere + mean[1] * where_held + 2 * grad + for_comparison
    return int(num_parameters(config.model) * per_parameter) + activation_bytes(config)


def activation_bytes(config: Config) -> int:
    """Returns the peak bytes that all ranks hold for their backward passes."""
    grid = build_grid(config)
    plan = plan_schedule(config, grid, plan_batch(config, 0).num_micro_batches)
    report = check_plan(plan, config.parallel.p2p_slots, estimate_message_sizes(config, split_layers(config)))
    return sum(report.peak_bytes.values()) * grid.tp_size


def available_bytes() -> int | None:
    """Returns the memory that is available to this process; None if unknown."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))
