"""What workers say to the key-value store while they build the groups of a generation, for scale.py: frames alone.

A worker's talk is a list of turns: frames that it sends at once, and how many answers it waits for before the next one.
As in worker/network.py: it says in which states the groups are whose members have not changed, then meets those of the
groups that are built again, over gloo for gradients and in shared memory for the tensor-parallel ranks of a host.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from parallel3d.elastic.frames import encode_frame
from parallel3d.parallel.grid import Grid


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
        self._unchanged = {ranks: number for number, ranks in enumerate(sorted(_groups(previous) & _groups(grid)))}
        self._generation = generation
        self._keeps = keeps
        self._random = random.Random(2)

    def turns(self, rank: int) -> Iterator[Turn]:
        """Yields the turns of a rank."""
        place = self._grid.coordinates(rank)
        dp_ranks, tp_ranks = self._grid.dp_ranks(place.pp, place.tp), self._grid.tp_ranks(place.replica)
        prefix = f"generation{self._generation}/{'' if self._keeps else 'again/'}"
        dp_name, tp_name = f"{prefix}dp/stage{place.pp}/tp{place.tp}", f"{prefix}tp/stage{place.pp}/replica{place.dp}"
        own = [self._unchanged[ranks] for ranks in (dp_ranks, tp_ranks) if ranks in self._unchanged]
        compare = {"op": "compare", "key": f"{prefix}groups", "size": len(self._grid.ranks), "numbers": own}
        yield Turn([encode_frame({**compare, "states": ["0123456789abcdef" if self._keeps else ""] * len(own)})], 1)
        if not (self._keeps and dp_ranks in self._unchanged):
            yield self._meet_in_gloo(f"{dp_name}/0", dp_ranks.index(rank), len(dp_ranks))
        if not (self._keeps and tp_ranks in self._unchanged):
            yield from _share_memory(f"{tp_name}/memory", tp_ranks.index(rank), len(tp_ranks))

    def _meet_in_gloo(self, base: str, number: int, size: int) -> Turn:
        return Turn([_set(f"{base}/{number}", self._gloo_address(size)), _gather(base, size)], 1)

    def _gloo_address(self, size: int) -> bytes:
        """A value as gloo's (gathered_values.py): of 65,536 hosts."""
        address, port = self._random.randbytes(2), self._random.randbytes(2)
        host, storage = b"node%05d" % int.from_bytes(address), b"\2\0" + port + b"\x0a\0" + address
        head = len(host).to_bytes(8, "little") + host + (136).to_bytes(8, "little") + storage.ljust(128, b"\0")
        head += b"\xff" * 8
        return head + b"".join(each.to_bytes(8, "little") for each in range(size))


def _groups(grid: Grid) -> frozenset[tuple[int, ...]]:
    """As `collective_groups`, whose module needs torch, of an untied model."""
    lists = grid.groups()
    return frozenset([*lists["tp"], *lists["dp"]])


def _share_memory(key: str, number: int, size: int) -> Iterator[Turn]:
    found = encode_frame({"op": "get_all", "keys": [key], "id": 7})
    yield Turn([_set(key, b"/proc/12345/fd/12 " + b"0" * 64)], 0) if number == 0 else Turn([found], 1)
    yield Turn([_set(f"{key}/{number}", b"yes"), _gather(key, size)], 1)


def _set(key: str, value: bytes) -> bytes:
    return encode_frame({"op": "set", "key": key}, value)


def _gather(base: str, size: int) -> bytes:
    return encode_frame({"op": "gather", "key": base, "size": size})
