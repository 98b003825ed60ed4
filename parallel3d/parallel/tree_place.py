"""The places of ranks in the tree over which a TreeGroup reduces. Pure.

A contiguous range of numbers is a subtree: its first number is the root, and two halves of the rest are the subtrees
below. So two of three links of ranks with consecutive numbers, as those of one host are, stay among them::

    8 ranks     0 -- 1 -- 2 -- 3     up:   a rank adds the sums of its subtrees to its own part, the first one first,
                |    `--- 4                and sends the total to its parent
                `--- 5 -- 6          down: what the root has added up, bit for bit
                     `--- 7

A rank has at most three links and is at most log2(n) of them away from the root. The place in the group alone decides
the order of summation; timing never does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TreePlace:
    """The neighbours of one rank, as numbers in the group."""

    parent: int | None
    """None: the root."""
    children: tuple[int, ...]
    """In the order in which their sums are added."""


def tree_place(number: int, size: int) -> TreePlace:
    """The place of rank `number` of `size`; takes O(log size)."""
    assert 0 <= number < size, (number, size)
    parent, start, stop = None, 0, size
    while True:
        middle = start + 1 + (stop - start) // 2
        if number == start:
            halves = ((start + 1, middle), (middle, stop))
            return TreePlace(parent=parent, children=tuple(first for first, end in halves if first < end))
        parent = start
        start, stop = (start + 1, middle) if number < middle else (middle, stop)
