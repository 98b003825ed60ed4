"""Groups over gloo between real processes, which meet through a file."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from torch.distributed import FileStore

from parallel3d.errors import GenerationEnded
from parallel3d.inprocess.world import run_threads
from parallel3d.parallel import background
from parallel3d.parallel import gloo_group as module
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.gloo_group import GlooGroup

pytestmark = pytest.mark.slow
SIZE = 3


def run_processes(function, directory, *, size=SIZE, with_folder=False):
    """Returns the results of `function(group, token)` by rank, None for a killed one; it may also take the folder."""
    context = multiprocessing.get_context("forkserver")  # a fork of a process that has no threads yet
    context.set_forkserver_preload(["parallel3d.parallel.gloo_group"])
    arguments = (function, directory, size, with_folder)
    processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
    codes = [process.exitcode for process in processes]
    assert set(codes) <= {0, -signal.SIGKILL}, codes
    return [None if code else torch.load(directory / f"{rank}.pt") for rank, code in enumerate(codes)]


def _rank(rank, function, directory, size, with_folder):
    torch.set_num_threads(1)
    module.ABORT_GRACE_S = background.ABORT_GRACE_S = 0.3
    token = AbortToken()
    store = FileStore(f"{directory}/store", size)
    ranks = tuple(range(10, 10 + size))  # global ranks: not the ones in the group
    group = GlooGroup(name="generation0/world", rank=rank, ranks=ranks, store=store, token=token, timeout_s=20.0)
    torch.save(function(group, token, *([directory] if with_folder else [])), f"{directory}/{rank}.pt")


def numbers(rank, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def all_collectives(group, token=None):
    """Every operation on the same inputs, for gloo and for threads."""
    results = {"rank_and_size": (group.rank, group.size)}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for shape in ((1,), (7, 5), (100_003,)):
            results[f"sum {shape} {dtype}"] = group.all_reduce(numbers(group.rank, *shape, dtype=dtype))
    results["max"] = group.all_reduce_max(numbers(group.rank, 50))
    results["counts"] = group.all_reduce(torch.tensor([2**40 + group.rank, -group.rank]))
    part = torch.empty(4, 5)
    results["scattered"] = group.reduce_scatter(part, numbers(group.rank, 4 * group.size, 5))
    results["gathered"] = group.all_gather(torch.empty(4 * group.size, 5), numbers(group.rank, 4, 5))
    own = torch.zeros(group.size * 6)  # in its place, as the optimizer gathers weights
    own[group.rank * 6 :][:6] = numbers(group.rank, 6)
    results["gathered in place"] = group.all_gather(own, own[group.rank * 6 :][:6])
    # Several under way at once, waited for in another order.
    total, scattered, whole = numbers(group.rank, 1000), torch.empty(10), torch.empty(group.size * 10)
    works = [
        group.all_reduce_async(total),
        group.reduce_scatter_async(scattered, numbers(group.rank + 50, group.size * 10)),
        group.all_gather_async(whole, numbers(group.rank + 90, 10)),
    ]
    for work in reversed(works):
        work.wait()
        work.wait()  # twice is once
    return {**results, "async sum": total, "async scattered": scattered, "async gathered": whole}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_processes(all_collectives, tmp_path_factory.mktemp("gloo"))


def test_gloo_and_threads_give_the_same(results):
    threads = run_threads(SIZE, lambda rank, world: all_collectives(world.make_group(rank)("g", tuple(range(SIZE)))))
    for rank, (ours, theirs) in enumerate(zip(results, threads)):
        assert ours["rank_and_size"] == theirs["rank_and_size"] == (rank, SIZE) and ours.keys() == theirs.keys()
        for name in ours.keys() - {"rank_and_size"}:
            # Three terms added in another order: an ulp of the largest, of which bfloat16 has 8 bits.
            tolerance = 0.05 if ours[name].dtype is torch.bfloat16 else 1e-6
            torch.testing.assert_close(
                ours[name], theirs[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_what_all_ranks_get_is_bitwise_the_same(results):
    replicated = [name for name in results[0] if "scattered" not in name and name != "rank_and_size"]
    assert len(replicated) == 15
    for name in replicated:
        assert all(torch.equal(result[name], results[0][name]) for result in results[1:]), name


def wait_for_an_absent_peer(group, token):
    """Rank 2 does not arrive before the others are aborted."""
    if group.rank == 2:
        time.sleep(1.5)
        return None
    threading.Timer(0.3, token.abort, ["rank 12 is stopped"]).start()
    started = time.monotonic()
    try:
        group.all_reduce(torch.ones(10))
    except GenerationEnded as error:
        return str(error), time.monotonic() - started - 0.3
    return "no error", 0.0


def test_an_abort_ends_a_wait_for_a_peer_that_never_comes(tmp_path):
    results = run_processes(wait_for_an_absent_peer, tmp_path)
    for reason, seconds in results[:2]:
        assert reason == "rank 12 is stopped" and seconds < 15.0


def wait_for_a_killed_peer(group, token):
    """Rank 2 dies between two collectives; rank 0 is aborted, rank 1 is not."""
    group.all_reduce(torch.ones(10))
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 0:
        threading.Timer(0.2, token.abort, ["rank 12 was killed"]).start()
    started = time.monotonic()
    try:
        for _ in range(100):
            group.all_reduce(torch.ones(10))
    except GenerationEnded as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def test_a_killed_peer_ends_the_generation(tmp_path):
    told, found_out, nothing = run_processes(wait_for_a_killed_peer, tmp_path)
    assert nothing is None
    assert told[0] == "rank 12 was killed" and told[1] < 2
    assert found_out[0].startswith("group generation0/world: ") and "onnection" in found_out[0] and found_out[1] < 5


def wait_too_long(group, token):
    group.timeout_s = 0.3
    if group.rank == 2:
        time.sleep(1.2)
        return None
    try:
        group.all_reduce(torch.ones(10))
    except GenerationEnded as error:
        return str(error)
    return "no error"


def test_silence_ends_too(tmp_path):
    results = run_processes(wait_too_long, tmp_path)
    assert set(results[:2]) == {"group generation0/world: no answer from a peer in 0 s"}


# --- the end of a generation: a peer is alive, and silent -------------------------------------------------------------


def arrive(group, folder, name):
    """Waits until all ranks have come to the same point, without a group: a file for each."""
    (folder / f"{name}-{group.rank}").touch()
    deadline = time.monotonic() + 300
    while len(list(folder.glob(f"{name}-*"))) < group.size and time.monotonic() < deadline:
        time.sleep(0.005)


def abandon_what_one_peer_never_answers(group, token, folder):
    """Rank 2 makes no call and stays alive. The others wait with big tensors; then the generation ends for all."""
    buffers = [torch.ones(1 << 20), torch.ones(1 << 20), torch.ones(SIZE << 18)]
    arrive(group, folder, "built")
    if group.rank == 2:
        arrive(group, folder, "woken")
        arrive(group, folder, "over")
        group.abort()
        group.close()
        return None
    works = [
        group.all_reduce_async(buffers[0]),
        group.reduce_scatter_async(torch.empty((1 << 20) // SIZE), buffers[1][: (1 << 20) // SIZE * SIZE]),
        group.all_gather_async(buffers[2], torch.ones(1 << 18)),
    ]
    threading.Timer(0.2, token.abort, ["rank 12 is lost"]).start()
    with pytest.raises(GenerationEnded, match="rank 12 is lost"):
        works[0].wait()
    was_busy = group.is_busy
    arrive(group, folder, "woken")  # an abort ends the other's collectives, too
    started = time.monotonic()
    group.abort()
    abandoned_s = time.monotonic() - started
    while group.is_busy and time.monotonic() - started < 10:
        time.sleep(0.005)
    over_s = time.monotonic() - started
    for buffer in buffers:
        buffer.fill_(7.0)  # what the next generation uses them for
    arrive(group, folder, "over")
    time.sleep(0.3)
    untouched = all(bool((buffer == 7.0).all()) for buffer in buffers)
    started = time.monotonic()
    group.close()
    return was_busy, abandoned_s, over_s, untouched, time.monotonic() - started


def test_an_abandoned_group_ends_what_is_under_way_and_writes_nothing_afterwards(tmp_path):
    first, second, _ = run_processes(abandon_what_one_peer_never_answers, tmp_path, with_folder=True)
    for was_busy, abandoned_s, over_s, untouched, close_s in (first, second):
        assert was_busy
        assert max(abandoned_s, over_s, close_s) < 15  # gloo's own timeout is 20 s
        assert untouched


def rebuild(group, token, folder):
    """The generation ends in the middle of a collective; the same processes meet again under the next generation's
    names."""
    arrive(group, folder, "built")
    if group.rank != 1:
        group.all_reduce_async(torch.ones(1 << 20))
    token.abort("over")
    group.abort()
    group.close()
    store = FileStore(f"{folder}/store", SIZE)
    fresh = AbortToken()
    new = GlooGroup(
        name="generation1/world",
        rank=group.rank,
        ranks=group.ranks,
        store=store,
        token=fresh,
        timeout_s=group.timeout_s,
    )
    total = new.all_reduce(torch.tensor([float(group.rank)]))
    arrive(group, folder, "done")
    return total.item()


@pytest.mark.full
def test_the_next_generation_meets_under_its_own_name(tmp_path):
    assert run_processes(rebuild, tmp_path, with_folder=True) == [3.0, 3.0, 3.0]


def end_while_building(group, token, folder):
    """A group that one member never joins: the others leave as soon as the generation is over."""
    arrive(group, folder, "built")
    if group.rank == 2:
        arrive(group, folder, "left")
        return None
    fresh = AbortToken()
    threading.Timer(0.3, fresh.abort, ["rank 12 was killed"]).start()
    started = time.monotonic()
    error = ""
    try:
        store = FileStore(f"{folder}/store", SIZE)
        GlooGroup(
            name="generation1/world", rank=group.rank, ranks=group.ranks, store=store, token=fresh, timeout_s=20.0
        )
    except GenerationEnded as raised:
        error = str(raised)
    left_s = time.monotonic() - started
    arrive(group, folder, "left")
    return error, left_s


def test_a_generation_may_end_while_its_groups_are_built(tmp_path):
    first, second, _ = run_processes(end_while_building, tmp_path, with_folder=True)
    for error, left_s in (first, second):
        assert error == "rank 12 was killed" and left_s < 15.0


def test_closing_leaves_the_work_to_another_thread(monkeypatch):
    """gloo's own closing joins its threads, which may hang as long as a collective does: never on a rank's thread."""
    closed_on = []

    class Closing:
        def __del__(self):
            closed_on.append(threading.current_thread().name)

    class Eager(threading.Thread):
        """Is done before the caller goes on: the worst case for a reference that the caller still has."""

        def start(self):
            super().start()
            self.join(timeout=300)

    group = object.__new__(GlooGroup)
    group.name, group.token, group._pg = "world", AbortToken(), Closing()
    monkeypatch.setattr(module.threading, "Thread", Eager)
    group.close()
    assert closed_on == ["close-world"]


# --- the next generation keeps the connections ------------------------------------------------------------------------


def outlive_the_generation(group, token, folder):
    """All members are between the same two collectives when the generation ends: the connections stay."""
    group.all_reduce(torch.ones(1 << 20))
    group.all_gather(torch.empty(SIZE), torch.ones(1))
    before = group._pg
    token.abort("rank 9 is lost")
    group.abort()
    state, fresh = group.state, AbortToken()
    arrive(group, folder, "left")
    group.renew("generation1/dp", fresh)
    total = group.all_reduce(torch.tensor([2.0**group.rank]))
    arrive(group, folder, "reduced")
    threading.Timer(0.2, fresh.abort, ["rank 8 is lost"]).start()
    with pytest.raises(GenerationEnded, match="rank 8 is lost"):
        group.all_reduce_async(torch.ones(2)).wait() if group.rank else fresh.sleep(10)
    return state, total.item(), group._pg is before, group.state


def test_a_group_between_two_collectives_outlives_its_generation(tmp_path):
    results = run_processes(outlive_the_generation, tmp_path, with_folder=True)
    assert [each[:3] for each in results] == [("generation0/world: 2 collectives", 7.0, True)] * SIZE
    # In the next one rank 0 makes no call: its state says so, and the others can't keep the group.
    assert [each[3] for each in results] == ["generation0/world: 3 collectives", "", ""]


def renew_too_late(group, token, folder):
    arrive(group, folder, "connected")  # one that ends earlier closes connections that others are still making
    over = AbortToken()
    over.abort("a further loss")
    with pytest.raises(GenerationEnded, match="a further loss"):
        group.renew("generation1/dp", over)
    return group.name, group.token is token


def test_an_attempt_that_is_over_takes_no_group(tmp_path):
    assert run_processes(renew_too_late, tmp_path, with_folder=True) == [("generation0/world", True)] * SIZE
