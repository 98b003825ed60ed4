"""Several machines for one run in one table, the cheapest first. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from parallel3d.costs.layout_estimate import LayoutEstimate
from parallel3d.costs.layout_search import LayoutChoice
from parallel3d.costs.machines import Machines
from parallel3d.costs.rental import amount, duration
from parallel3d.rehearsal.device_rows import GIB
from parallel3d.studies.text_table import draw_columns


@dataclass(frozen=True, kw_only=True)
class ComparedMachines:
    """Machines, and the layout that is compared on them."""

    machines: Machines
    estimate: LayoutEstimate | None
    reason: str = ""
    """Why there is none."""

    @property
    def usable(self) -> LayoutEstimate | None:
        """The layout if it fits."""
        return self.estimate if self.estimate and self.estimate.fits else None

    def cost_key(self, num_tokens: float) -> tuple[bool, float, float]:
        """Sorts by dollars; then what has no price, by days, and what can't run."""
        if (usable := self.usable) is None:
            return True, inf, inf
        rental = usable.rental(num_tokens)
        return False, inf if rental.dollars is None else rental.dollars, rental.days


def describe_comparison(compared: Sequence[ComparedMachines], num_tokens: float) -> Iterator[str]:
    """A row for each of the machines, sorted by dollars, and a line that names the cheapest."""
    ranked = sorted(compared, key=lambda each: each.cost_key(num_tokens))
    rows = [["machine", "tokens/s", "days", "$", "$/Mtoken", "layout"]]
    rows += [[str(each.machines), *_cells(each, num_tokens)] for each in ranked]
    yield f"{num_tokens:.3g} tokens on each, by dollars (predicted):"
    yield from draw_columns(rows, left=(0, len(rows[0]) - 1))
    yield _name_cheapest(ranked, num_tokens)


def _cells(compared: ComparedMachines, num_tokens: float) -> tuple[str, ...]:
    estimate, usable = compared.estimate, compared.usable
    if estimate is None:
        return ("-", "-", "-", "-", compared.reason)
    layout = str(LayoutChoice.of(estimate.config))
    if usable is None:
        need, have = estimate.worst.total / GIB, compared.machines.device.memory_gib
        return ("-", "-", "-", "-", f"does not fit, {need:.1f} of {have:g} GiB: {layout}")
    rental = usable.rental(num_tokens)
    dollars, each = rental.dollars, rental.dollars_per_mtoken
    return (
        f"{usable.tokens_per_s:,.0f}",
        f"{rental.days:,.3g}",
        "no price" if dollars is None else amount(dollars).removeprefix("$"),
        "-" if each is None else f"{each:.4f}",
        layout,
    )


def _name_cheapest(ranked: Sequence[ComparedMachines], num_tokens: float) -> str:
    usable = ranked[0].usable
    if usable is None:
        return "cheapest: it runs on none of them"
    rental = usable.rental(num_tokens)
    if rental.dollars is None:
        return "cheapest: no price of a machine that fits is known: give --price, or rows in --device-table"
    others = " (of those with a price)" if any(_has_no_price(each) for each in ranked) else ""
    return f"cheapest{others}: {ranked[0].machines}, {amount(rental.dollars)} in {duration(rental.days)}"


def _has_no_price(compared: ComparedMachines) -> bool:
    return compared.usable is not None and compared.machines.price_per_hour is None
