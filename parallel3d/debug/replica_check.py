"""The replica check: whether all copies of something are the same bits, decided from one sum over all ranks. Pure.

Whatever is held by k ranks gives each of them a digest, which must be the same. Each multiplies its digest by its
*tag*; the tags of the k holders add up to zero modulo a prime, so equal digests cancel, in whatever order they are
added, and whoever else adds to the same slot. So the check takes `NUM_CHECKSUMS` slots a stage in an iteration's
all-reduce, for any number of parameters, ranges and holders; nobody needs to know what the others hold::

    holder     0          1          2              r0, r1, r2 drawn from (name, holders, iteration)
    adds    (r0-r2) d0 + (r1-r0) d1 + (r2-r1) d2    = 0 where d0 = d1 = d2

A digest has two halves, each a word below the prime of its own; a word that differs leaves its sum zero with a
probability of 1/p = 2**-32, by the draw of the tags. Two copies that differ, do so in both words but for 2**-32 of the
cases: a check misses them with a probability of about 2**-62, and draws anew each time. Every word is a whole number
below 2**32: float64 adds up to 2**21 of them exactly.

When the sum says that something differs, the ranks tell each other the digest of every parameter and every piece of
state (`find_differences`), which names it, and where three or more hold it, who is alone.
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
    """One rank's copy of something: `name` is the same for all of its `holders`, global ranks in one order."""

    name: str
    holders: tuple[int, ...]
    digest: int


@dataclass(frozen=True, kw_only=True)
class ReplicaDifference:
    """Something whose copies are not all the same."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    """The ranks that agree with each other, the largest group first."""

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks outside of the majority; none where there is no majority."""
        largest, *others = self.groups
        is_majority = 2 * len(largest) > sum(map(len, self.groups))
        return tuple(sorted(rank for group in others for rank in group)) if is_majority else ()


def checksums_of(copies: Iterable[ReplicaCopy], *, rank: int, iteration: int) -> list[int]:
    """What `rank` adds to the slots of its stage, for all of its copies; a copy that nobody else has adds nothing."""
    words = [0] * NUM_CHECKSUMS
    for copy in copies:
        position = copy.holders.index(rank)
        for number in range(NUM_CHECKSUMS):
            value = copy.digest >> 32 * number & 0xFFFFFFFF
            words[number] += _tag(copy, position, iteration, number) * value
    return [word % PRIME for word in words]


def has_difference(totals: Sequence[float]) -> bool:
    """Whether the sums of all ranks' words say that some copies differ."""
    return any(int(total) % PRIME for total in totals)


def find_differences(digests: Mapping[int, Mapping[str, int]]) -> list[ReplicaDifference]:
    """From all ranks' digests by name: what differs, in the order in which the names come first."""
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
    """Of the holder at `place`: the difference of two draws, so that the tags of all holders add up to zero."""
    ring = (copy.name, copy.holders)
    here, before = (_draw(ring, at % len(copy.holders), iteration, number) for at in (position, position - 1))
    return here - before


def _draw(ring: object, position: int, iteration: int, number: int) -> int:
    hashed = blake2b(repr((ring, position, iteration, number)).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") % PRIME
