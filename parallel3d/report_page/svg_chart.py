"""A chart as inline SVG: it needs no script, scales with its column, and says in words what it shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from parallel3d.report_page.page_chart import Chart, Series
from parallel3d.report_page.scales import Scale, format_number, linear_scale, log_scale

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 388, 10, 190
"""The frame of the curves, in units of the view box; page.js uses it, too."""
LOG_RANGE = 100.0
"""From this ratio of the largest value to the median on, the axis is logarithmic."""
NUM_COLOURS = 6
LABEL_HEIGHT = 12


def scales_of(chart: Chart) -> tuple[Scale, Scale]:
    """The scales of x (steps) and of y."""
    xs = [x for series in chart.series for x in series.curve.x]
    lows = [y for series in chart.series for y in series.curve.low]
    highs = [y for series in chart.series for y in series.curve.high]
    means = sorted(y for series in chart.series for y in series.curve.mean)
    shown = [line.value for line in chart.references if line.value <= 2 * max(highs)]
    x = linear_scale(min(0.0, *xs), max(xs), num_ticks=4, least_step=1.0)
    x = Scale(low=x.low, high=max(xs), ticks=tuple(tick for tick in x.ticks if tick <= max(xs)))
    if min(lows) > 0 and max(highs) > LOG_RANGE * means[len(means) // 2]:
        return x, log_scale(min(lows), max(highs))
    least_step = 1.0 if chart.is_count else 0.0
    return x, linear_scale(
        min([*lows, *shown]), max([*highs, *shown]), from_zero=chart.from_zero, least_step=least_step
    )


def draw_chart(chart: Chart) -> str:
    """The SVG element."""
    x, y = scales_of(chart)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-labelledby="t-{chart.name}"'
        f' aria-describedby="d-{chart.name}">',
        f'<title id="t-{chart.name}">{escape(chart.title)}</title>',
        f'<desc id="d-{chart.name}">{escape(describe(chart))}</desc>',
        *_axes(x, y),
        *_marks(chart, x),
    ]
    for series in chart.series:
        parts += _draw_series(series, x, y)
    parts += _references(chart, y)  # over the curves, so that their labels can be read
    parts.append(f'<line class="cross" x1="0" x2="0" y1="{TOP}" y2="{BOTTOM}" visibility="hidden"/></svg>')
    return "".join(parts)


def describe(chart: Chart) -> str:
    """The contents of the chart in words."""
    said = []
    for series in chart.series:
        curve, error = series.curve, series.errors[-1] if series.errors else None
        lows, highs = (curve.mean, curve.mean) if series.kind == "errors" else (curve.low, curve.high)
        said.append(
            f"{series.label}: {format_number(curve.mean[0])} at step {curve.x[0]:,.0f}, "
            f"{format_number(curve.mean[-1])} at step {curve.x[-1]:,.0f}"
            f"{'' if error is None else f' with a standard error of {format_number(error)}'}, "
            f"from {format_number(min(lows))} to {format_number(max(highs))}"
        )
    return ". ".join([*said, *(f"{line.label}: {format_number(line.value)}" for line in chart.references)])


def _axes(x: Scale, y: Scale) -> Iterator[str]:
    for tick in y.ticks:
        at = _y(y, tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{format_number(tick)}</text>'
    for tick in x.ticks:
        yield f'<text x="{_x(x, tick):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{format_number(tick)}</text>'


def _marks(chart: Chart, x: Scale) -> Iterator[str]:
    for step, what in chart.marks:
        at = _x(x, step)
        yield f'<line class="mark" aria-hidden="true" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{BOTTOM}">'
        yield f"<title>step {step:,}: {escape(what)}</title></line>"


def _references(chart: Chart, y: Scale) -> Iterator[str]:
    """The lines from the highest to the lowest; a label moves down where it would lie on the one before."""
    shown = sorted((line for line in chart.references if y.low <= line.value <= y.high), key=lambda line: -line.value)
    label_y = 0.0
    for line in shown:
        at = _y(y, line.value)
        label_y = max(at + LABEL_HEIGHT if at < TOP + LABEL_HEIGHT else at - 4, label_y + LABEL_HEIGHT)
        colour = "" if line.run is None else f" c{line.run % NUM_COLOURS}"
        yield f'<line class="reference{colour}" x1="{LEFT}" x2="{RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        label = escape(line.label)
        yield f'<text class="note{colour}" x="{RIGHT}" y="{label_y:.1f}" text-anchor="end">{label}</text>'


def _draw_series(series: Series, x: Scale, y: Scale) -> Iterator[str]:
    colour, curve = f"c{series.run % NUM_COLOURS}", series.curve
    xs = [_x(x, value) for value in curve.x]
    means = [_y(y, value) for value in curve.mean]
    if series.kind == "spikes":
        yield from (f'<circle class="spike" cx="{a:.1f}" cy="{b:.1f}" r="4.5"/>' for a, b in zip(xs, means))
        return
    if series.kind == "errors":
        ends = [(_y(y, low), _y(y, high)) for low, high in zip(curve.low, curve.high)]
        whiskers = "".join(f"M{at:.1f} {a:.1f}V{b:.1f}" for at, (a, b) in zip(xs, ends) if a != b)
        lines = [f"M{_path(xs, means)}"] if len(xs) > 1 else []
        yield f'<path class="{colour}" d="{"".join([whiskers, *lines])}"/>'
    if series.kind in ("dots", "errors") or len(xs) == 1:
        radius = 3 if series.kind == "errors" else 3.5
        yield from (f'<circle class="{colour}" cx="{a:.1f}" cy="{b:.1f}" r="{radius}"/>' for a, b in zip(xs, means))
        return
    if curve.steps_per_point > 1:
        upper = _path(xs, [_y(y, value) for value in curve.high])
        lower = _path(xs[::-1], [_y(y, value) for value in curve.low[::-1]])
        yield f'<path class="band {colour}" d="M{upper}L{lower}Z"/>'
    if series.kind in ("stairs", "planned"):
        dashes = f"s{series.run % NUM_COLOURS}" if series.kind == "stairs" else "planned"
        points = [(xs[0], means[0])]
        for at, before, after in zip(xs[1:], means, means[1:]):
            points += [(at, before), (at, after)]
        yield f'<path class="{colour} {dashes}" d="M{_path(*zip(*points))}"/>'
        return
    yield f'<path class="{colour}" d="M{_path(xs, means)}"/>'


def _path(xs: Sequence[float], ys: Sequence[float]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys))


def _x(scale: Scale, value: float) -> float:
    return LEFT + (RIGHT - LEFT) * scale.share(value)


def _y(scale: Scale, value: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * scale.share(value)
