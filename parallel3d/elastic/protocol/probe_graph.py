"""Which hosts leave the run when paths between hosts are cut although each host reaches the coordinator. Pure.

Training needs every path that it uses. A cut path blames one of its two ends; nothing shows which. The smallest set of
hosts that has an end of every cut path (a minimum vertex cover of the graph of cut paths) leaves all others connected:

    B x C    one of both        B x D, C x D    D alone: its own link is broken
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

MAX_EXACT = 12
"""Hosts with a cut path up to which all sets are compared; of more, the host with the most cut paths goes first."""

MAX_NAMED = 4
"""Pairs of hosts that a message names."""

Path = frozenset[str]
"""Two hosts."""


@dataclass(frozen=True, kw_only=True)
class EvictionPlan:
    """Hosts to evict; none if the run can't go on without any such set. The reason names the cut paths."""

    hosts: tuple[str, ...]
    reason: str


def plan_eviction(
    cut: Collection[Path],
    *,
    num_workers: Mapping[str, int],
    coordinator: str,
    can_spare: Callable[[frozenset[str]], bool],
) -> EvictionPlan:
    """Returns the smallest set of hosts that leaves no cut path and can be spared.

    Of sets of the same size: one without the coordinator's host, then one with few workers, then the last names.
    """
    reason = describe_cut(cut)
    for hosts in _covers(cut, num_workers, coordinator):
        if can_spare(frozenset(hosts)):
            return EvictionPlan(hosts=tuple(sorted(hosts)), reason=reason)
    return EvictionPlan(hosts=(), reason=reason)


def describe_cut(cut: Collection[Path]) -> str:
    """Names the cut paths, at most `MAX_NAMED` of them."""
    pairs = [" and ".join(pair) for pair in sorted(sorted(path) for path in cut)]
    more = f", nor do {len(pairs) - MAX_NAMED:,} more pairs" if len(pairs) > MAX_NAMED else ""
    return f"{'; '.join(pairs[:MAX_NAMED])} can't reach each other{more}"


def _covers(cut: Collection[Path], num_workers: Mapping[str, int], coordinator: str) -> Iterator[tuple[str, ...]]:
    """Sets of hosts with an end of every cut path, the best first."""
    ends = sorted({host for path in cut for host in path}, reverse=True)
    if len(ends) > MAX_EXACT:
        yield _greedy_cover(cut, ends, coordinator)
        return
    for size in range(1, len(ends)):
        covers = [hosts for hosts in combinations(ends, size) if all(path & set(hosts) for path in cut)]
        yield from sorted(
            covers, key=lambda hosts: (coordinator in hosts, sum(num_workers.get(host, 0) for host in hosts))
        )


def _greedy_cover(cut: Collection[Path], ends: list[str], coordinator: str) -> tuple[str, ...]:
    left, chosen = set(cut), []
    while left:
        worst = max(ends, key=lambda host: (sum(host in path for path in left), host != coordinator))
        chosen.append(worst)
        left = {path for path in left if worst not in path}
    return tuple(chosen)
