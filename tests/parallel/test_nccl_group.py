"""The NCCL group's calls to torch, and how it ends, with a communicator that records them."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from parallel3d.errors import GenerationEnded
from parallel3d.parallel import background
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.nccl_group import NcclGroup

SET: list[tuple[str, torch.device]] = []
"""(thread, device) of each torch.cuda.set_device."""


class FakeWork:
    def __init__(self, calls):
        self.calls = calls

    def wait(self):
        self.calls.append("wait")

    def is_completed(self):
        return "wait" in self.calls


class FakeNccl:
    """Stands for torch's ProcessGroupNCCL."""

    connect = staticmethod(lambda: None)
    abort = staticmethod(lambda: None)

    class Options:
        _timeout = None

    def __init__(self, store, rank, size, options):
        self.calls = [("made", rank, size, options._timeout.total_seconds())]
        FakeNccl.last = self

    def eager_connect_single_device(self, device):
        self.calls.append(("connect", device, threading.current_thread().name))
        type(self).connect()

    def _do(self, *call):
        self.calls.append(call)
        return FakeWork(self.calls)

    def allreduce(self, tensors, options=None):
        return self._do("all_reduce", tensors[0].shape, options and options.reduceOp)

    def _reduce_scatter_base(self, output, tensor):
        return self._do("reduce_scatter", output.shape, tensor.shape)

    def _allgather_base(self, output, tensor):
        return self._do("all_gather", output.shape, tensor.shape)

    def send(self, tensors, destination, tag):
        return self._do("send", tensors[0].shape, destination, tag)

    def recv(self, tensors, source, tag):
        return self._do("receive", tensors[0].shape, source, tag)


@pytest.fixture
def nccl(monkeypatch):
    class Nccl(FakeNccl):
        def abort(self):
            self.calls.append("abort")
            FakeNccl.abort()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: SET.append((threading.current_thread().name, device)))
    SET.clear()
    monkeypatch.setattr(background, "ABORT_GRACE_S", 0.0)
    return Nccl


def make(token, timeout_s=5.0):
    return NcclGroup(
        name="generation3/dp",
        rank=1,
        ranks=(4, 6),
        store=dist.HashStore(),
        token=token,
        timeout_s=timeout_s,
        device=torch.device("cuda", 2),
    )


def test_calls(nccl):
    group = make(AbortToken())
    calls = FakeNccl.last.calls
    assert calls == [("made", 1, 2, 5.0), ("connect", torch.device("cuda", 2), "build-generation3/dp")]
    del calls[:]
    group.all_reduce(torch.zeros(3))
    group.all_reduce_max(torch.zeros(3))
    group.reduce_scatter(torch.zeros(2, 5), torch.zeros(4, 5))
    group.all_gather(torch.zeros(4, 5), torch.zeros(2, 5))
    assert calls[::2] == [
        ("all_reduce", (3,), None),
        ("all_reduce", (3,), dist.ReduceOp.MAX),
        ("reduce_scatter", (2, 5), (20,)),
        ("all_gather", (4, 5), (2, 5)),
    ]
    assert calls[1::2] == ["wait"] * 4
    assert not group.waits_for_data and not group.is_busy


def test_two_ranks_send_each_other(nccl):
    group = make(AbortToken())
    calls = FakeNccl.last.calls
    del calls[:]
    sent = group.send_async(torch.zeros(2, 3))
    assert not sent.is_done()
    group.receive_async(torch.zeros(4)).wait()
    assert calls == [("send", (2, 3), 0, 0), ("receive", (4,), 0, 0), "wait"]
    assert sent.is_done()


def test_the_end_of_a_generation_aborts_once_and_is_busy_until_that_is_done(nccl, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(FakeNccl, "abort", staticmethod(lambda: may_end.wait(timeout=10)))
    token = AbortToken()
    group = make(token)
    work = group.all_reduce_async(torch.zeros(1))
    token.abort("rank 4 was killed")
    group.abort()
    assert group.is_busy
    for call in (work.wait, lambda: group.all_reduce_async(torch.zeros(1))):
        with pytest.raises(GenerationEnded, match="rank 4 was killed"):
            call()
    may_end.set()
    deadline = time.monotonic() + 300
    while group.is_busy and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not group.is_busy
    assert FakeNccl.last.calls.count("abort") == 1


def test_a_generation_may_end_while_a_group_connects(nccl, monkeypatch):
    token, never = AbortToken(), threading.Event()
    monkeypatch.setattr(FakeNccl, "connect", staticmethod(lambda: (token.abort("gone"), never.wait(timeout=10))))
    started = time.monotonic()
    with pytest.raises(GenerationEnded, match="gone"):
        make(token)
    assert time.monotonic() - started < 5
    never.set()


def test_an_error_of_the_library_ends_the_generation(nccl, monkeypatch):
    def fail():
        raise RuntimeError("NCCL error: remote process exited\nmore")

    monkeypatch.setattr(FakeNccl, "connect", staticmethod(fail))
    with pytest.raises(GenerationEnded, match="group generation3/dp: NCCL error: remote process exited$"):
        make(AbortToken())


def test_each_thread_of_a_group_takes_its_device_first(nccl):
    """Otherwise CUDA makes a context on GPU 0 for each of them."""
    aborted, closed = make(AbortToken()), make(AbortToken())
    aborted.abort()
    closed.close()
    expected = {"build-generation3/dp", "abort-generation3/dp", "close-generation3/dp"}
    deadline = time.monotonic() + 300
    while {name for name, _ in SET} != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    assert {name for name, _ in SET} == expected
    assert {device for _, device in SET} == {torch.device("cuda", 2)}
