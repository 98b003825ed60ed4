"""The clocks of an instruction list: of the host, and of a device whose clock the test moves."""

import pytest
import torch

from parallel3d.accelerator import accelerator_of
from parallel3d.pipeline.compute_clock import DeviceClock, HostClock, ListTimes
from parallel3d.pipeline.instructions import Op
from tests.support.lazy_accelerator import LazyAccelerator

LIST = ((Op.FORWARD, 1.0), (Op.FORWARD, 3.0), (Op.BACKWARD, 4.0))
"""Computes, and their seconds."""


@pytest.fixture
def device():
    return LazyAccelerator()


def run_list(clock, device, computes=LIST, waits_s=0.0):
    """Runs the computes, with a wait of the device before each."""
    clock.begin()
    for op, seconds in computes:
        device.now_s += waits_s
        with clock.compute(op):
            device.now_s += seconds
    clock.end()
    return clock.read()


def test_on_the_host_the_hook_says_which_seconds_count():
    clock = HostClock(lambda seconds: seconds + 10.0)
    for _ in range(2):
        clock.begin()
        for _ in range(3):
            with clock.compute(Op.FORWARD):
                pass
        clock.end()
        busy_s, run_s = clock.read()
        assert 30.0 < busy_s < 31.0 and 0.0 < run_s < 1.0


def test_a_devices_seconds_are_its_own_without_its_waits(device):
    times = run_list(DeviceClock(device), device, waits_s=100.0)
    assert times == ListTimes(8.0, 308.0)


def test_events_are_used_again_and_nothing_waits_for_them(device):
    clock = DeviceClock(device)
    for number in range(4):
        assert run_list(clock, device, LIST[:2] if number == 2 else LIST).busy_s == (4.0 if number == 2 else 8.0)
        assert device.num_timed_events == 2 + 2 * len(LIST)
    assert device.log == []


def test_what_the_device_has_not_done_yet_is_unknown(device):
    clock = DeviceClock(device)
    assert clock.read() == ListTimes(), "no list yet"
    device.is_behind = True
    assert run_list(clock, device) == ListTimes()
    device.is_behind = False
    assert clock.read().busy_s == 8.0


def test_a_list_that_was_left_is_forgotten(device):
    clock = DeviceClock(device)
    clock.begin()
    with pytest.raises(ValueError, match="a peer is lost"), clock.compute(Op.FORWARD):
        device.now_s += 50.0
        raise ValueError("a peer is lost")
    assert run_list(clock, device).busy_s == 8.0


def test_a_slow_device_spins_in_proportion_to_the_last_list(device):
    factors = iter([5.0] * 3 + [1.0] * 3 + [5.0] * 9)
    clock = DeviceClock(device, lambda: next(factors))
    assert run_list(clock, device).busy_s == 8.0, "how long computes take is not known in the first list"
    assert run_list(clock, device).busy_s == 8.0
    for _ in range(3):  # spinning is not taken for computing, or it would grow from list to list
        assert run_list(clock, device).busy_s == 8.0 + 4 * (2.0 + 2.0 + 4.0)


def test_meta_tensors_take_no_time():
    clock = DeviceClock(accelerator_of(torch.device("meta")), lambda: 2.0)
    for _ in range(2):
        clock.begin()
        with clock.compute(Op.FORWARD):
            pass
        clock.end()
        assert clock.read() == ListTimes()
