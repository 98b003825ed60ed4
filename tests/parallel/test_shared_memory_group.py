"""Groups over shared memory: ranks that are threads here, which map the same memory several times, and processes."""

import gc
import os
import signal
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import FileStore, HashStore

from parallel3d.errors import GenerationEnded
from parallel3d.inprocess.world import run_threads
from parallel3d.parallel import shared_memory as module
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.groups import may_stand_still
from parallel3d.parallel.shared_memory import NUM_SLOTS, SLOT_BYTES, share_memory
from parallel3d.parallel.shared_memory_group import SharedMemoryGroup
from tests.parallel.test_gloo_group import all_collectives, arrive, numbers, run_processes

SIZE = 3
LIMIT = timedelta(seconds=20)
TOO_MANY_BYTES = (NUM_SLOTS + 3) * SLOT_BYTES + 8
"""More than the slots hold, and not a whole number of them."""


def shared_group(store, rank, *, size=SIZE, token=None, name="generation0/tp", timeout_s=20.0):
    memory = share_memory(store, name, rank=rank, size=size, timeout=LIMIT)
    assert memory is not None
    return SharedMemoryGroup(
        name=name,
        rank=rank,
        ranks=tuple(range(10, 10 + size)),
        memory=memory,
        token=token or AbortToken(),
        timeout_s=timeout_s,
    )


def num_mapped():
    """Memory of groups that this process still maps."""
    return Path("/proc/self/maps").read_text().count("parallel3d-exchange")


def run_group(function, *, size=SIZE, **how):
    """The results of `function(group)` on ranks that are threads."""
    store = HashStore()
    return run_threads(size, lambda rank, world: function(shared_group(store, rank, size=size, **how)))


def by_threads(function, size=SIZE):
    """The same by groups of threads, the definition."""
    return run_threads(size, lambda rank, world: function(world.make_group(rank)("g", tuple(range(size)))))


def assert_same_bits(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for name in one.keys() | other.keys():
            assert name == "rank_and_size" or torch.equal(one[name], other[name]), name


# --- the same bits ----------------------------------------------------------------------------------------------------


def test_every_collective_gives_the_bits_of_threads():
    assert_same_bits(run_group(all_collectives), by_threads(all_collectives))
    gc.collect()
    assert num_mapped() == 0  # the memory goes with its groups


def more_than_the_slots_hold(group):
    count = TOO_MANY_BYTES // 4
    total = numbers(group.rank, count)
    whole, part = torch.empty(group.size * count), torch.empty(count)
    works = [
        group.all_gather_async(whole, numbers(group.rank + 20, count)),
        group.all_reduce_async(total),
        group.reduce_scatter_async(part, numbers(group.rank + 40, group.size * count)),
    ]
    for index in (1, 0, 2):
        works[index].wait()
    return {"total": total, "whole": whole, "part": part}


def test_what_the_slots_can_not_hold_moves_in_turns():
    assert_same_bits(run_group(more_than_the_slots_hold), by_threads(more_than_the_slots_hold))


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(("sum", "max", "scatter", "parts", "gather")),
        st.sampled_from(DTYPES),
        st.integers(0, 40),
        st.booleans(),
    ),
    max_size=12,
)


def reduce_parts(group, parts, tensor, num_parts):
    """Starts to reduce some parts, from the rank's own on, of which other ranks want some, too."""
    numbers = [(group.rank + shift) % group.size for shift in range(num_parts)]
    return group.reduce_parts_async({number: parts[number] for number in numbers}, tensor)


def run_calls(calls):
    """Runs the calls and returns their results; some are waited for at once, others at the end."""

    def body(group):
        results, works = {}, []
        for index, (kind, dtype, count, at_once) in enumerate(calls):
            num_parts = group.size if kind in ("scatter", "parts") else 1
            own = (100 * numbers(group.rank + 7 * index, count * num_parts)).to(dtype)
            if kind == "max" and count:
                results[index] = group.all_reduce_max(own)
                continue
            if kind == "scatter":
                results[index] = torch.empty(count, dtype=dtype)
                work = group.reduce_scatter_async(results[index], own)
            elif kind == "parts":
                results[index] = torch.zeros(group.size, count, dtype=dtype)
                work = reduce_parts(group, results[index], own, index % (group.size + 1))
            elif kind == "gather":
                results[index] = torch.empty(count * group.size, dtype=dtype)
                work = group.all_gather_async(results[index], own)
            else:
                results[index] = own
                work = group.all_reduce_async(own)
            work.wait() if at_once else works.append(work)
        for work in reversed(works):
            work.wait()
        return results

    return body


@settings(max_examples=25, deadline=None)
@given(CALLS, st.integers(2, 4))
def test_any_calls_give_the_bits_of_threads(calls, size):
    assert_same_bits(run_group(run_calls(calls), size=size), by_threads(run_calls(calls), size))


def both_transports(group, token, folder):
    """Sums by gloo and through shared memory, of two ranks."""
    shared = shared_group(FileStore(f"{folder}/shared", group.size), group.rank, size=group.size)
    results = {}
    for dtype in DTYPES:
        own = (100 * numbers(group.rank, 300_001)).to(dtype)
        results[dtype] = torch.equal(group.all_reduce(own.clone()), shared.all_reduce(own.clone()))
    return results


@pytest.mark.slow
def test_sums_of_two_processes_have_the_bits_of_gloo(tmp_path):
    assert run_processes(both_transports, tmp_path, size=2, with_folder=True) == [dict.fromkeys(DTYPES, True)] * 2


# --- waits, and how they end ------------------------------------------------------------------------------------------


def test_a_rank_that_waits_long_says_for_whom():
    waits, is_waiting = [], threading.Event()

    def note(wait):
        waits.append(wait)
        is_waiting.set()

    def body(group):
        if group.rank == 0:
            group.token.on_wait = note
        else:
            assert is_waiting.wait(20)
        return group.all_reduce(torch.tensor([2.0**group.rank])).item()

    assert run_group(body) == [7.0] * SIZE
    assert waits == [("generation0/tp", (10, 11, 12)), None]


def end_without_rank_2(group):
    """Rank 2 makes no call. A wait under way ends with the generation; so does one that begins later."""
    if group.rank == 2:
        return None
    tensor = torch.ones(TOO_MANY_BYTES)
    work, second = group.all_reduce_async(tensor), group.all_reduce_async(torch.ones(1))
    threading.Timer(0.1, group.token.abort, ["rank 12 is lost"]).start()
    errors = []
    for each in (work, second, work):
        with pytest.raises(GenerationEnded) as raised:
            each.wait()
        errors.append(str(raised.value))
    group.abort()
    return errors, group.is_busy, group.state, bool((tensor == 1).all())


def test_an_abort_ends_every_wait_at_once():
    store = HashStore()
    results = run_threads(SIZE, lambda rank, world: end_without_rank_2(shared_group(store, rank, timeout_s=60.0)))
    assert results[:2] == [(["rank 12 is lost"] * 3, False, "", True)] * 2


def test_a_closed_group_gives_its_memory_back_at_once():
    """Also with a collective under way."""
    store = HashStore()

    def body(rank, world):
        group = shared_group(store, rank)
        group.all_reduce_async(torch.ones(TOO_MANY_BYTES))
        memory = weakref.ref(group._memory)
        group.token.abort("over")
        group.close()
        del group
        return memory() is None

    gc.collect()
    gc.disable()
    try:
        assert run_threads(SIZE, body) == [True] * SIZE
    finally:
        gc.enable()


def test_silence_ends_too():
    def body(group):
        if group.rank == 2:
            return None
        with pytest.raises(GenerationEnded, match="group generation0/tp: no answer from a peer in 0 s"):
            group.all_reduce(torch.ones(10))
        return True

    assert run_group(body, timeout_s=0.2) == [True, True, None]


def lose_a_peer_in_mid_exchange(gloo, token, folder):
    """Rank 2 fills its slots and is killed before it can fill them again. Rank 0 gets the abort; rank 1 times out."""
    timeout_s = 1.0 if gloo.rank == 1 else 60.0
    group = shared_group(FileStore(f"{folder}/shared", SIZE), gloo.rank, token=token, timeout_s=timeout_s)
    arrive(gloo, folder, "built")
    tensor = torch.ones(TOO_MANY_BYTES)
    work = group.all_reduce_async(tensor)
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 0:
        threading.Timer(0.2, token.abort, ["rank 12 was killed"]).start()
    with pytest.raises(GenerationEnded) as raised:
        work.wait()
    group.abort()
    tensor.fill_(7.0)
    time.sleep(0.2)
    return str(raised.value), bool((tensor == 7).all())


@pytest.mark.slow
def test_a_peer_killed_in_mid_exchange_ends_waits_and_leaves_nothing(tmp_path):
    before = set(os.listdir("/dev/shm"))
    told, found_out, nothing = run_processes(lose_a_peer_in_mid_exchange, tmp_path, with_folder=True)
    assert nothing is None and told == ("rank 12 was killed", True)
    assert found_out == ("group generation0/tp: no answer from a peer in 1 s", True)
    assert set(os.listdir("/dev/shm")) <= before


# --- the next generation ----------------------------------------------------------------------------------------------


def outlive_the_generation(group):
    group.all_reduce(torch.ones(1 << 20))
    group.token.abort("rank 9 is lost")
    group.abort()
    state, fresh = group.state, AbortToken()
    group.renew("generation1/tp", fresh)
    total = group.all_reduce(torch.tensor([2.0**group.rank])).item()
    if group.rank:
        threading.Timer(0.1, fresh.abort, ["rank 8 is lost"]).start()
        with pytest.raises(GenerationEnded, match="rank 8 is lost"):
            group.all_reduce(torch.ones(2))
    return state, total, group.name, group.state


def test_a_group_between_two_collectives_outlives_its_generation():
    results = run_group(outlive_the_generation)
    state = "generation0/tp: 1 exchanges in shared memory"
    assert [each[:3] for each in results] == [(state, 7.0, "generation1/tp")] * SIZE
    assert [each[3] for each in results] == ["generation0/tp: 2 exchanges in shared memory", "", ""]


# --- ranks that can't share -------------------------------------------------------------------------------------------


class Misled:
    """A store in which this rank finds another offer than the first rank's."""

    def __init__(self, store, change):
        self.set, self.wait, self._get, self._change = store.set, store.wait, store.get, change

    def get(self, key):
        value = self._get(key)
        return self._change(*value.decode().split(" ")).encode() if key.endswith("/memory") else value


@pytest.mark.parametrize(
    "offer",
    [
        lambda path, proof: f"{path}9999 {proof}",  # it is gone
        lambda path, proof: f"{path} {'0' * 64}",  # of a process with that number in another container
        lambda path, proof: f"/proc/{os.getpid()}/exe {proof}",
        lambda path, proof: "",
    ],
    ids=["gone", "another_proof", "another_file", "none"],
)
def test_all_do_without_if_one_can_not_map_it(offer):
    store = HashStore()

    def body(rank, world):
        seen = Misled(store, offer) if rank == 1 else store
        return share_memory(seen, "tp", rank=rank, size=SIZE, timeout=LIMIT)

    assert run_threads(SIZE, body) == [None] * SIZE
    gc.collect()
    assert num_mapped() == 0


def test_without_a_compiler_or_anonymous_memory_all_do_without(monkeypatch):
    def share(rank, store):
        return share_memory(store, "tp", rank=rank, size=2, timeout=LIMIT)

    for name, owner in (("loop_library", module), ("memfd_create", os)):
        store = HashStore()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail_to_open if owner is os else lambda source: None)
            assert run_threads(2, lambda rank, world, store=store: share(rank, store)) == [None, None]


def fail_to_open(*args):
    raise OSError("not on this system")


def test_groups_of_this_kind_are_only_those_whose_collectives_may_stand_still():
    names = ("g/tp/stage0/replica1", "g/dp/stage0/tp1", "g/world", "g/embedding/tp0")
    assert [may_stand_still(name) for name in names] == [True, True, False, False]
