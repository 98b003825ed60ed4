"""Published costs and fits, recomputed by our own functions: the blog on GPT-2 163M, and HLAT."""

from pathlib import Path

import pytest

from parallel3d.config.derived import flops_per_token
from parallel3d.config.load import load_config
from parallel3d.costs.fits import BatchCurve, MemoryLine
from parallel3d.costs.machines import parse_machines
from parallel3d.costs.rental import FinishedRun, Rental, cost_of_time, cost_of_tokens, scaling_report

CONFIGS = Path(__file__).parents[2] / "configs"

# --- memory over the micro-batch, loss over the batch (blog) ----------------------------------------------------------


def test_memory_is_linear_in_the_micro_batch():
    line = MemoryLine.fit([(6, 24), (13, 40), (27, 80), (64, 160)])
    assert (line.overhead, line.per_item) == pytest.approx((11.48, 2.346), rel=5e-4)
    assert line.r_squared == pytest.approx(0.9968, abs=5e-5)
    assert line.largest(12) == 0  # "too small even for one"
    assert line.largest(139) == 54  # an H200
    assert line.at(64) == pytest.approx(161.6, abs=0.1)
    assert line.error == pytest.approx(0.0939, rel=1e-2) and line.rises(2) and not line.rises(3)


def test_a_line_through_noise_does_not_rise():
    assert not MemoryLine.fit([(1, 5.0), (2, 5.2), (4, 5.0), (8, 5.1)]).rises(1e-4)
    assert not MemoryLine.fit([(1, 5.0), (2, 4.9)]).rises(1e-4)
    flat = MemoryLine.fit([(1, 5.0), (2, 5.0), (4, 5.0)])
    assert flat.r_squared == 0 and not flat.rises(1e-4)
    assert MemoryLine.fit([(1, 5.0), (2, 5.1)]).rises(1e-4)


def test_the_loss_is_lowest_at_a_batch_of_97():
    curve = BatchCurve.fit([(6, 3.944), (104, 3.674), (216, 3.725), (224, 3.730), (512, 3.771)])
    assert (curve.a, curve.c, curve.d) == pytest.approx((0.0323, -0.2957, 4.3687), abs=5e-5)
    assert curve.best_batch == pytest.approx(97.1, abs=0.05)
    assert curve.penalty(97.1) == pytest.approx(0, abs=1e-6) and 0.08 < curve.penalty(512) < 0.10


# --- rented machines (blog) -------------------------------------------------------------------------------------------

TOKENS = 30_614 * 104 * 1_024
"""Of each of the trainings: updates x sequences x length of the one on A100-40GB."""


def run(price, seconds, evaluations, evaluation_s):
    return FinishedRun(
        price_per_hour=price,
        seconds=seconds,
        num_evaluations=evaluations,
        evaluation_s=evaluation_s,
        num_tokens=TOKENS,
    )


@pytest.mark.parametrize(
    ("device", "finished", "net"),
    [
        ("A100-40GB", run(10.32, 13_904, 50, 30), 35.56),
        ("B200", run(39.92, 4_190, 11, 60), 39.14),
        ("H100", run(23.92, 6_650, 24, 38), 38.13),
        ("A100-80GB", run(14.32, 11_532, 25, 66), 39.31),
    ],
)
def test_what_a_machine_cost(device, finished, net):
    assert finished.net_dollars == pytest.approx(net, abs=0.005)
    assert finished.gross_dollars == pytest.approx(finished.net_dollars + finished.evaluation_dollars)
    [machine] = parse_machines(f"8x{device}")
    assert machine.price_per_hour == pytest.approx(finished.price_per_hour)


def test_gross_and_net():
    slow, fast = run(10.32, 13_904, 50, 30), run(39.92, 4_190, 11, 60)
    assert slow.gross_dollars == pytest.approx(39.86, abs=0.005) and slow.net_s == 12_404
    assert slow.tokens_per_s == pytest.approx((234_484, 262_840), abs=5)
    assert fast.evaluation_dollars == pytest.approx(7.32, abs=0.005) and fast.net_s == 3_530
    assert slow.dollars_per_mtoken == pytest.approx(39.86 / TOKENS * 1e6, rel=1e-3)
    assert run(14.32, 11_532, 26, 66).net_dollars < 39.14 < run(14.32, 11_532, 25, 66).net_dollars


@pytest.mark.parametrize(
    ("finished", "gross", "shown"),
    [
        (run(10.32, 13_904, 50, 30), 234_484, 254_000),
        (run(39.92, 4_190, 11, 60), 778_107, 801_221),
        (run(23.92, 6_650, 24, 38), 490_265, 493_000),
        (run(14.32, 11_532, 25, 66), 282_714, 286_188),
    ],
    ids=["A100-40GB", "B200", "H100", "A100-80GB"],
)
def test_speeds_that_were_shown_are_below_the_net_and_above_the_gross_ones(finished, gross, shown):
    """The blog's are those of its progress bar, without evaluations in part: they don't follow from tokens and time."""
    over_all, without_evaluations = finished.tokens_per_s
    assert over_all == pytest.approx(gross, abs=1)
    assert over_all < shown < without_evaluations


def test_what_was_billed_is_more_than_the_training():
    """Set-up, downloads and searches by hand: 47.35 + 60.25 + 51.47 + 48.76 of the 215.16 dollars spent in all."""
    billed = {39.86: 47.35, 46.46: 60.25, 44.19: 51.47, 45.87: 48.76}
    runs = ((10.32, 13_904, 50, 30), (39.92, 4_190, 11, 60), (23.92, 6_650, 24, 38), (14.32, 11_532, 25, 66))
    assert [run(*each).gross_dollars for each in runs] == pytest.approx([*billed], abs=0.005)
    assert 215.16 - sum(billed.values()) == pytest.approx(7.33, abs=0.005)


def test_a_rental():
    rental = Rental(price_per_hour=36.0, tokens_per_s=1e6, num_tokens=86_400e6)
    assert rental.days == pytest.approx(1) and rental.dollars == pytest.approx(864)
    assert rental.dollars_per_mtoken == pytest.approx(0.01)
    assert Rental(price_per_hour=None, tokens_per_s=1.0, num_tokens=1.0).dollars is None


# --- the cost of tokens (HLAT) ----------------------------------------------------------------------------------------


def test_hlats_cost_of_tokens():
    trainium, a100 = 21.50, 32.77
    assert cost_of_tokens(trainium, 4e6) == pytest.approx(cost_of_time(trainium, 1.0))
    assert trainium / a100 == pytest.approx(0.656, abs=5e-4)
    tflops = {"trn1": 32 * 95, "p4d": 8 * 312}
    [trn1], [p4d] = parse_machines("32xTrn1-16GB"), parse_machines("8xA100-40GB")
    assert trn1.device.bf16_tflops * 32 == tflops["trn1"] and p4d.device.bf16_tflops * 8 == tflops["p4d"]
    assert trn1.price_per_hour == pytest.approx(trainium)
    ratio = tflops["trn1"] / tflops["p4d"]
    assert ratio == pytest.approx(1.218, abs=5e-4)
    at_equal_efficiency = cost_of_tokens(trainium, ratio) / cost_of_tokens(a100, 1.0)
    assert at_equal_efficiency == pytest.approx(0.539, abs=5e-4)
    assert at_equal_efficiency / 0.60 == pytest.approx(0.90, abs=0.005)  # of the A100's efficiency, at HLAT's 0.60


def test_70b_costs_ten_times_7b():
    """At the same utilisation, by the operations of a token at 4,096 tokens a sequence. The paper: about ten times."""
    small, large = (load_config(CONFIGS / f"hlat_{size}.json") for size in ("7b", "70b"))
    ratio = cost_of_tokens(21.50, 1 / operations(large)) / cost_of_tokens(21.50, 1 / operations(small))
    assert ratio == pytest.approx(10, rel=0.1)


def operations(config):
    return flops_per_token(config.model, config.batch.sequence_length)


def test_a_scaling_report():
    rows = scaling_report({8: 1.0e6, 4: None, 16: 1.98e6, 32: 3.2e6}, price_of_host=21.50)
    assert [row.num_hosts for row in rows] == [4, 8, 16, 32]
    assert (rows[0].cost, rows[0].is_flat) == (None, None)  # 70B on 4 nodes: out of memory
    assert rows[1].relative == 1 and rows[2].is_flat and not rows[3].is_flat
    assert rows[1].cost == pytest.approx(8 * 21.50 / 3600 * 4)
