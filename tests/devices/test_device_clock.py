"""CUDA's own events: the seconds of a list on a device, and a device that is made slow. Not run yet."""

import pytest
import torch

from parallel3d.accelerator import CudaAccelerator
from parallel3d.pipeline.compute_clock import DeviceClock
from parallel3d.pipeline.instructions import Op

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class CountingAccelerator(CudaAccelerator):
    """A CUDA device that counts the events that it makes."""

    num_timed_events = 0

    def timed_event(self):
        self.num_timed_events += 1
        return super().timed_event()


@pytest.fixture
def device():
    device = CountingAccelerator(torch.device("cuda:0"))
    device.use()
    device.spin(1e-3)  # measures its clock
    device.num_timed_events = 0
    return device


def run_list(clock, device):
    """Two computes of 20 ms behind waits of 50 ms; returns what is known before the host waits, and after."""
    clock.begin()
    for op in (Op.FORWARD, Op.BACKWARD):
        device.spin(0.05)
        with clock.compute(op):
            device.spin(0.02)
    clock.end()
    before = clock.read()
    device.synchronize()
    return before, clock.read()


def test_seconds_are_those_of_the_device(device):
    """A GPU's clock goes faster or slower by some ten percent meanwhile."""
    clock = DeviceClock(device)
    for _ in range(3):
        before, times = run_list(clock, device)
        assert before.busy_s == before.run_s == 0, "a device that is given orders is not waited for"
        assert times.busy_s == pytest.approx(0.04, rel=0.25) and times.run_s == pytest.approx(0.14, rel=0.25)
        assert device.num_timed_events == 6, "events are used again"


def test_a_slow_device_takes_so_many_times_as_long(device):
    clock = DeviceClock(device, lambda: 3.0)
    first, second, third = (run_list(clock, device)[1].busy_s for _ in range(3))
    assert second == pytest.approx(3 * first, rel=0.25) and third == pytest.approx(second, rel=0.25)


def test_computes_of_the_stream_are_timed_where_they_run(device):
    """Products, which the host gives in less time than they take."""
    clock, x = DeviceClock(device), torch.randn(4096, 4096, device="cuda")
    (x @ x).sum().item()
    clock.begin()
    with clock.compute(Op.FORWARD):
        for _ in range(20):
            y = x @ x
    clock.end()
    del y
    device.synchronize()
    times = clock.read()
    assert times.busy_s > 20 * 2 * 4096**3 / 2e15, "no device has 2 PFLOP/s in fp32"
    assert times.busy_s <= times.run_s < 1.2 * times.busy_s + 1e-3
