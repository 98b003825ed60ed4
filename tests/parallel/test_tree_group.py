"""The group over a tree: its sums in threads, its connections, and what the end of a generation leaves of them."""

import threading
import time

import pytest
import torch

from parallel3d.errors import GenerationEnded, ProtocolError
from parallel3d.inprocess.scheduler import RankDied
from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.parallel import socket_stream
from parallel3d.parallel.tree_group import SEGMENT_BYTES, TreeGroup
from parallel3d.parallel.tree_place import tree_place
from tests.support.socket_links import in_thread, open_sockets, until

SEGMENT = SEGMENT_BYTES // 8


def numbers(rank, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def in_tree_order(parts, number=0):
    """What the tree's order of summation gives, from the rule in tree_place.py; other orders give other bits."""
    total = parts[number].clone()
    for child in tree_place(number, len(parts)).children:
        total += in_tree_order(parts, child)
    return total


def thread_group(rank, world, size):
    return world.make_group(rank)("generation0/world", tuple(range(size)))


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("length", [0, 1, SEGMENT - 1, 2 * SEGMENT + 3])
def test_the_place_alone_decides_the_order_of_summation(size, length):
    parts = [numbers(rank, length) for rank in range(size)]
    totals = run_threads(size, lambda rank, world: thread_group(rank, world, size).all_reduce(parts[rank].clone()))
    assert all(torch.equal(total, in_tree_order(parts)) for total in totals)


def everything(group):
    """All operations, several under way at once, waited for in another order."""
    size, me = group.size, group.rank
    scattered, gathered = torch.empty(3), torch.empty(2 * size)
    total, transposed = torch.full((4,), 2.0**me), torch.full((2, 3), float(me)).t()
    works = [
        group.all_reduce_async(total),
        group.reduce_scatter_async(scattered, torch.arange(3.0 * size)),
        group.all_gather_async(gathered, torch.tensor([-0.0, float(me)])),
        group.all_reduce_async(transposed),
    ]
    for work in reversed(works):
        work.wait()
        work.wait()  # twice is once
    counts, top = group.all_reduce(torch.tensor([2**40 + me])), group.all_reduce_max(torch.tensor([float(-me), me]))
    half = group.all_reduce(torch.tensor(0.5, dtype=torch.bfloat16))
    return total, scattered, gathered, transposed, counts, top, half


def assert_everything(results):
    size = len(results)
    for me, (total, scattered, gathered, transposed, counts, top, half) in enumerate(results):
        assert torch.equal(total, torch.full((4,), 2.0**size - 1))
        assert torch.equal(scattered, size * torch.arange(3.0 * me, 3.0 * me + 3))
        assert gathered[1::2].tolist() == list(range(size)) and gathered[::2].signbit().all()
        assert torch.equal(transposed, torch.full((3, 2), size * (size - 1) / 2))
        assert counts.tolist() == [size * 2**40 + size * (size - 1) // 2] and top.tolist() == [0, size - 1]
        assert half.item() == size / 2 and half.shape == ()


@pytest.mark.parametrize("size", [2, 3, 7])
def test_every_operation_in_threads(size):
    assert_everything(run_threads(size, lambda rank, world: everything(thread_group(rank, world, size))))


@pytest.mark.parametrize("size", [3, 4])
def test_a_death_at_any_call_leaves_whole_sums_or_none(size):
    """Of four segments, so that a rank may die in the middle of a collective."""
    parts = [numbers(rank, 4 * SEGMENT) for rank in range(size)]
    for dead in range(size):
        for call in range(1, 26):
            world = ThreadWorld(size)
            world.tolerates_deaths = True
            world.die_at(dead, call)
            results = run_threads(size, lambda rank, world: _reduce_or_leave(rank, world, parts), world=world)
            assert all(total is None or torch.equal(total, in_tree_order(parts)) for total in results)


def _reduce_or_leave(rank, world, parts):
    try:
        return thread_group(rank, world, len(parts)).all_reduce(parts[rank].clone())
    except RankDied:
        for token in world.tokens:
            token.abort(f"rank {rank} died")
        raise
    except GenerationEnded:
        return None


def test_ranks_that_are_not_in_the_same_collective_notice_it():
    def body(rank, world):
        group = thread_group(rank, world, 2)
        return group.all_reduce(torch.ones(2 if rank else 3))

    with pytest.raises(ProtocolError, match="another collective"):
        run_threads(2, body)


# --- over sockets -----------------------------------------------------------------------------------------------------


def tree_of(connect, size, **options):
    """The groups of all ranks over loopback, and their tokens."""
    links = connect(size, **options)
    tokens = connect.tokens[-size:]
    groups = [None] * size

    def make(rank):
        groups[rank] = TreeGroup(
            name="generation0/world",
            rank=rank,
            ranks=tuple(range(size)),
            streams=links[rank].streams,
            token=tokens[rank],
        )

    on_all(make, size)
    return groups, tokens


def on_all(function, size):
    """Results of `function(rank)` by rank, each on a thread of its own."""
    results = [None] * size

    def body(rank):
        results[rank] = function(rank)

    ran = [in_thread(body, rank) for rank in range(size)]
    for thread, result in ran:
        thread.join(timeout=300)
        assert result == [None], result
    return results


@pytest.mark.parametrize("size", [2, 5, 8])
def test_every_operation_over_sockets_with_one_connection_a_link(connect, size):
    before = len(open_sockets())
    groups, _ = tree_of(connect, size)
    assert_everything(on_all(lambda rank: everything(groups[rank]), size))
    assert len(open_sockets()) - before == size + 2 * (size - 1)  # listeners, and both ends of a tree's links
    for group in groups:
        group.close()


def test_sockets_and_threads_give_the_same_bits(connect):
    parts = [numbers(rank, 100_003, dtype=torch.float32) for rank in range(6)]
    groups, _ = tree_of(connect, 6)
    totals = on_all(lambda rank: groups[rank].all_reduce(parts[rank].clone()), 6)
    assert all(torch.equal(total, in_tree_order(parts)) for total in totals)


def test_an_abort_ends_all_waits_and_nothing_of_it_reaches_the_next_generation(connect):
    """Rank 3 never comes. The next generation has right sums, although parts of the old one were on their way."""
    size = 4
    groups, tokens = tree_of(connect, size, timeout_s=60.0)
    big = 64 * SEGMENT  # more than sockets hold
    waiting = [
        in_thread(lambda rank=rank: groups[rank].all_reduce(torch.ones(big, dtype=torch.float64))) for rank in range(3)
    ]
    time.sleep(0.2)
    assert all(thread.is_alive() for thread, _ in waiting)
    started = time.monotonic()
    for token in tokens:
        token.abort("rank 3 is lost")
    for thread, result in waiting:
        thread.join(timeout=300)
        assert isinstance(result[0], GenerationEnded) and str(result[0]) == "rank 3 is lost"
    assert time.monotonic() - started < 30
    for group in groups:
        group.close()
    groups, _ = tree_of(connect, size, generations=[1] * size)
    totals = on_all(lambda rank: groups[rank].all_reduce(torch.full((big,), 2.0**rank)), size)
    assert all(torch.equal(total, torch.full((big,), 15.0)) for total in totals)


def test_a_peer_of_another_generation_is_not_taken_for_one_of_this(connect, monkeypatch):
    monkeypatch.setattr(socket_stream, "ABORT_GRACE_S", 0.05)
    links = connect(2, generations=[0, 1], timeout_s=1.0)
    late = TreeGroup(name="generation1/world", rank=1, ranks=(0, 1), streams=links[1].streams, token=connect.tokens[1])
    old = TreeGroup(name="generation0/world", rank=0, ranks=(0, 1), streams=links[0].streams, token=connect.tokens[0])
    with pytest.raises(GenerationEnded):
        late.all_reduce(torch.ones(2))
    with pytest.raises(GenerationEnded, match="waited 1 s for its stream with rank 1"):
        old.all_reduce(torch.ones(2))


def test_a_lost_peer_ends_the_wait_and_is_named(connect, monkeypatch):
    monkeypatch.setattr(socket_stream, "ABORT_GRACE_S", 0.05)
    groups, tokens = tree_of(connect, 2)
    threading.Timer(0.1, tokens[1].abort, ["killed"]).start()  # its sockets close, as a killed process's do
    with pytest.raises(GenerationEnded, match="stream with rank 1 broke"):
        groups[0].all_reduce(torch.ones(2))


def test_silence_ends_too(connect):
    groups, _ = tree_of(connect, 2, timeout_s=0.3)
    with pytest.raises(GenerationEnded, match="rank 1 has not answered in 0 s"):
        groups[0].all_reduce(torch.ones(2))


def test_a_wait_is_reported_as_one_for_the_group(connect):
    groups, tokens = tree_of(connect, 2)
    waits = []
    tokens[0].on_wait = waits.append
    on_all(lambda rank: groups[rank].all_reduce(torch.ones(2)), 2)
    until(lambda: waits and waits[-1] is None)
    assert (
        any(wait and wait.what == "generation0/world" and wait.ranks == (0, 1) for wait in waits) and waits[-1] is None
    )
