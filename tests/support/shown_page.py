"""What the page of a run shows: its tables, the data of its charts, and the drawings, as a reader has them."""

import json
import math
import re
from decimal import Decimal
from html import unescape
from html.parser import HTMLParser

PIXEL = 0.051
"""Coordinates are written with one digit after the point."""
X_TICK = r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">([^<]*)<'
Y_TICK = r'<text x="[\d.]+" y="([\d.]+)" text-anchor="end">([^<]*)<'


class ShownPage(HTMLParser):
    """Tables by caption; charts and drawings (SVG text) by the chart's name."""

    def __init__(self, page):
        super().__init__()
        self.tables, self._table, self._row, self._part = {}, [], [], ""
        self.feed(page)
        data = json.loads(page.split('id="data">')[1].split("</script>")[0])
        self.frame = data["frame"]
        self.charts = {chart["name"]: chart for chart in data["charts"]}
        drawings = re.findall(r'<figure data-chart="([^"]*)">.*?(<svg .*?</svg>)', page, re.DOTALL)
        self.drawings = dict(drawings)
        assert len(drawings) == len(self.drawings) and len(data["charts"]) == len(self.charts), "a name is used twice"
        self.statuses = [unescape(text) for text in re.findall(r'<p class="status">(.*?)</p>', page)]
        self.pipelines = [unescape(text) for text in re.findall(r'<span class="unit">(bubble .*?)</span>', page)]

    @property
    def figures(self):
        """The table of figures of a page with one run."""
        rows = self.tables["Figures"]
        assert len({name for name, _ in rows}) == len(rows), "a figure is shown twice"
        return dict(rows)

    def handle_starttag(self, tag, attributes):
        if tag == "caption":
            self._table = []
        elif tag == "tr":
            self._row = []
            self._table.append(self._row)
        elif tag in ("th", "td"):
            self._row.append("")
        self._part = tag

    def handle_endtag(self, tag):
        self._part = "" if tag in ("caption", "th", "td") else self._part

    def handle_data(self, data):
        if self._part == "caption":
            self.tables[data] = self._table
        elif self._part in ("th", "td"):
            self._row[-1] += data


def shows(text, value):
    """Whether a text is this value, rounded to the digits that it has; whole numbers and words as they are."""
    if isinstance(value, str):
        return text == value
    plain = text.replace(",", "").removesuffix(" s")
    if isinstance(value, int):
        return plain == str(value)
    number = Decimal(plain.removesuffix("%"))
    half, exact = 0.5 * 10.0 ** number.as_tuple().exponent, value * (100.0 if "%" in plain else 1.0)
    return abs(float(number) - exact) <= half * (1 + 1e-6) + 1e-9 * abs(exact)


def check_drawing(shown, name):
    """Compares a drawing with the chart's data: the shapes of each curve, and the ticks of both axes."""
    chart, svg = shown.charts[name], shown.drawings[name]
    left, right, top, bottom, _ = shown.frame
    x = (left, (right - left) / (chart["x"][1] - chart["x"][0]), chart["x"][0])
    low, high = (math.log10(each) if chart["is_log"] else each for each in chart["y"])
    y = (bottom, (top - bottom) / (high - low), low)

    def place(axis, value):
        start, size, first = axis
        is_log = chart["is_log"] and axis is y
        return start + size * ((math.log10(value) if is_log else value) - first)

    expected = [
        [(place(x, at), place(y, value)) for at, value in shape]
        for series in chart["series"]
        for shape in _shapes(series["kind"], series["curve"])
    ]
    drawn = _drawn_shapes(svg)
    assert [*map(len, drawn)] == [*map(len, expected)], name
    for ours, theirs in zip(drawn, expected):
        assert all(math.dist(a, b) <= 2 * PIXEL for a, b in zip(ours, theirs)), name
    for axis, pattern, shift in ((x, X_TICK, 0.0), (y, Y_TICK, 4.0)):
        ticks = re.findall(pattern, svg)
        assert len(ticks) > 1, name
        for at, text in ticks:
            number = Decimal(text.replace(",", ""))
            slack = 0.0 if chart["is_log"] else abs(axis[1]) * 0.5 * 10.0 ** number.as_tuple().exponent
            assert abs(float(at) - shift - place(axis, float(number))) <= PIXEL + slack, (name, text)


def _shapes(kind, curve):
    """The shapes of a curve in the order of drawing, each a list of points in the units of the chart."""
    points = [*zip(curve["x"], curve["mean"])]
    if kind in ("dots", "spikes") or len(points) == 1:
        return [[point] for point in points]
    band = [*zip(curve["x"], curve["high"]), *[*zip(curve["x"], curve["low"])][::-1]]
    bands = [band] if curve["steps_per_point"] > 1 else []
    if kind in ("stairs", "planned"):
        corners = [((b[0], a[1]), b) for a, b in zip(points, points[1:])]
        return [*bands, [points[0], *(corner for pair in corners for corner in pair)]]
    assert kind == "line", kind
    return [*bands, points]


def _drawn_shapes(svg):
    found = re.findall(r'<path class="[^"]*" d="([^"]*)"/>|<circle class="[^"]*" cx="([\d.]+)" cy="([\d.]+)"', svg)
    places = [re.split("[ML]", path.removesuffix("Z"))[1:] if path else [f"{x} {y}"] for path, x, y in found]
    return [[tuple(map(float, place.split())) for place in shape] for shape in places]
