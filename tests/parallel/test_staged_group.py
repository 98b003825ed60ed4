"""Copies between host and device on a machine without one, and host groups for tensors of a device."""

import pytest
import torch

from parallel3d.inprocess.world import run_threads
from parallel3d.parallel.group import SoloGroup
from parallel3d.parallel.staged_group import HostCopy, StagedGroup, to_device
from tests.parallel.test_gloo_group import all_collectives


def test_on_the_host_there_is_nothing_to_copy():
    tensor = torch.ones(3, requires_grad=True)
    assert HostCopy(tensor).read().data_ptr() == tensor.data_ptr()
    assert not HostCopy(tensor).read().requires_grad
    assert to_device(tensor, "cpu") is tensor


def test_a_staged_group_gives_what_its_host_group_gives():
    def body(rank, world):
        make = world.make_group(rank)
        return all_collectives(make("plain", (0, 1, 2))), all_collectives(StagedGroup(make("staged", (0, 1, 2))))

    for plain, staged in run_threads(3, body):
        assert plain.keys() == staged.keys() and len(plain) > 10
        for name, value in plain.items():
            assert torch.equal(value, staged[name]) if isinstance(value, torch.Tensor) else value == staged[name], name


def test_nothing_is_written_before_the_wait_and_once_after_it():
    def body(rank, world):
        group = StagedGroup(world.make_group(rank)("g", (0, 1)))
        tensor = torch.full((2, 3), float(rank + 1)).t()  # not contiguous
        work = group.all_reduce_async(tensor)
        before = tensor.clone()
        tensor.zero_()
        work.wait()
        after = tensor.clone()
        tensor.zero_()
        work.wait()
        return before.unique().tolist(), after.unique().tolist(), tensor.unique().tolist()

    assert run_threads(2, body) == [([1.0], [3.0], [0.0]), ([2.0], [3.0], [0.0])]


def test_ends_are_passed_on():
    calls = []

    class Host(SoloGroup):
        is_busy = True

        def abort(self):
            calls.append("abort")

        def close(self):
            calls.append("close")

    group = StagedGroup(Host())
    group.abort()
    group.close()
    assert calls == ["abort", "close"] and not group.is_busy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the copy of a host tensor is the tensor itself")
def test_copies_of_a_device_are_what_it_had_then():
    tensor = torch.arange(1 << 20, device="cuda", dtype=torch.float64)
    copy = HostCopy(tensor)
    tensor.zero_()
    assert torch.equal(copy.read(), torch.arange(1 << 20, dtype=torch.float64)) and copy.read().is_pinned()
    assert torch.equal(to_device(copy.read(), "cuda").cpu(), copy.read())
