"""Copies between a device and the host, with a device whose copies happen as late as they may."""

import pytest
import torch

from parallel3d.accelerator import MetaAccelerator, accelerator_of, blocks_of, is_accelerator
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.p2p_sockets import SocketLinks, open_listener
from parallel3d.parallel.staged_group import HostCopy, to_device
from tests.support.lazy_accelerator import LazyAccelerator
from tests.support.run_secrets import SECRET
from tests.support.socket_links import message, until


def test_which_devices_are_accelerators():
    assert [is_accelerator(name) for name in ("cpu", "cuda", "cuda:3", "meta")] == [False, True, True, True]
    assert accelerator_of(torch.device("cpu")) is None
    meta = accelerator_of(torch.device("meta"))
    assert isinstance(meta, MetaAccelerator) and accelerator_of(torch.device("meta")) is meta


def test_work_block_by_block_waits_for_a_device_after_many_more_elements():
    """Exact sums read a flag of each block."""
    flat = torch.empty((1 << 24) + 5, device="meta")
    assert list(map(len, blocks_of(flat, 1 << 16))) == [1 << 24, 5]
    assert len(blocks_of(torch.empty((1 << 17) + 5), 1 << 16)) == 3


def test_meta_tensors_are_read_as_zeros_and_each_read_counts(monkeypatch):
    meta, waits = accelerator_of(torch.device("meta")), []
    monkeypatch.setattr(meta, "on_wait", lambda: waits.append(1))
    assert HostCopy(torch.ones(3, device="meta")).read().tolist() == [0.0, 0.0, 0.0]
    assert to_device(torch.ones(2, 3), "meta").is_meta
    assert waits == [1]


def test_a_copy_aside_waits_for_the_computation_in_its_own_stream():
    device, tensor = LazyAccelerator(), torch.arange(3.0)
    copy = HostCopy(tensor, aside=True, accelerator=device)
    assert device.log == ["to_host waits for compute", "to_host copies"]
    assert device.kept == [(tensor.data_ptr(), "to_host")]
    assert copy._host.isnan().all()  # nobody has waited yet
    assert copy.read().tolist() == [0.0, 1.0, 2.0]
    assert device.log[2:] == ["the host waits for to_host"]


def test_other_copies_are_in_order_with_the_computation():
    device, tensor = LazyAccelerator(), torch.arange(3.0)
    copy = HostCopy(tensor, accelerator=device)
    tensor.zero_()
    assert copy.read().tolist() == [0.0, 1.0, 2.0] and device.log == ["compute copies", "the host waits for compute"]


def test_the_computation_waits_for_a_copy_to_the_device_and_the_host_does_not():
    device = LazyAccelerator()
    got = to_device(torch.arange(3.0), "cpu", device)
    assert got.tolist() == [0.0, 1.0, 2.0]
    assert device.log == ["to_device copies", "compute waits for to_device"]
    assert device.kept == [(got.data_ptr(), "compute")]


def test_copies_of_the_two_directions_do_not_wait_for_each_other():
    device = LazyAccelerator()
    copies = [HostCopy(torch.full((2,), float(n)), aside=True, accelerator=device) for n in range(3)]
    assert to_device(torch.ones(2), "cpu", device).tolist() == [1.0, 1.0]
    assert all(copy._host.isnan().all() for copy in copies)
    assert copies[1].read().tolist() == [1.0, 1.0] and copies[2]._host.isnan().all()


@pytest.mark.parametrize("shape", [(2, 3), (5,), (0, 4)])
def test_links_send_from_a_stream_for_copies(shape):
    """The sending thread alone waits, only for the copy that it is about to write; each thread has set its device."""
    devices = [LazyAccelerator(), LazyAccelerator()]
    listeners = [open_listener("127.0.0.1") for _ in range(2)]
    addresses = [listener.getsockname() for listener in listeners]
    make = dict(
        secret=SECRET, generation=0, address_of=addresses.__getitem__, slots=2, token=AbortToken(), timeout_s=10.0
    )
    links = [SocketLinks(rank=n, listener=listeners[n], accelerator=devices[n], **make) for n in range(2)]
    header, tensor = message(tensor=torch.randn(shape).bfloat16())
    links[0].send(1, header, tensor)
    received = links[1].receive(0, header)
    for each in links:
        each.close()
    assert torch.equal(received, tensor)
    assert devices[0].log == ["to_host waits for compute", "to_host copies", "the host waits for to_host"]
    assert devices[1].log == []
    for device, other in zip(devices, ("links-_write_to", "links-_read_from"), strict=True):
        threads = ["links-_accept", other]
        until(lambda device=device, threads=threads: sorted(device.users) == threads)
        assert sorted(device.users) == threads
