"""Time and money of a rental, and figures that compare rentals. Pure.

Sources: the blog on GPT-2 163M (gross and net costs of a machine); HLAT (Fan et al. 2024), section IV: the cost of a
machine for 4 million tokens, C / (3,600 T) x 4e6, normalised to a baseline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SECONDS_PER_HOUR = 3600
SECONDS_PER_DAY = 86_400
MILLION = 1e6
HLAT_TOKENS = 4 * MILLION
"""Tokens of which HLAT gives the cost: nearly those of one of its steps."""
FLAT = 1.1
"""A scaling whose cost for a token grows by less is flat."""


@dataclass(frozen=True, kw_only=True)
class Rental:
    """Machines at a price, that train at a speed."""

    price_per_hour: float | None
    """Dollars for all of them; None: unknown."""
    tokens_per_s: float
    num_tokens: float

    @property
    def days(self) -> float:
        return self.num_tokens / self.tokens_per_s / SECONDS_PER_DAY

    @property
    def dollars(self) -> float | None:
        return self._for(self.num_tokens)

    @property
    def dollars_per_mtoken(self) -> float | None:
        """Dollars for a million tokens."""
        return self._for(MILLION)

    def _for(self, num_tokens: float) -> float | None:
        if self.price_per_hour is None:
            return None
        return cost_of_tokens(self.price_per_hour, self.tokens_per_s, num_tokens)


def cost_of_time(price_per_hour: float, seconds: float) -> float:
    """Dollars for this long."""
    return price_per_hour * seconds / SECONDS_PER_HOUR


def cost_of_tokens(price_per_hour: float, tokens_per_s: float, num_tokens: float = HLAT_TOKENS) -> float:
    """Dollars for these tokens; by default for HLAT's 4 million."""
    return cost_of_time(price_per_hour, num_tokens / tokens_per_s)


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run on a rented machine, as its log has it."""

    price_per_hour: float
    seconds: float
    """Of the whole run, evaluations included."""
    num_evaluations: int
    evaluation_s: float
    num_tokens: float

    @property
    def net_s(self) -> float:
        """Without the evaluations."""
        return self.seconds - self.num_evaluations * self.evaluation_s

    @property
    def gross_dollars(self) -> float:
        return cost_of_time(self.price_per_hour, self.seconds)

    @property
    def net_dollars(self) -> float:
        return cost_of_time(self.price_per_hour, self.net_s)

    @property
    def evaluation_dollars(self) -> float:
        return self.gross_dollars - self.net_dollars

    @property
    def tokens_per_s(self) -> tuple[float, float]:
        """Over the whole run, and without its evaluations."""
        return self.num_tokens / self.seconds, self.num_tokens / self.net_s

    @property
    def dollars_per_mtoken(self) -> float:
        return self.gross_dollars / self.num_tokens * MILLION


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One size of a scaling report."""

    num_hosts: int
    cost: float | None
    """Dollars for HLAT's tokens; None: the model does not fit."""
    relative: float | None
    """To the cheapest size's."""

    @property
    def is_flat(self) -> bool | None:
        return None if self.relative is None else self.relative <= FLAT


def scaling_report(speeds: Mapping[int, float | None], price_of_host: float) -> list[ScalingRow]:
    """Costs by number of hosts, from tokens/s; None where the model does not fit."""
    costs = {
        hosts: None if speed is None else cost_of_tokens(hosts * price_of_host, speed)
        for hosts, speed in sorted(speeds.items())
    }
    least = min((cost for cost in costs.values() if cost is not None), default=None)
    return [
        ScalingRow(num_hosts=hosts, cost=cost, relative=None if cost is None or least is None else cost / least)
        for hosts, cost in costs.items()
    ]


# --- text -------------------------------------------------------------------------------------------------------------


def duration(days: float) -> str:
    """Days, or hours, minutes or seconds if it is less than one."""
    for unit, size in (("days", 1), ("hours", 24), ("minutes", 1440)):
        if days * size >= 1:
            return f"{days * size:,.3g} {unit}"
    return f"{days * 86400:,.2g} seconds"


def amount(dollars: float) -> str:
    """Dollars; small amounts with cents."""
    return f"${dollars:,.0f}" if dollars >= 100 else f"${dollars:,.2f}"
