"""The text of `parallel3d plan --devices`: one layout on its devices, several machines, a ranking. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel3d.config.derived import num_parameters
from parallel3d.config.schema import Config
from parallel3d.costs.cliffs import explain_best, find_cliffs, parts_of_step
from parallel3d.costs.communication import AxisTraffic
from parallel3d.costs.failure_costs import WIDTHS, failure_costs, find_width_obstacle, width_estimates
from parallel3d.costs.layered_parameters import LayeredParameters
from parallel3d.costs.layout_estimate import LayoutEstimate, estimate_layout
from parallel3d.costs.layout_search import (
    RECOMPUTE,
    LayoutChoice,
    RankedLayouts,
    find_obstacle,
    on_machines,
    rank_layouts,
    why_not_tried,
)
from parallel3d.costs.machine_comparison import ComparedMachines, describe_comparison
from parallel3d.costs.machines import Machines
from parallel3d.costs.rank_memory import StageMemory, estimate_memory
from parallel3d.costs.rental import amount, duration
from parallel3d.rehearsal.device_rows import GIB

MOST_STAGES, MOST_RANKED = 8, 10


def describe_costs(
    config: Config, parts: LayeredParameters, machines: Sequence[Machines], num_tokens: float
) -> Iterator[str]:
    """The configuration's own layout on each of the machines; several are compared at the end.

    Raises UserError if it can use the devices of none.
    """
    if all(find_obstacle(config, each.num_devices) for each in machines):
        on_machines(config, machines[0])  # raises
    compared = []
    for each in machines:
        if obstacle := find_obstacle(config, each.num_devices):
            yield f"{each}: {obstacle.why}. {obstacle.fix}"
            compared.append(ComparedMachines(machines=each, estimate=None, reason=obstacle.why))
        else:
            placed = on_machines(config, each)
            estimate = estimate_layout(placed, parts, each)
            yield from describe_estimate(estimate, parts, num_tokens)
            if (config.parallel.dp_size or 1) != placed.parallel.dp_size:
                yield f"(the configuration's dp_size is {config.parallel.dp_size}; these devices hold what is shown)"
            compared.append(ComparedMachines(machines=each, estimate=estimate))
        yield ""
    if len(compared) > 1:
        yield from describe_comparison(compared, num_tokens)


def describe_estimate(estimate: LayoutEstimate, parts: LayeredParameters, num_tokens: float) -> Iterator[str]:
    """Memory, time, money, failures, width, warnings and a verdict."""
    machines, config = estimate.machines, estimate.config
    yield (
        f"{num_parameters(config.model) / 1e9:.3g}B parameters on {machines} ({machines.num_devices:,} devices): "
        f"{LayoutChoice.of(config)} (predicted)"
    )
    yield from describe_memory(estimate, parts)
    yield from describe_time(estimate)
    yield from describe_money(estimate, num_tokens)
    yield from describe_failures(estimate, num_tokens)
    yield from describe_width(estimate, parts, num_tokens)
    cliffs = list(find_cliffs(estimate))
    yield from (f"warning: {line}" for line in cliffs)
    yield f"verdict: {verdict(estimate, num_tokens)}"


def describe_memory(estimate: LayoutEstimate, parts: LayeredParameters) -> Iterator[str]:
    """A line for each stage, GiB of a rank, and what other modes of recomputation need."""
    names = ("weights", "gradients", "optimizer", "backup", "activations", "logits", "buffers", "context", "fragments")
    yield f"GiB a rank  {'layers':>6}" + "".join(f"{name:>12}" for name in (*names, "total"))
    shown = estimate.stages
    if len(shown) > MOST_STAGES:
        shown = (*shown[: MOST_STAGES - 2], estimate.worst, shown[-1])
    for memory in dict.fromkeys(shown):
        layers = sum(map(len, memory.layers))
        cells = "".join(f"{num_bytes / GIB:>12.2f}" for num_bytes in (*memory_parts(memory), memory.total))
        yield f"stage {memory.stage:<5} {layers:>6}{cells}"
    have = estimate.machines.device.memory_gib
    yield f"of {have:g} GiB; activations with recompute {estimate.config.parallel.recompute}"
    peaks = []
    for mode, worst in worst_by_recompute(estimate, parts).items():
        room = "" if worst.total <= have * GIB else ", does not fit"
        peaks.append(f"{mode} {worst.total / GIB:.2f} ({worst.activations / GIB:.2f} of activations{room})")
    yield f"GiB of the fullest rank by recompute: {'; '.join(peaks)}"


def worst_by_recompute(estimate: LayoutEstimate, parts: LayeredParameters) -> dict[str, StageMemory]:
    """The stage whose ranks need most memory, of the same layout under each mode of recomputation."""
    found = {}
    for mode in RECOMPUTE:
        parallel = estimate.config.parallel.model_copy(update={"recompute": mode})
        config = estimate.config.model_copy(update={"parallel": parallel})
        stages = estimate_memory(config, parts, on_device=not estimate.machines.device.is_cpu)
        found[mode] = max(stages, key=lambda stage: stage.total)
    return found


def memory_parts(memory: StageMemory) -> tuple[int, ...]:
    """In the order of the table."""
    state = memory.state
    return (
        state.weights,
        state.gradients,
        state.optimizer,
        state.backup,
        memory.activations,
        memory.logits,
        memory.buffers,
        memory.context,
        memory.fragmentation,
    )


def describe_time(estimate: LayoutEstimate) -> Iterator[str]:
    """The parts of a step, and the traffic by axis."""
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts_of_step(estimate).items() if seconds)
    yield f"step {estimate.step_s:.3g} s: {parts}"
    for axis, traffic in estimate.traffic.items():
        if traffic.num_bytes:
            yield f"  {axis}: {describe_traffic(traffic)}"
    yield f"bubble {estimate.bubble:.1%}, {estimate.tokens_per_s:,.0f} tokens/s, MFU {estimate.mfu:.1%}"


def describe_traffic(traffic: AxisTraffic) -> str:
    sent = f"{traffic.num_bytes / 1e9:,.3g} GB at {traffic.bandwidth / 1e9:,.3g} GB/s, {traffic.total_s:.3g} s"
    if not traffic.chain_length:
        return f"a rank sends {sent}, of which {traffic.exposed_s:.3g} s are waited for"
    return (
        f"a rank sends {sent}, of which {traffic.exposed_s:.3g} s outlast its passes; the step waits for "
        f"{traffic.chain_length:,} messages in a row, of all stages: {traffic.chain_s:.3g} s"
    )


def describe_money(estimate: LayoutEstimate, num_tokens: float) -> Iterator[str]:
    rental, device = estimate.rental(num_tokens), estimate.machines.device
    line = f"{num_tokens:.3g} tokens: {duration(rental.days)}"
    if rental.dollars is None or rental.dollars_per_mtoken is None:
        yield f"{line}; no price of {device.name} is known: give --price, or a row in --device-table"
        return
    yield f"{line}, {amount(rental.dollars)}, ${rental.dollars_per_mtoken:.4f} a million tokens"
    dated = f", {device.price_date}" if device.price_date else ", not dated"
    yield f"  at ${device.price_per_hour:.2f} a device and hour ({device.price_source}{dated}): replace it by yours"


def describe_failures(estimate: LayoutEstimate, num_tokens: float) -> Iterator[str]:
    costs, dollars = failure_costs(estimate), estimate.rental(num_tokens).dollars
    lost = ("", "") if dollars is None else tuple(f" (+{amount(each)})" for each in costs.dollars_lost(dollars))
    yield (
        f"failures: {costs.failures_per_day:.3g} a day at FlexiTrain's rate; restarts from checkpoints keep "
        f"{costs.restart:.1%}{lost[0]}, rerouting with returns after {costs.rejoin_s / 60:.0f} min "
        f"{costs.reroute:.1%}{lost[1]}"
    )
    if (estimate.config.parallel.dp_size or 1) > 1:
        yield f"  with one replica of one stage lost at least {costs.one_lost:.1%} of the speed is left"
    else:
        yield "  one replica: any loss ends in a restart"


def describe_width(estimate: LayoutEstimate, parts: LayeredParameters, num_tokens: float) -> Iterator[str]:
    """What half and twice the width cost, or why none such exists."""
    cells = []
    for each in width_estimates(estimate, parts):
        rental = each.rental(num_tokens)
        money = "" if rental.dollars is None else f", {amount(rental.dollars)}"
        room = "" if each.fits else ", does not fit"
        cells.append(
            f"{each.machines.num_hosts} hosts (dp{each.config.parallel.dp_size}) {duration(rental.days)}{money}{room}"
        )
    for name, factor in WIDTHS.items():
        if obstacle := find_width_obstacle(estimate, factor):
            cells.append(f"not {name}: {obstacle}")
    yield f"width: {'; '.join(cells)}"


def verdict(estimate: LayoutEstimate, num_tokens: float) -> str:
    """One sentence."""
    need, have = estimate.worst.total / GIB, estimate.machines.device.memory_gib
    if not estimate.fits:
        return f"does not fit: stage {estimate.worst.stage} needs {need:.1f} of {have:g} GiB; try --search"
    rental = estimate.rental(num_tokens)
    money = "" if rental.dollars is None else f" and {amount(rental.dollars)}"
    return f"fits ({need:.1f} of {have:g} GiB on stage {estimate.worst.stage}); {duration(rental.days)}{money}"


def describe_search(
    config: Config, parts: LayeredParameters, machines: Sequence[Machines], num_tokens: float, policies: Sequence[str]
) -> Iterator[str]:
    """The ranking on each of the machines, why the best wins, and its table; the best of several are compared."""
    compared = []
    for each in machines:
        ranked = rank_layouts(config, parts, each, policies)
        best = ranked.estimates[0] if ranked.estimates else None
        compared.append(ComparedMachines(machines=each, estimate=best, reason="no layout fits"))
        yield f"{each}: {ranked.num_tried:,} layouts, {len(ranked.estimates):,} fit"
        if best is None:
            yield from describe_nothing(ranked, config)
            yield ""
            continue
        yield from describe_ranking(ranked, num_tokens)
        yield from describe_place(ranked, config, each)
        yield "why the best wins:"
        yield from (f"  {line}" for line in explain_best(ranked))
        yield ""
        yield from describe_estimate(best, parts, num_tokens)
        yield ""
    if len(compared) > 1:
        yield from describe_comparison(compared, num_tokens)


def describe_ranking(ranked: RankedLayouts, num_tokens: float) -> Iterator[str]:
    best = ranked.estimates[0].step_s
    yield f"{'':>5}{'step s':>9}{'of best':>9}{'MFU':>7}{'bubble':>8}{'GiB':>7}{'days':>9}{'$':>13}"
    for place, (estimate, layout) in enumerate(zip(ranked.estimates[:MOST_RANKED], ranked.layouts), start=1):
        rental = estimate.rental(num_tokens)
        dollars = "" if rental.dollars is None else amount(rental.dollars).removeprefix("$")
        yield (
            f"{place:>4} {estimate.step_s:>9.3f}{estimate.step_s / best:>9.3f}{estimate.mfu:>7.1%}"
            f"{estimate.bubble:>8.1%}{estimate.worst.total / GIB:>7.1f}{rental.days:>9.3g}{dollars:>13}  {layout}"
        )


def describe_place(ranked: RankedLayouts, config: Config, machines: Machines) -> Iterator[str]:
    """The place of the configuration's own layout with as many replicas as the machines hold, or why it has none."""
    own = "the configuration's own layout"
    if obstacle := find_obstacle(config, machines.num_devices):
        yield f"{own} has no place: {obstacle.why}"
        return
    layout = LayoutChoice.of(on_machines(config, machines))
    if (place := ranked.place_of(layout)) is not None:
        slower = ranked.estimates[place - 1].step_s / ranked.estimates[0].step_s
        yield f"{own} has place {place:,} ({slower:.2f} times the best step): {layout}"
    elif layout in ranked.too_large:
        yield f"{own} does not fit, a rank needs {ranked.too_large[layout]:.1f} GiB: {layout}"
    else:
        yield f"{own} has no place, as the search did not try {why_not_tried(layout)}: {layout}"


def describe_nothing(ranked: RankedLayouts, config: Config) -> Iterator[str]:
    if not ranked.too_large:
        yield (
            f"no layout uses all devices: a batch of {config.batch.global_batch_size} sequences "
            "(batch.global_batch_size) is too small for the replicas, or sizes do not divide"
        )
        return
    layout = min(ranked.too_large, key=lambda each: ranked.too_large[each])
    yield f"the smallest needs {ranked.too_large[layout]:.1f} GiB a rank: {layout}"
