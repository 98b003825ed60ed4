"""Raises this process's limit of open files to what the connections of a run need, before there are any.

The coordinator has a connection from each guardian, at most one a worker. A worker has one with every other rank of its
collective groups, twice while it recovers (a group that lost a rank closes while the next one is built), and few
others: three of the tree of all ranks, the links with its neighbours. A guardian has one with each of its workers.
"""

from __future__ import annotations

import resource

from parallel3d.errors import LaunchError
from parallel3d.parallel.grid import Grid

SPARE = 256
"""Files, pipes, the tree, links."""


def num_files_needed(grid: Grid) -> int:
    """Returns the open files that one process of a run may need."""
    groups = grid.groups()
    sizes = [max(map(len, groups[kind])) for kind in ("tp", "dp")]
    if grid.pp_size > 1:
        sizes.append(len(grid.embedding_ranks(0)))
    return max(len(grid.ranks), 2 * sum(sizes)) + SPARE


def raise_open_files(grid: Grid) -> None:
    """Raises the soft limit as far as needed; forked workers inherit it. Raises LaunchError where the hard limit is
    lower: the run would end at its start, or in the middle of a recovery."""
    needed = num_files_needed(grid)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"a run of {len(grid.ranks):,} ranks may open {needed:,} files in one process, and the limit is {hard:,}: "
            f"raise it (ulimit -Hn {needed}, or LimitNOFILE of the service that starts the run)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
