"""Published numbers about goodput beside what follows from the assumptions that were published with them. Pure.

FlexiTrain: Salahi, Ding and Edamadaka, section 2.1. HLAT: Fan et al., section IV-B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parallel3d.goodput import closed_forms
from parallel3d.goodput.paper_simulation import PaperCluster, Spread, simulate_checkpointing, simulate_rank_drop

RATE = 0.15
"""FlexiTrain's failures an hour: 10,000 x 1.5e-5."""
INTERVAL_H, RELOAD_H = 3.0, 1 / 3
RANK_SHARE = 156 / 10_000
NUM_MONTHS = 400
HLAT_BY_HAND, HLAT_AUTOMATIC = 77.83, 98.81


@dataclass(frozen=True, kw_only=True)
class PaperNumber:
    """One number; `follows` says whether the published one is the computed one, as published or within one month's
    noise."""

    what: str
    computed: float
    published: float | None = None
    follows: bool | None = None
    note: str = ""


def formulas() -> Iterator[PaperNumber]:
    """Yields FlexiTrain's derivation (Table 2), and what its paper lacks."""
    mean_min = 60 * closed_forms.mean_failure_time(rate=RATE, interval=INTERVAL_H)
    probability = closed_forms.failure_probability(rate=RATE, interval=INTERVAL_H)
    wasted_min = mean_min + 60 * RELOAD_H
    bound = 100 * closed_forms.lower_bound_throughput(rate=RATE, interval=INTERVAL_H, lost_share=RANK_SHARE)
    rounded = 100 * closed_forms.single_failure_throughput(probability=0.36, wasted=103.2, interval=180)
    exact = 100 * closed_forms.single_failure_throughput(probability=probability, wasted=wasted_min, interval=180)
    yield _formula("bound of the elastic throughput, %", bound, 99.30, "1 - 0.45 x 156 / 10,000")
    yield _formula("mean time to a failure within 3 hours, min", mean_min, 83.2, "cut off, not rounded", digits=1)
    yield _formula("time wasted by a failure, min", wasted_min, 103.2, "cut off, not rounded", digits=1)
    yield _formula("probability of a failure within 3 hours", probability, 0.36)
    yield _formula("throughput of checkpointing, %", rounded, 79.36, f"from rounded inputs; {exact:.2f} unrounded")
    out = closed_forms.lost_until_boundary(unit_rate=RATE / 64, interval=INTERVAL_H)
    renewal = 100 * closed_forms.restart_throughput(rate=RATE, interval=INTERVAL_H, restart=RELOAD_H)
    yield PaperNumber(what="exact elastic throughput instead of the bound, %", computed=100 * (1 - out))
    yield PaperNumber(
        what="throughput of checkpointing with repeated failures, %",
        computed=renewal,
        note="3 / ((e^0.45 - 1) (1 / 0.15 + 1/3)); the paper lets an interval fail once",
    )
    for minutes in (1, 5):
        best = closed_forms.best_interval(rate=RATE, save=minutes / 60)
        throughput = closed_forms.restart_throughput(rate=RATE, interval=best, restart=RELOAD_H, save=minutes / 60)
        yield PaperNumber(
            what=f"the same with the best interval, a save of {minutes} min, %",
            computed=100 * throughput,
            note=f"a checkpoint every {60 * best:.0f} min (Young: "
            f"{60 * closed_forms.young_interval(rate=RATE, save=minutes / 60):.0f}, Daly: "
            f"{60 * closed_forms.daly_interval(rate=RATE, save=minutes / 60):.0f})",
        )
    yield _formula("advantage in Table 1, points", 99.85 - 80.18, 20, 'the "20 %" of the abstract', digits=0)


def simulations(num_months: int = NUM_MONTHS) -> Iterator[PaperNumber]:
    """Yields FlexiTrain's Table 1, simulated, with the distance of the published number in standard deviations."""
    cluster = PaperCluster()
    months = simulate_checkpointing(cluster, num_months=num_months)
    other = simulate_checkpointing(
        cluster, num_months=num_months, failing_interval="counted", resumes_at_checkpoint=True
    )
    yield _simulated("checkpointing, the published program's rule, %", months.throughput, 80.18)
    yield PaperNumber(
        what="  a failure's time after the checkpoint, min", computed=months.failure_minutes, published=81
    )
    yield _simulated(
        "  if the failing interval counts and a restart resumes at a checkpoint, %", other.throughput, 80.18
    )
    elastic = {
        "elastic, a rank of 156 devices out until the next checkpoint (the paper's words), %": (cluster, None),
        "  out for 40 minutes, %": (cluster, 4),
        "  checkpoints every 70 minutes, %": (replace(cluster, checkpoint=7), None),
        "  the published program's 3.7e-6 and 30 minutes, %": (replace(cluster, failure_probability=3.7e-6), 3),
    }
    for what, (changed, out) in elastic.items():
        yield _simulated(what, simulate_rank_drop(changed, num_months=num_months, out=out), 99.85)
    as_published = replace(cluster, failure_probability=3.7e-6, reload=3)
    one_device = simulate_rank_drop(as_published, num_months=num_months, out=3, rank_share=1 / cluster.num_devices)
    stopped = simulate_checkpointing(as_published, num_months=num_months).throughput
    yield _simulated("the published program as it stands (one device lost): elastic, %", one_device, 99.85)
    yield _simulated("the published program as it stands: checkpointing, %", stopped, 80.18)
    yield PaperNumber(
        what="mean time out that gives 99.85, min",
        computed=10 * (1 - 0.9985) / (cluster.any_failure / cluster.num_ranks),
        note="until the next checkpoint it would be 95 min",
    )


@dataclass(frozen=True, kw_only=True)
class UptimeAssumptions:
    """Assumptions under which both of HLAT's uptimes follow; the paper has none of these times."""

    failures_per_hour: float = 1 / 24
    interval_h: float = 0.25
    """Between two checkpoints."""

    def restart_hours(self, uptime: float) -> float:
        """The time from a failure to the restart that gives this uptime, a share."""
        return closed_forms.restart_time_for(throughput=uptime, rate=self.failures_per_hour, interval=self.interval_h)


def uptimes(assumptions: UptimeAssumptions) -> Iterator[PaperNumber]:
    """Yields HLAT's uptimes, and the delays that they need."""
    automatic_h, by_hand_h = (assumptions.restart_hours(each / 100) for each in (HLAT_AUTOMATIC, HLAT_BY_HAND))
    yield _formula(
        "uptime gained by automatic recovery, points", HLAT_AUTOMATIC - HLAT_BY_HAND, 20, '"improved 20%"', digits=0
    )
    yield PaperNumber(what="downtime by hand / automatic", computed=(100 - HLAT_BY_HAND) / (100 - HLAT_AUTOMATIC))
    yield PaperNumber(
        what="restart that gives 98.81, min",
        computed=60 * automatic_h,
        note=f"with a failure every {1 / assumptions.failures_per_hour:g} h and a checkpoint every "
        f"{60 * assumptions.interval_h:g} min",
    )
    yield PaperNumber(
        what="a person's delay that gives 77.83, h", computed=by_hand_h - automatic_h, note="all else equal"
    )


def _formula(what: str, computed: float, published: float, note: str = "", digits: int = 2) -> PaperNumber:
    """A number that follows if it is the published one at `digits`, rounded or cut off."""
    follows = abs(computed - published) < 10**-digits
    return PaperNumber(what=what, computed=computed, published=published, follows=follows, note=note)


def _simulated(what: str, spread: Spread, published: float) -> PaperNumber:
    """A number that follows if it is within two standard deviations of one simulated month."""
    z_score = spread.z_score(published)
    note = f"standard deviation of a month {spread.sd:.2g}, z {z_score:+,.1f}"
    return PaperNumber(what=what, computed=spread.mean, published=published, follows=abs(z_score) < 2, note=note)
