"""From counts to seconds, and the table of devices."""

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest

from parallel3d.errors import UserError
from parallel3d.rehearsal import roofline
from parallel3d.rehearsal.device_rows import DEVICE_ROWS, find_rows
from parallel3d.rehearsal.kernel_counts import KernelCounts, KernelWork
from parallel3d.rehearsal.roofline import estimate_phase, estimate_step, kernel_s

H200 = next(row for row in DEVICE_ROWS if row.name == "H200-141GB")
TERA = 10**12


def product(**changes):
    fields = dict(name="mm", kind="product", num_bytes=0, flops=TERA, narrowest=4096)
    return KernelWork(**{**fields, **changes})


def test_what_limits_a_kernel():
    assert kernel_s(product(), H200) == pytest.approx(1 / (0.70 * 989.4))
    assert kernel_s(product(narrowest=768), H200) == pytest.approx(1 / (0.565 * 989.4))
    assert kernel_s(product(is_aligned=False), H200) == pytest.approx(3.3 * kernel_s(product(), H200))
    assert kernel_s(product(itemsize=4), H200) == pytest.approx(1 / (0.70 * 66.9))
    assert kernel_s(product(num_bytes=48 * 10**9), H200) == pytest.approx(0.01 / 0.79)
    add = KernelWork(name="add", kind="elementwise", num_bytes=48 * 10**8)
    assert kernel_s(add, H200) == pytest.approx(1e-3 / 0.79)
    assert kernel_s(KernelWork(name="add", kind="elementwise", num_bytes=6), H200) == H200.rates.kernel_s
    gather = KernelWork(name="all_gather", kind="collective", num_bytes=45 * 10**7)
    assert kernel_s(gather, H200) == pytest.approx(1e-3 / 0.75)


def test_a_cpu_starts_and_computes_in_turn():
    cores = replace(H200, rates=replace(H200.rates, dispatch_s=1e-3))
    small = KernelWork(name="add", kind="elementwise", num_bytes=6)
    for work in (small, product()):
        assert kernel_s(work, cores) == pytest.approx(kernel_s(work, H200) + 1e-3)


def test_many_small_kernels_take_as_long_as_their_starts():
    small = KernelWork(name="add", kind="elementwise", num_bytes=6)
    phase = estimate_phase(KernelCounts(works=Counter({small: 1000}), num_waits=2), H200)
    assert phase.total_s == pytest.approx(1000 * H200.rates.launch_s + 2 * H200.rates.wait_s)
    large = KernelWork(name="add", kind="elementwise", num_bytes=48 * 10**8)
    assert estimate_phase(KernelCounts(works=Counter({large: 10})), H200).idle_s == 0


def test_a_step_has_a_speed_a_share_of_the_peak_and_a_size():
    counts = KernelCounts(works=Counter({product(): 10}))
    step = estimate_step({"layers": counts}, H200, num_tokens=1000, model_flops=5 * TERA, peak_bytes=100 * 2**30)
    assert step.step_s == pytest.approx(H200.rates.step_idle_s + 10 / (0.70 * 989.4))
    assert step.tokens_per_s == pytest.approx(1000 / step.step_s)
    assert step.mfu == pytest.approx(5 / 989.4 / step.step_s)
    assert step.peak_gib == 100 + roofline.RESERVED_GIB and step.fits


def test_own_rows(tmp_path):
    row = {"name": "MINE", "memory_gib": 8, "bandwidth": 1e12, "link_bandwidth": 1e9}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{**row, "bf16_tflops": 100, "fp32_tflops": 10}]))
    assert [each.name for each in find_rows("MINE,H100", path)] == ["MINE", "H100-80GB"]
    with pytest.raises(UserError, match="unknown device OTHER: there are H100-80GB, H200-141GB"):
        find_rows("OTHER", None)
    path.write_text(json.dumps([row]))
    with pytest.raises(UserError, match="row 1 .MINE.: lacks bf16_tflops, fp32_tflops"):
        find_rows("MINE", path)


OWN = {"name": "A", "memory_gib": 8, "bandwidth": 1e12, "link_bandwidth": 1e9, "bf16_tflops": 100, "fp32_tflops": 10}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"name": "H100-80GB", "price_per_hour": "2.2"}, "(H100-80GB): price_per_hour = '2.2': must be a number"),
        ({**OWN, "bf16_tflops": 0}, "(A): bf16_tflops = 0: should be greater than 0"),
        ({**OWN, "memory_gib": -5}, "(A): memory_gib = -5: should be greater than 0"),
        ({**OWN, "memory_gib": 10**400}, "(A): memory_gib = 1000"),
        ({**OWN, "bandwidth": float("nan")}, "(A): bandwidth = nan: should be a finite number"),
        ({**OWN, "price_per_hour": float("inf")}, "(A): price_per_hour = inf: should be a finite number"),
        ({**OWN, "is_cpu": 1}, "(A): is_cpu = 1: should be a valid boolean"),
        ({**OWN, "rates": None}, "(A): rates = None: must be an object"),
        ({**OWN, "rates": {"kernel_s": -1, "wide_from": 2.5}}, "2.5: should be a valid integer; rates.kernel_s = -1: "),
        ({**OWN, "price": 2.2}, "(A): price = 2.2: no such field; there are name, memory_gib"),
        ({**OWN, "name": ["A"]}, "name = ['A']: should be a valid string"),
        ({"nam": "A"}, "row 2: lacks name, memory_gib"),
        (3, "row 2: the row = 3: must be an object"),
    ],
)
def test_a_mistake_in_a_row_is_one_message_with_file_row_field_and_value(tmp_path, row, said):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([OWN, row]))
    with pytest.raises(UserError) as caught:
        find_rows("H100", path)
    message = str(caught.value)
    assert message.startswith(f"{path}: row 2") and said in message and "\n" not in message


def test_rows_that_were_written_are_read(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([asdict(row) for row in DEVICE_ROWS]))
    assert find_rows("H100,B200", path) == find_rows("H100,B200", None)


def test_a_row_may_change_single_rates(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"name": "H200-141GB", "rates": {"attention": 0.25}}]))
    (row,) = find_rows("H200", path)
    assert row.rates == replace(H200.rates, attention=0.25) and row.bandwidth == H200.bandwidth
    attend = KernelWork(name="attend", kind="attention", num_bytes=0, flops=TERA)
    assert kernel_s(attend, row) == pytest.approx(2 * kernel_s(attend, H200))
    path.write_text(json.dumps([{"name": "H200-141GB", "rates": {"attentoin": 0.25}}]))
    with pytest.raises(UserError, match="attentoin"):
        find_rows("H200", path)
