"""Measures the group of all ranks: sockets, CPU seconds to build it, and its all-reduce; a tree beside gloo's mesh.

    python benchmarks/all_reduce.py [--ranks 4 16 64 256] [--gloo-up-to 16] [--numbers 300 78892] [--entries]

--entries: a whole agreement of a step, on the numbers of 16 stages x 64 replicas and 4,096 micro-batches: a part is
packed, all are added, and the sum is audited and unpacked. The first rank adds those of the 1,024 that are not there.

Each rank is a process of this machine, so the time of an all-reduce grows with the number of ranks by the work that
shares its cores; CPU seconds are sums over all ranks.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice, product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.distributed import FileStore

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.gloo_group import GlooGroup
from parallel3d.parallel.group import Group
from parallel3d.parallel.p2p_sockets import SocketLinks, open_listener
from parallel3d.parallel.tree_group import TreeGroup
from parallel3d.trainer.entry import Contribution
from parallel3d.trainer.entry_layout import EntryLayout, Vector

TIMEOUT_S = 300.0
NUM_REDUCTIONS = 10
NAME = "generation0/world"
LAYOUT = EntryLayout(num_stages=16, num_micro_batches=4096, num_slots=4096, cursor_size=3, num_ranks=1024)

Build = Callable[[int, int, str, list[socket.socket]], Group]
"""Builds a rank's group, given its number, their number, a folder and all listeners."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--gloo-up-to", type=int, default=16)
    parser.add_argument("--numbers", type=int, nargs="+", default=[300, 78_892])
    parser.add_argument("--entries", action="store_true")
    options = parser.parse_args()
    print("| group | ranks | numbers | most sockets of a rank | CPU s to build, all | all-reduce ms | CPU ms, a rank |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for num_ranks in options.ranks:
        for name, build in (("tree", build_tree), ("gloo", build_gloo)):
            if name == "tree" or num_ranks <= options.gloo_up_to:
                for count in (0, *options.numbers) if options.entries else options.numbers:
                    numbers = f"{count:,}" if count else f"an entry of {LAYOUT.size:,}"
                    print(f"| {name} | {num_ranks} | {numbers} | {measure(build, num_ranks, count)} |", flush=True)


def measure(build: Build, num_ranks: int, count: int) -> str:
    """The figures of one row; without a count of numbers, of entries."""
    context = get_context("fork")  # before this process has threads: the ranks share its memory
    results = context.SimpleQueue()
    listeners = [open_listener("127.0.0.1") for _ in range(num_ranks)]
    with TemporaryDirectory() as folder:
        arguments = (build, num_ranks, folder, listeners, count, results)
        processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(num_ranks)]
        for process in processes:
            process.start()
        rows = [results.get() for _ in range(num_ranks)]
        for process in processes:
            process.join(TIMEOUT_S)
    for listener in listeners:
        listener.close()
    sockets, build_s, reduce_s, wall_s = zip(*rows)
    return f"{max(sockets)} | {sum(build_s):.3f} | {1e3 * max(wall_s):.2f} | {1e3 * sum(reduce_s) / num_ranks:.3f}"


def run_rank(
    rank: int, build: Build, num_ranks: int, folder: str, listeners: list[socket.socket], count: int, results: object
) -> None:
    torch.set_num_threads(1)
    sockets, started = num_sockets(), time.process_time()
    group = build(rank, num_ranks, folder, listeners)
    vector = torch.ones(count or LAYOUT.size, dtype=torch.float64)
    group.all_reduce(vector)
    assert vector.eq(num_ranks).all()
    built_s, sockets = time.process_time() - started, num_sockets() - sockets
    vector.zero_()
    part, absent = part_of(rank), np.zeros(LAYOUT.size)
    if not count and rank == 0:
        absent = sum((LAYOUT.pack(part_of(each)) for each in range(num_ranks, LAYOUT.num_ranks)), start=absent)
    started, started_wall = time.process_time(), time.perf_counter()
    for iteration in range(NUM_REDUCTIONS):
        if count:
            group.all_reduce(vector)
        else:
            agree(group, part, absent, iteration)
    used_s, wall_s = time.process_time() - started, time.perf_counter() - started_wall
    results.put((sockets, built_s, used_s / NUM_REDUCTIONS, wall_s / NUM_REDUCTIONS))  # type: ignore[attr-defined]
    group.all_reduce(vector)  # all have measured
    os._exit(0)


def agree(group: Group, part: Contribution, absent: Vector, iteration: int) -> None:
    """A step's agreement, as trainer/step.py has it."""
    vector = torch.from_numpy(LAYOUT.pack(part) + absent)
    group.all_reduce(vector)
    entry = LAYOUT.unpack(iteration, vector.numpy())
    assert entry.num_target_tokens == LAYOUT.num_ranks and len(entry.cursors) == LAYOUT.num_slots


def part_of(rank: int) -> Contribution:
    """One rank's part: of the backward passes at all stages, and of the slots."""
    passes = product(range(LAYOUT.num_stages), range(LAYOUT.num_micro_batches))
    return Contribution(
        rank=rank,
        num_target_tokens=1,
        cursors={slot: (slot, 0, 7) for slot in range(rank, LAYOUT.num_slots, LAYOUT.num_ranks)},
        backward_counts=dict.fromkeys(islice(passes, rank, None, LAYOUT.num_ranks), 1),
    )


def build_tree(rank: int, num_ranks: int, folder: str, listeners: Sequence[socket.socket]) -> Group:
    token, addresses = AbortToken(), [listener.getsockname() for listener in listeners]
    links = SocketLinks(
        rank=rank,
        generation=0,
        secret=b"a secret of a benchmark's own...",
        listener=listeners[rank],
        address_of=addresses.__getitem__,
        slots=3,
        token=token,
        timeout_s=TIMEOUT_S,
    )
    return TreeGroup(name=NAME, rank=rank, ranks=tuple(range(num_ranks)), streams=links.streams, token=token)


def build_gloo(rank: int, num_ranks: int, folder: str, listeners: Sequence[socket.socket]) -> Group:
    store = FileStore(f"{folder}/store", num_ranks)
    ranks = tuple(range(num_ranks))
    return GlooGroup(name=NAME, rank=rank, ranks=ranks, store=store, token=AbortToken(), timeout_s=TIMEOUT_S)


def num_sockets() -> int:
    """Sockets that this process has open."""
    folder, found = Path("/proc/self/fd"), 0
    for each in list(folder.iterdir()):
        with suppress(OSError):  # the listing's own
            found += os.readlink(each).startswith("socket:")
    return found


if __name__ == "__main__":
    main()
