"""Tiers of the suite: which rows of a parametrization and how many random examples the quick tier runs.

quick  `make test`: every axis once. Tests marked `full` are left out; a test marked `pairwise`, `each_value` or
       `sample` runs a few of its rows; property tests draw a tenth of their examples
rest   what quick left out; property tests draw all their examples
full   everything, each test once: `make test-all`
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

from hypothesis import settings

Row = Mapping[str, Hashable]
Target = frozenset[tuple[str, Hashable]]


def examples(num_examples: int) -> int:
    """Examples of a property test in the chosen tier; never fewer than 10."""
    is_quick = settings.default.max_examples < settings.get_profile("full").max_examples
    return max(10, num_examples // 10) if is_quick else num_examples


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
    if num_wanted == 1:
        return [0]
    return [round(index * (num_rows - 1) / (num_wanted - 1)) for index in range(num_wanted)]


def axes_of(name: str, value: object) -> Row:
    """Axes of one parameter: those that it lists as `axes`, or the parameter itself."""
    own = getattr(value, "axes", None)
    if isinstance(own, Mapping):
        return own
    return {name: getattr(value, "name", None) or repr(value)}
