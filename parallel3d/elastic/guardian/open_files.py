"""Raises this process's limit of open files to what the connections of a run need, before there are any.

The coordinator has a connection from each worker and each guardian. A worker has one with every other worker for the
group of all ranks, with its stage's replicas and with the ranks of its own replica, and its links.
"""

from __future__ import annotations

import resource

from parallel3d.errors import LaunchError

SPARE = 256
"""Files, pipes and the sockets of small groups."""


def num_files_needed(world_size: int) -> int:
    """Open files that one process of a run of this size may need."""
    return 3 * world_size + SPARE


def raise_open_files(world_size: int) -> None:
    """Raises the soft limit as far as needed; forked workers inherit it. Raises LaunchError where the hard limit is
    lower: the run would end at its start, or in the middle of a recovery."""
    needed = num_files_needed(world_size)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"a run of {world_size:,} ranks may open {needed:,} files in one process, and the limit is {hard:,}: raise "
            f"it (ulimit -Hn {needed}, or LimitNOFILE of the service that starts the run)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
