"""Throughput of training that loses workers, as formulas: FlexiTrain's, and those that its paper lacks. Pure.

Failures are a Poisson process of `rate`; its inverse is the mean time between failures. Times may have any unit, rates
the inverse of it. Throughputs are shares of the fault-free run.

Sources: FlexiTrain (Salahi, Ding and Edamadaka), section 2.1.2; Young 1974; Daly 2006, equations 20 and 37.
"""

from __future__ import annotations

from math import exp, expm1, log, log1p, sqrt

NUM_MOMENTS = 100
"""Moments of a repair interval at which a mean over it is evaluated, by the midpoint rule."""


# --- checkpoint and restart -------------------------------------------------------------------------------------------


def mean_failure_time(*, rate: float, interval: float) -> float:
    """Mean time from the start of an interval to its first failure, if it has one: E[T | T < interval]."""
    return 1 / rate - interval / expm1(rate * interval)


def failure_probability(*, rate: float, interval: float) -> float:
    """Probability of a failure within an interval."""
    return -expm1(-rate * interval)


def single_failure_throughput(*, probability: float, wasted: float, interval: float) -> float:
    """FlexiTrain's estimate for checkpointing: an interval has no failure, or one that wastes this much."""
    return 1 - probability * wasted / interval


def restart_throughput(
    *, rate: float, interval: float, restart: float, save: float = 0.0, restart_can_fail: bool = False
) -> float:
    """Share of time whose work counts, if work that is done again can be lost again.

    `interval` of work lie between two saves, each of which stops training for `save`; a failure costs the work since
    the last save and the time to `restart`. By renewal: interval / ((e^(rate (interval + save)) - 1) (1 / rate +
    restart)). If a failure can also strike while the run restarts, which then begins again, the last factor is
    e^(rate restart) / rate: Daly's equation 20.
    """
    time = rate * (interval + save)
    begun = rate * exp(-rate * restart) if restart_can_fail else 1 / (1 / rate + restart)
    return interval * exp(-time) / -expm1(-time) * begun  # without e^time, which overflows at high rates


def restart_time_for(*, throughput: float, rate: float, interval: float, save: float = 0.0) -> float:
    """The time to restart, during which failures can strike, that gives this throughput.

    The inverse of `restart_throughput`.
    """
    return log(interval * rate / (expm1(rate * (interval + save)) * throughput)) / rate


def young_interval(*, rate: float, save: float) -> float:
    """Young's interval between saves: sqrt(2 save / rate)."""
    return sqrt(2 * save / rate)


def daly_interval(*, rate: float, save: float) -> float:
    """Daly's interval between saves, equation 37: of higher order, and 1 / rate where saving takes longer than that."""
    if save * rate >= 2:
        return 1 / rate
    root = sqrt(save * rate / 2)
    return young_interval(rate=rate, save=save) * (1 + root / 3 + root**2 / 9) - save


def best_interval(*, rate: float, save: float) -> float:
    """The interval that maximizes `restart_throughput`: the root of 1 - rate t = e^(-rate (t + save)).

    It does not depend on the time to restart.
    """
    low, high = 0.0, 1.0  # in units of 1 / rate
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - middle > exp(-middle - rate * save) else (low, middle)
    return high / rate


# --- the rest goes on -------------------------------------------------------------------------------------------------


def lower_bound_throughput(*, rate: float, interval: float, lost_share: float) -> float:
    """FlexiTrain's bound: what is left at the end of an interval, as if it had been lost at its beginning."""
    return 1 - rate * interval * lost_share


def lost_until_boundary(*, unit_rate: float, interval: float) -> float:
    """Mean share of units that are out, if each fails at `unit_rate` and returns at the end of its interval."""
    return 1 + expm1(-unit_rate * interval) / (unit_rate * interval)


def lost_until_return(*, unit_rate: float, out: float) -> float:
    """Mean share of units that are out, if each fails at `unit_rate` and returns after `out`."""
    return unit_rate * out / (1 + unit_rate * out)


def mean_most_lost(*, num_groups: int, members: int, probability: float) -> float:
    """Mean of the largest loss among equal groups whose members are out independently: that of the worst stage."""
    if probability <= 0:
        return 0.0
    if probability >= 1:
        return float(members)
    odds, below, mean = probability / (1 - probability), 0.0, 0.0
    log_mass = members * log1p(-probability)  # the mass itself is below the smallest number if 70 % of 768 are out
    for count in range(members):
        below += exp(log_mass)  # the probability that one group has lost at most `count`
        mean += 1 - min(1.0, below) ** num_groups
        log_mass += log(odds * (members - count) / (count + 1))
    return mean


def reroute_until_boundary(*, num_stages: int, replicas: int, unit_rate: float, interval: float) -> float:
    """Throughput if only the replica of a stage is lost, until the end of its interval: the narrowest stage's.

    Pauses are not in it, nor idle time that rerouted work could fill.
    """
    moments = [interval * (moment + 0.5) / NUM_MOMENTS for moment in range(NUM_MOMENTS)]
    lost = [
        mean_most_lost(num_groups=num_stages, members=replicas, probability=-expm1(-unit_rate * moment))
        for moment in moments
    ]
    return 1 - sum(lost) / NUM_MOMENTS / replicas


def reroute_until_return(*, num_stages: int, replicas: int, unit_rate: float, out: float) -> float:
    """Throughput if a lost replica of a stage returns after `out`: the narrowest stage's, without pauses."""
    probability = lost_until_return(unit_rate=unit_rate, out=out)
    return 1 - mean_most_lost(num_groups=num_stages, members=replicas, probability=probability) / replicas
