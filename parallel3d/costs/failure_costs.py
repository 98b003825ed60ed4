"""What failures will cost on these machines, and what width is worth. Pure.

The formulas are those of `goodput/closed_forms.py`; rates, pauses and saves are `goodput/scenario.py`'s defaults,
FlexiTrain's failures among them: assumptions. `parallel3d goodput` changes them, and simulates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallel3d.costs.layered_parameters import LayeredParameters
from parallel3d.costs.layout_estimate import LayoutEstimate, estimate_layout
from parallel3d.goodput.closed_forms import best_interval, reroute_until_return, restart_throughput
from parallel3d.goodput.scenario import Scenario

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class FailureCosts:
    """Shares of the fault-free throughput."""

    failures_per_day: float
    restart: float
    """Every failure restarts the run from a checkpoint, saved at the best interval."""
    reroute: float
    """Others take over the work of a lost replica until it is back."""
    rejoin_s: float
    """Seconds until then."""
    one_lost: float
    """Throughput with one replica of one stage lost."""

    def dollars_lost(self, dollars: float) -> tuple[float, float]:
        """Returns what a fault-free run of these dollars costs more: with restarts, and rerouted."""
        return dollars * (1 / max(self.restart, 1e-9) - 1), dollars * (1 / max(self.reroute, 1e-9) - 1)


def failure_costs(estimate: LayoutEstimate, scenario: Scenario | None = None) -> FailureCosts:
    """The costs for one layout, at its own time of a step."""
    scenario, parallel = scenario or Scenario(), estimate.config.parallel
    replicas = parallel.dp_size or 1
    rate = estimate.machines.num_devices * scenario.failures.base_rate / SECONDS_PER_HOUR
    restarts, recoveries = scenario.restarts, scenario.recoveries
    restart = restart_throughput(
        rate=rate,
        interval=best_interval(rate=rate, save=restarts.save_s),
        restart=restarts.restart_s,
        save=restarts.save_s,
        restart_can_fail=True,
    )
    rejoin_s = max(recoveries.rejoin_s)
    reroute = restart
    if replicas > 1:
        kept = reroute_until_return(
            num_stages=parallel.pp_size, replicas=replicas, unit_rate=rate / replicas / parallel.pp_size, out=rejoin_s
        )
        pauses = recoveries.pause_s + estimate.step_s / 2 + recoveries.join_pause_s
        saving = restarts.save_s / (recoveries.save_interval_s + restarts.save_s)
        reroute = max(0.0, kept - rate * pauses) * (1 - saving)
    return FailureCosts(
        failures_per_day=rate * 24 * SECONDS_PER_HOUR,
        restart=restart,
        reroute=reroute,
        rejoin_s=rejoin_s,
        one_lost=(replicas - 1) / replicas,
    )


WIDTHS = {"half": 0.5, "twice": 2.0}


def width_estimates(estimate: LayoutEstimate, parts: LayeredParameters) -> list[LayoutEstimate]:
    """The same layout with half and with twice as many replicas, where nothing prevents it; its own between them."""
    found = [estimate]
    for factor in WIDTHS.values():
        if find_width_obstacle(estimate, factor):
            continue
        width = int((estimate.config.parallel.dp_size or 1) * factor)
        parallel = estimate.config.parallel.model_copy(update={"dp_size": width})
        config = estimate.config.model_copy(update={"parallel": parallel})
        hosts = int(estimate.machines.num_hosts * factor)
        found.append(estimate_layout(config, parts, replace(estimate.machines, num_hosts=hosts)))
    return sorted(found, key=lambda each: each.machines.num_hosts)


def find_width_obstacle(estimate: LayoutEstimate, factor: float) -> str:
    """What prevents the layout with this multiple of the replicas and hosts; empty if nothing does."""
    replicas, hosts = estimate.config.parallel.dp_size or 1, estimate.machines.num_hosts
    count = estimate.config.batch.num_micro_batches
    assert count is not None
    for number, name in ((replicas, "replica"), (hosts, "host")):
        if not (number * factor).is_integer():
            return f"{number:,} {name}{'s' if number > 1 else ''} can't be halved"
    if (width := int(replicas * factor)) > count:
        return f"{width:,} replicas need as many micro-batches, and a step has {count:,}"
    return ""
