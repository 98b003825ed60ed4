"""What workers say to the key-value store while they build the groups of a generation, for scale.py: frames alone.

A worker's talk is a list of turns: frames that it sends at once, and how many answers it waits for before the next one.
As in worker/network.py: it compares the groups whose members have not changed, then meets the members of those that are
built again, over gloo for gradients and in shared memory for the tensor-parallel ranks of a host.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from parallel3d.elastic.frames import encode_frame
from parallel3d.parallel.grid import Grid

GLOO_HEAD_BYTES = 154
"""Of what a rank of torch 2.13's gloo sets, before 8 bytes for each rank of the group."""


@dataclass(frozen=True)
class Turn:
    """Frames that a worker sends at once."""

    frames: list[bytes]
    num_answers: int


class GroupTalk:
    """The talk of each rank of `grid` about its groups of a generation, which follows that of grid `previous`.

    `keeps`: the loss has come between two collectives, so that unchanged groups stay.
    """

    def __init__(self, grid: Grid, previous: Grid, *, generation: int, keeps: bool):
        self._grid = grid
        self._unchanged = _groups(previous) & _groups(grid)
        self._generation = generation
        self._keeps = keeps
        self._random = random.Random(2)

    def turns(self, rank: int) -> Iterator[Turn]:
        """Yields the turns of a rank."""
        place = self._grid.coordinates(rank)
        dp_ranks, tp_ranks = self._grid.dp_ranks(place.pp, place.tp), self._grid.tp_ranks(place.replica)
        prefix = f"generation{self._generation}/{'' if self._keeps else 'again/'}"
        dp_name, tp_name = f"{prefix}dp/stage{place.pp}/tp{place.tp}", f"{prefix}tp/stage{place.pp}/replica{place.dp}"
        yield from self._compare(dp_name, dp_ranks, rank)
        if not (self._keeps and dp_ranks in self._unchanged):
            yield from self._meet_in_gloo(dp_name, dp_ranks.index(rank), len(dp_ranks))
        yield from self._compare(tp_name, tp_ranks, rank)
        if not (self._keeps and tp_ranks in self._unchanged):
            yield from _share_memory(f"{tp_name}/memory", tp_ranks.index(rank), len(tp_ranks))

    def _compare(self, name: str, ranks: tuple[int, ...], rank: int) -> Iterator[Turn]:
        if ranks in self._unchanged:
            state = f"generation0/{name.partition('/')[2]}: 57 collectives" if self._keeps else ""
            own = _set(f"{name}/state/{ranks.index(rank)}", state.encode())
            yield Turn([own, _get_all([f"{name}/state/{each}" for each in range(len(ranks))])], 1)

    def _meet_in_gloo(self, name: str, number: int, size: int) -> Iterator[Turn]:
        keys = [f"{name}/0/{each}" for each in range(size)]
        yield Turn([_set(keys[number], self._gloo_address(size)), _get_all(keys, [size, number])], 1)

    def _gloo_address(self, size: int) -> bytes:
        """An address as gloo's: of a sockaddr_storage the port, the host and what the stack held before differ."""
        varying = self._random.randbytes(26)
        address = b"\2\0" + varying[:2] + b"\x0a\0" + varying[2:4] + bytes(80) + varying[4:] + bytes(18)
        head = b"\2".ljust(8, b"\0") + varying[:3] + bytes(7) + address + b"\xff" * 8
        return head.ljust(GLOO_HEAD_BYTES, b"\0") + b"".join(each.to_bytes(8, "little") for each in range(size))


def _groups(grid: Grid) -> frozenset[tuple[int, ...]]:
    """As `collective_groups`, whose module needs torch, of an untied model."""
    lists = grid.groups()
    return frozenset([*lists["tp"], *lists["dp"]])


def _share_memory(key: str, number: int, size: int) -> Iterator[Turn]:
    keys = [f"{key}/{each}" for each in range(size)]
    first = [_set(key, b"/proc/12345/fd/12 " + b"0" * 64)] if number == 0 else [_get_all([key])]
    yield Turn(first, int(number > 0))
    yield Turn([_set(keys[number], b"yes"), _get_all(keys)], 1)


def _set(key: str, value: bytes) -> bytes:
    return encode_frame({"op": "set", "key": key}, value)


def _get_all(keys: list[str], column: list[int] | None = None) -> bytes:
    return encode_frame({"op": "get_all", "keys": keys, "column": column, "id": 7})
