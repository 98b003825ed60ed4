"""Tables as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def draw_columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Iterator[str]:
    """Lines with the columns `left` to the left and the others to the right; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = (
            cell.ljust(width) if place in left else cell.rjust(width) for place, (cell, width) in _placed(row, widths)
        )
        yield "  ".join(cells).rstrip()


def _placed(row: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[int, tuple[str, int]]]:
    yield from enumerate(zip(row, widths))


def number(value: float | None, form: str = ".4f") -> str:
    """The number, or a dash."""
    return "-" if value is None else format(value, form)
