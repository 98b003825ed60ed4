"""Tiers of the suite: which rows of a parametrization and how many random examples the quick tier runs.

quick  `make test`: every axis once. Tests marked `full` are left out; a test marked `pairwise`, `each_value` or
       `sample` runs a few of its rows; property tests draw a tenth of their examples
rest   the second half of CI, one degree more than quick and nothing twice: tests marked `full`; all rows of `pairwise`
       and, of `each_value`, rows that cover each pair of values of all axes; where a mark has a `rest`, as many rows as
       that says, at equal distances (none at 0); property tests draw half of their examples
full   everything, each test once: `make test-all`
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import pytest
from hypothesis import settings

Row = Mapping[str, Hashable]
Target = frozenset[tuple[str, Hashable]]


def examples(num_examples: int) -> int:
    """Examples of a property test in the chosen tier; never fewer than 10."""
    return max(10, num_examples * settings.default.max_examples // settings.get_profile("full").max_examples)


def chosen_rows(tests: Sequence[pytest.Function], wider: bool) -> list[pytest.Function]:
    """The rows of a test function that quick runs; wider: those of which rest runs what quick does not."""
    if sample := tests[0].get_closest_marker("sample"):
        num_rows = sample.kwargs.get("rest", len(tests)) if wider else sample.args[0]
        return [tests[index] for index in spread_rows(len(tests), num_rows)]
    pairwise, each_value = (tests[0].get_closest_marker(name) for name in ("pairwise", "each_value"))
    if (pairwise is None and each_value is None) or (pairwise and wider):
        return list(tests)
    if wider and each_value and "rest" in each_value.kwargs:
        return [tests[index] for index in spread_rows(len(tests), each_value.kwargs["rest"])]
    all_axes = wider or (pairwise and not pairwise.args)
    paired = None if all_axes else frozenset(pairwise.args if pairwise else ())
    rows = [dict(ChainMap(*(axes_of(*each) for each in test.callspec.params.items()))) for test in tests]
    return [tests[index] for index in covering_rows(rows, paired)]


def covering_rows(rows: Sequence[Row], paired: frozenset[str] | None = None) -> list[int]:
    """Indices of rows in which every value of every axis occurs, and every pair of values that occurs in any row.

    `paired` restricts the pairs to those axes. The greedy choice takes the row that adds most, the first of equals: it
    is the same in every process, which pytest-xdist requires. Rows may have different axes.
    """
    targets = [_targets(row, paired) for row in rows]
    missing: set[Target] = set().union(*targets)
    chosen: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(targets[index] & missing))
        chosen.append(best)
        missing -= targets[best]
    return sorted(chosen)


def _targets(row: Row, paired: frozenset[str] | None) -> set[Target]:
    singles = {frozenset([value]) for value in row.items()}
    free = [(axis, value) for axis, value in row.items() if paired is None or axis in paired]
    return singles | {frozenset(pair) for pair in combinations(free, 2)}


def spread_rows(num_rows: int, num_wanted: int) -> list[int]:
    """Indices of `num_wanted` rows at equal distances, the first and the last among them."""
    if num_wanted >= num_rows:
        return list(range(num_rows))
    if num_wanted < 2:
        return [0][:num_wanted]
    return [round(index * (num_rows - 1) / (num_wanted - 1)) for index in range(num_wanted)]


def axes_of(name: str, value: object) -> Row:
    """Axes of one parameter: those that it lists as `axes`, or the parameter itself."""
    own = getattr(value, "axes", None)
    if isinstance(own, Mapping):
        return own
    return {name: getattr(value, "name", None) or repr(value)}
