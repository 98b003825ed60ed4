"""Slabs: which elements of a global matrix a rank's tensor holds."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.debug.slab import Slab
from parallel3d.parallel.sharding import IndexRun
from tests.support.tiers import examples


@st.composite
def dimensions(draw: st.DrawFn) -> tuple[int, int, tuple[IndexRun, ...]]:
    """The global and the local size of a dimension, and runs in any order with padding between them."""
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    gaps = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    local_start, starts = 0, []
    for length, gap in zip(lengths, gaps, strict=True):
        starts.append(local_start + gap)
        local_start += gap + length
    order, position, global_starts = draw(st.permutations(range(len(lengths)))), 0, {}
    for number in order:
        global_starts[number] = position
        position += lengths[number] + 1
    runs = tuple(
        IndexRun(global_start=global_starts[number], local_start=start, length=lengths[number])
        for number, start in enumerate(starts)
    )
    return position, local_start + draw(st.integers(0, 2)), runs


@st.composite
def slabs(draw: st.DrawFn) -> tuple[Slab, int]:
    """A slab and the number of elements of its tensor: the whole local part, or a range of it."""
    (height, rows_local, rows), (width, columns_local, columns) = draw(dimensions()), draw(dimensions())
    size = rows_local * columns_local
    start = draw(st.none() | st.integers(0, size))
    shape, local_shape = (height, width), (rows_local, columns_local)
    slab = Slab(name="x", shape=shape, local_shape=local_shape, rows=rows, columns=columns, flat_start=start)
    return slab, size if start is None else draw(st.integers(0, size - start))


def global_index(runs: tuple[IndexRun, ...], local: int) -> int | None:
    for run in runs:
        if run.local_start <= local < run.local_start + run.length:
            return run.global_start + local - run.local_start
    return None


@settings(max_examples=examples(300))
@given(slabs())
def test_blocks_put_every_element_where_its_indices_are(drawn: tuple[Slab, int]) -> None:
    slab, num_elements = drawn
    expected = torch.zeros(slab.shape)
    for number in range(num_elements):
        local_row, local_column = divmod((slab.flat_start or 0) + number, slab.local_shape[1])
        row, column = global_index(slab.rows, local_row), global_index(slab.columns, local_column)
        if row is not None and column is not None:
            expected[row, column] = number + 1
    found = torch.zeros(slab.shape)
    for where, values in slab.blocks(torch.arange(1.0, num_elements + 1)):
        assert not found[where].any()
        found[where] = values
    assert torch.equal(found, expected)
