"""The replica check: decides from one sum over all ranks whether all copies of shared state have the same bits. Pure.

Each of the k holders of a piece of state computes its digest. Each multiplies the digest by its *tag*; the tags of the
k holders add up to zero modulo a prime, so equal digests cancel, in any order of addition and next to other sums in the
same slot. The check therefore needs only `NUM_CHECKSUMS` numbers per stage in an iteration's all-reduce, for any number
of parameters, ranges and holders, and no rank needs to know what the others hold::

    holder     0          1          2              r0, r1, r2 drawn from (name, holders, iteration)
    adds    (r0-r2) d0 + (r1-r0) d1 + (r2-r1) d2    = 0 where d0 = d1 = d2

A digest is split into two 32-bit words, each with a sum of its own. A word that differs leaves its sum at zero with a
probability of 1/p = 2**-32, by the draw of the tags. Copies that differ do so in both words except in 2**-32 of the
cases, so a check misses a difference with a probability of about 2**-62, and each check draws new tags. Every sum is of
whole numbers below 2**32: float64 adds 2**21 of them exactly.

When a sum shows a difference, the ranks exchange the digests of all parameters and state (`find_differences`), which
names the piece and, with three or more holders, the rank in the minority.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

PRIME = 2**32 - 5
NUM_CHECKSUMS = 2


@dataclass(frozen=True, kw_only=True)
class ReplicaCopy:
    """One rank's copy of a piece of state; `name` and `holders` (global ranks) are the same on all holders."""

    name: str
    holders: tuple[int, ...]
    digest: int


@dataclass(frozen=True, kw_only=True)
class ReplicaDifference:
    """A piece of state whose copies differ."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    """Groups of ranks with equal copies, the largest first."""

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks outside the majority; () without a majority."""
        largest, *others = self.groups
        is_majority = 2 * len(largest) > sum(map(len, self.groups))
        return tuple(sorted(rank for group in others for rank in group)) if is_majority else ()


def checksums_of(copies: Iterable[ReplicaCopy], *, rank: int, iteration: int) -> list[int]:
    """The checksums that `rank` adds for its copies of one stage; a copy with a single holder adds zero."""
    words = [0] * NUM_CHECKSUMS
    for copy in copies:
        position = copy.holders.index(rank)
        for number in range(NUM_CHECKSUMS):
            value = copy.digest >> 32 * number & 0xFFFFFFFF
            words[number] += _tag(copy, position, iteration, number) * value
    return [word % PRIME for word in words]


def has_difference(totals: Sequence[float]) -> bool:
    """Whether the sums of all ranks' checksums show a difference."""
    return any(int(total) % PRIME for total in totals)


def find_differences(digests: Mapping[int, Mapping[str, int]]) -> list[ReplicaDifference]:
    """The pieces of state that differ, from all ranks' digests by name, in order of first appearance."""
    held: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for rank in sorted(digests):
        for name, value in digests[rank].items():
            held[name][rank] = value
    return [
        ReplicaDifference(name=name, groups=_groups(values))
        for name, values in held.items()
        if len(set(values.values())) > 1
    ]


def describe_difference(difference: ReplicaDifference, coordinates: Mapping[int, str]) -> str:
    """One line: "weights of layers.0.mlp.down.weight: rank 3 (pp0 dp1 tp1) against 2 others"."""

    def named(ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {rank} ({coordinates[rank]})" for rank in ranks)

    if difference.suspects:
        return f"{difference.name}: {named(difference.suspects)} against {len(difference.groups[0])} others"
    return f"{difference.name}: {' / '.join(named(group) for group in difference.groups)}, no majority"


def _groups(values: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    counts = Counter(values.values())
    order = sorted(counts, key=lambda value: (-counts[value], min(r for r in values if values[r] == value)))
    return tuple(tuple(rank for rank in sorted(values) if values[rank] == value) for value in order)


def _tag(copy: ReplicaCopy, position: int, iteration: int, number: int) -> int:
    """The tag of the holder at `position`: a difference of two draws, so that all holders' tags add up to zero."""
    ring = (copy.name, copy.holders)
    here, before = (_draw(ring, at % len(copy.holders), iteration, number) for at in (position, position - 1))
    return here - before


def _draw(ring: object, position: int, iteration: int, number: int) -> int:
    hashed = blake2b(repr((ring, position, iteration, number)).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") % PRIME
