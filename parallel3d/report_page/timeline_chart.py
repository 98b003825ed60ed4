"""The planned pipeline of a run as inline SVG: a row for each replica, time from left to right. Pure.

Of replicas that run alike one stands for all, so that the picture is as small as one pipeline. A plan with too many
computes is not drawn: it would be a grey area, and planning it takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from parallel3d.config.derived import stage_replicas
from parallel3d.config.schema import Config
from parallel3d.parallel.grid import Grid
from parallel3d.pipeline.instructions import Op, ReplicaId
from parallel3d.pipeline.planner import Event, Plan
from parallel3d.trainer.batching import plan_batch
from parallel3d.trainer.plans import plan_schedule

MAX_COMPUTES, MAX_ROWS, MAX_WIDTH = 3000, 32, 2400
LEFT, TOP, ROW, GAP = 64, 4, 24, 3
"""In pixels: the picture is not scaled, so that its text is legible on a phone, where it scrolls."""
CELL = 16.0
"""The width of the shortest compute, if all fit into MAX_WIDTH."""
DIGIT = 7.5
KINDS = {
    Op.FORWARD: ("forward", "f"),
    Op.BACKWARD: ("backward", "b"),
    Op.BACKWARD_INPUT: ("backward, inputs", "b"),
    Op.BACKWARD_WEIGHT: ("backward, weights", "w"),
}
"""The name and the class of each kind of compute."""


def plan_timeline(config: Config) -> Plan | None:
    """The plan of a full step on the grid with which the run begins; None where it is too large, or without stages.

    On a straight grid it is that of one pipeline.
    """
    widths, num_micro_batches = stage_replicas(config), plan_batch(config, 0).num_micro_batches
    if len(set(widths)) == 1:
        widths, num_micro_batches = (1,) * len(widths), max(1, num_micro_batches // widths[0])
    num_computes = 2 * num_micro_batches * len(widths) * config.parallel.virtual_stages
    if len(widths) * config.parallel.virtual_stages < 2 or num_computes > MAX_COMPUTES or sum(widths) > MAX_ROWS:
        return None
    return plan_schedule(config, Grid.of_replicas(widths, tp_size=1), num_micro_batches)


def draw_timeline(plan: Plan, name: str) -> str:
    """The SVG element; `name` makes its ids unique."""
    replicas = sorted({event.replica for event in plan.events})
    shortest = min(event.end - event.start for event in plan.events)
    scale = min(CELL / shortest, MAX_WIDTH / plan.makespan)
    width, height = LEFT + plan.makespan * scale + 2, TOP + ROW * len(replicas) + 2
    tops = {replica: TOP + ROW * row for row, replica in enumerate(replicas)}
    parts = [
        f'<svg width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}" role="img"'
        f' aria-labelledby="t-{name}" aria-describedby="d-{name}"><title id="t-{name}">Planned pipeline</title>',
        f'<desc id="d-{name}">{escape(describe_timeline(plan))}</desc>',
        *_row_names(plan, tops),
        f'<path class="idle" d="{"".join(_box(LEFT, top, plan.makespan * scale) for top in tops.values())}"/>',
    ]
    for letter in dict.fromkeys(letter for _, letter in KINDS.values()):
        boxes = [
            _box(LEFT + event.start * scale, tops[event.replica], (event.end - event.start) * scale)
            for event in plan.events
            if KINDS[event.op][1] == letter
        ]
        parts += [f'<path class="box {letter}" d="{"".join(boxes)}"/>'] if boxes else []
    return "".join([*parts, *_numbers(plan, tops, scale), "</svg>"])


def describe_timeline(plan: Plan) -> str:
    """The picture in words: the size of the plan, and the idle share of each row."""
    idle = (f"{_row_name(plan, replica)} {1 - busy / plan.makespan:.1%}" for replica, busy in sorted(plan.busy.items()))
    return (
        f"{plan.request.name}, {len(plan.request.replicas)} stages, {len(plan.routes)} micro-batches; idle share: "
        + ", ".join(idle)
    )


def kinds_of(plan: Plan) -> list[tuple[str, str]]:
    """Names and classes of the kinds of computes in the plan, for its legend."""
    present = {event.op for event in plan.events}
    return [kind for op, kind in KINDS.items() if op in present]


def _row_names(plan: Plan, tops: dict[ReplicaId, int]) -> Iterator[str]:
    for replica, top in tops.items():
        yield f'<text x="0" y="{top + 15}">{_row_name(plan, replica)}</text>'


def _row_name(plan: Plan, replica: ReplicaId) -> str:
    stage, number = replica
    return f"stage {stage}" if all(len(ids) == 1 for ids in plan.request.replicas) else f"stage {stage}.{number}"


def _numbers(plan: Plan, tops: dict[ReplicaId, int], scale: float) -> Iterator[str]:
    """The number of the micro-batch in each box that is wide enough."""
    for event in plan.events:
        text = str(event.micro_batch)
        if DIGIT * len(text) <= (event.end - event.start) * scale - 2:
            x, letter = LEFT + _middle(event) * scale, KINDS[event.op][1]
            yield f'<text class="in-{letter}" x="{x:.1f}" y="{tops[event.replica] + 15}" text-anchor="middle">'
            yield f"{text}</text>"


def _middle(event: Event) -> float:
    return (event.start + event.end) / 2


def _box(x: float, y: float, width: float) -> str:
    return f"M{x:.1f} {y}h{width:.1f}v{ROW - GAP}h{-width:.1f}z"
