"""Numbers that papers publish, or that follow from their formulas, recomputed by our own functions."""

from __future__ import annotations

from math import cos, pi
from pathlib import Path

import pytest

from parallel3d.config.derived import num_parameters
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.config.warmup_builder import run_length
from parallel3d.ramps import LrSchedule
from parallel3d.size_schedule import BatchShapeSchedule, Constant, Discrete, Polynomial, compute_run_length
from parallel3d.trainer.learning_rate import build_lr_schedule

CONFIGS = Path(__file__).parents[1] / "configs"


def learning_rate(**changes: dict[str, object]) -> LrSchedule:
    """That of HLAT-7B's configuration with these sections changed."""
    raw = load_config(CONFIGS / "hlat_7b.json").model_dump()
    for section, values in changes.items():
        raw[section] |= values
    return build_lr_schedule(resolve(Config.model_validate(raw), config_path="paper.json"))


# --- HLAT -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("peak", "name"), [(3e-4, "hlat_7b"), (1.5e-4, "hlat_70b")])
def test_hlat_learning_rate(peak: float, name: str):
    """max(0.1, 0.5 (1 + cos(pi p))), p = (s - 2000) / (500,000 - 2000), after a linear warmup."""
    lr_schedule = build_lr_schedule(resolve(load_config(CONFIGS / f"{name}.json"), config_path="paper.json"))
    for step, share in [(0, 0.0), (1000, 0.5), (2000, 1.0), (250_000, 0.50315), (397_994, 0.1), (429_153, 0.1)]:
        assert lr_schedule.at(updates=step, tokens=0) == pytest.approx(peak * share, rel=1e-5), step
    assert lr_schedule.at(updates=397_993, tokens=0) > 0.1 * peak


def test_hlat_plateau():
    """p = (s - w - plateau) / (T - w - plateau)."""
    lr_schedule = learning_rate(lr_schedule=dict(warmup_steps=2000, decay_steps=12_000, plateau_ratio=0.2))
    values = [lr_schedule.at(updates=step, tokens=0) / 3e-4 for step in (2000, 4000, 6000, 8000, 12_000)]
    assert values == pytest.approx([1.0, 1.0, 0.5 * (1 + cos(pi / 4)), 0.5, 0.1])


# --- Sequence Length Warmup: the learning rate ------------------------------------------------------------------------

SLW_SCHEDULE = dict(
    kind="cosine",
    warmup_steps=3000,
    decay_steps=None,
    decay_tokens=157_286_400_000,
    min_ratio=1 / 15,
    decay_form="floor",
)
SLW = dict(
    batch=dict(global_batch_size=512, micro_batch_size=2, sequence_length=1024),
    parallel=dict(tp_size=1, dp_size=256, sequence_parallel=False),
    optimizer=dict(learning_rate=1.5e-4),
    lr_schedule=SLW_SCHEDULE,
)


def test_tokens_of_a_schedule_by_steps():
    """lr_decay_tokens = decay_iters x global batch x full length; the budget of 300K baseline steps."""
    assert SLW_SCHEDULE["decay_tokens"] == 300_000 * 512 * 1024
    by_tokens = learning_rate(**SLW)
    by_steps = learning_rate(**SLW | {"lr_schedule": SLW_SCHEDULE | {"decay_tokens": None, "decay_steps": 300_000}})
    for step in (1, 2999, 3000, 3001, 150_000, 299_999, 300_000, 310_000):
        tokens = step * 512 * 1024
        values = [lr_schedule.at(updates=step, tokens=tokens) for lr_schedule in (by_tokens, by_steps)]
        assert values[0] == pytest.approx(values[1], rel=1e-12), step


def test_equal_learning_rate_after_equally_many_tokens():
    """lr = min + (max - min) / 2 (1 + cos(pi (tokens - w) / (D - w))), however many steps it took."""
    lr_schedule, w, end = learning_rate(**SLW), 3000 * 512 * 1024, 157_286_400_000
    for tokens in (w, 2 * w, 50_000_000_000, 120_000_000_000, end):
        wanted = 1e-5 + 0.5 * (1.5e-4 - 1e-5) * (1 + cos(pi * (tokens - w) / (end - w)))
        for steps in (3000, 110_000, 330_000):
            assert lr_schedule.at(updates=steps, tokens=tokens) == pytest.approx(wanted, rel=1e-12)
    assert lr_schedule.at(updates=1500, tokens=1500 * 512 * 8) == pytest.approx(0.75e-4)  # steps lead the warmup


@pytest.mark.parametrize(("tokens", "length", "steps"), [(1_572_864_000, 8, 384_000), (1_572_864_000, 1024, 3000)])
def test_steps_of_a_warmup_by_tokens(tokens: int, length: int, steps: int):
    """warmup_iters = X / (min_difficulty x global batch): why the paper counts the warmup in steps."""
    assert tokens == steps * 512 * length
    lr_schedule = learning_rate(**SLW | {"lr_schedule": SLW_SCHEDULE | {"warmup_steps": 0, "warmup_tokens": tokens}})
    for done in (steps // 2, steps):
        assert lr_schedule.at(updates=done, tokens=done * 512 * length) == pytest.approx(
            1.5e-4 * done / steps, rel=1e-12
        )


def test_gpt3_learning_rate():
    """Warmup over 375M tokens, cosine to a tenth at 260B tokens, training to 300B."""
    lr_schedule = learning_rate(
        optimizer=dict(learning_rate=6e-4),
        lr_schedule=dict(
            warmup_steps=0,
            warmup_tokens=375_000_000,
            decay_steps=None,
            decay_tokens=260_000_000_000,
            min_ratio=0.1,
            decay_form="floor",
        ),
    )
    half = (375_000_000 + 260_000_000_000) // 2
    for tokens, wanted in [(187_500_000, 3e-4), (375_000_000, 6e-4), (half, 3.3e-4), (260e9, 6e-5), (300e9, 6e-5)]:
        assert lr_schedule.at(updates=0, tokens=tokens) == pytest.approx(wanted, rel=1e-9)


# --- Sequence Length Warmup (Li, Zhang and He 2022), Table 2 ----------------------------------------------------------

BUDGET = 300_000 * 512 * 1024
"""157 billion tokens, whatever the batch and the lengths are."""


def slw(*, duration: int, first: int = 8, full: int = 1024, batch: int = 512) -> BatchShapeSchedule:
    """Linear warmup of the length, tails dropped."""
    length = Polynomial(first=first, last=full, duration=duration, multiple=8)
    return BatchShapeSchedule(length=length, size=Constant(batch), read_length=full)


RUNS = {
    "GPT-2 117M, 60K": slw(duration=60_000),
    "GPT-2 117M b4K, 30K": slw(duration=30_000, batch=4096),
    "GPT-2 117M 2K, 110K": slw(duration=110_000, full=2048),
    "GPT-2 1.5B, 64, 270K": slw(duration=270_000, first=64),
    "GPT-2 1.5B b4K, 64, 45K": slw(duration=45_000, first=64, batch=4096),
}


@pytest.mark.parametrize(
    "run, num_steps",
    [
        ("GPT-2 117M, 60K", 330_000),  # published: 330K
        ("GPT-2 117M b4K, 30K", 52_500),  # 52.5K
        ("GPT-2 117M 2K, 110K", 205_000),  # 205K
        ("GPT-2 1.5B, 64, 270K", 427_617),  # 428K
        ("GPT-2 1.5B b4K, 64, 45K", 58_769),  # 58.8K
    ],
)
def test_steps_until_the_budget_of_tokens_is_spent(run: str, num_steps: int):
    assert compute_run_length(RUNS[run], num_steps=None, num_tokens=BUDGET).num_steps == num_steps


@pytest.mark.parametrize(
    "run, num_steps, billions",
    [
        ("GPT-2 117M, 60K", 200_000, 89.1),
        ("GPT-2 117M b4K, 30K", 37_000, 92.3),
        ("GPT-2 117M 2K, 110K", 122_500, 70.8),
        ("GPT-2 1.5B, 64, 270K", 360_000, 121.8),
        ("GPT-2 1.5B b4K, 64, 45K", 50_000, 120.5),
    ],
)
def test_tokens_at_which_warmup_has_caught_up(run: str, num_steps: int, billions: float):
    assert compute_run_length(RUNS[run], num_steps=num_steps, num_tokens=None).num_tokens / 1e9 == pytest.approx(
        billions, abs=0.05
    )


def test_shortformer_in_two_stages():
    shape_schedule = BatchShapeSchedule(
        length=Discrete(sizes=(128, 1024), until=(20_000,)), size=Constant(4096), read_length=1024
    )
    assert compute_run_length(shape_schedule, num_steps=None, num_tokens=BUDGET).num_steps == 55_000


def test_what_truncation_reads_and_drops():
    """173.0 billion tokens read for 157.3 trained on: 30,000 whole batches are dropped."""
    run_length = compute_run_length(RUNS["GPT-2 117M, 60K"], num_steps=None, num_tokens=BUDGET)
    read = run_length.num_tokens + run_length.num_dropped_tokens
    assert (read / 1e9, run_length.num_dropped_tokens / 1e9) == pytest.approx((173.0, 15.7), abs=0.05)
    assert run_length.num_dropped_tokens / (512 * 1024) == pytest.approx(30_000, abs=1)


def test_batch_warmup_takes_a_few_more_steps_than_published():
    """128 to 4,096 over 45K steps: published 58.8K steps; sizes that are multiples of 128 take 60.0K, of 1 59.3K. All
    other rows of the table are met to the digit."""
    counts = [
        compute_run_length(
            BatchShapeSchedule(
                length=Constant(1024), size=Polynomial(first=128, last=4096, duration=45_000, multiple=multiple)
            ),
            num_steps=None,
            num_tokens=BUDGET,
        ).num_steps
        for multiple in (128, 1)
    ]
    assert counts == pytest.approx([60_000, 59_300], abs=60)


def test_a_linear_warmup_halves_the_tokens_and_thirds_the_attention():
    """Over the warmup the mean of L / L_e is 0.50, of its square, which attention costs, 0.33."""
    size_schedule = Polynomial(first=8, last=1024, duration=60_000, multiple=8)
    shares = [size_schedule.at(step) / 1024 for step in range(1, 60_001)]
    assert sum(shares) / len(shares) == pytest.approx(0.50, abs=0.005)
    assert sum(share**2 for share in shares) / len(shares) == pytest.approx(0.33, abs=0.005)


def test_different_lengths_of_a_warmup():
    """8 to 1,024 by 8: 128 of them; by 64: 16."""
    assert len(Polynomial(first=8, last=1024, duration=1, multiple=8).values()) == 128
    assert len(Polynomial(first=64, last=1024, duration=1, multiple=64).values()) == 16


# --- Writing an LLM from scratch (Thomas 2025) ------------------------------------------------------------------------

TWENTY_A_PARAMETER = 3_260_190_720


@pytest.mark.parametrize(("batch", "num_steps"), [(104, 30_614), (512, 6_219), (216, 14_740), (224, 14_214)])
def test_steps_for_twenty_tokens_a_parameter(batch: int, num_steps: int):
    """Each machine its batch; the last step may go beyond the budget, by less than a batch."""
    raw = load_config(CONFIGS / "gpt2_163m.json").model_dump()
    raw["batch"] |= {"global_batch_size": batch, "micro_batch_size": 1}
    raw["run"] |= {"num_steps": None, "num_tokens": TWENTY_A_PARAMETER}
    config = resolve(Config.model_validate(raw), config_path="blog.json")
    assert 20 * num_parameters(config.model) == TWENTY_A_PARAMETER
    assert run_length(config).num_steps == num_steps
    assert run_length(config).num_tokens == num_steps * batch * 1024


def test_its_later_learning_rate():
    """1.4e-3 after a linear warmup over 5 % of the run, then a cosine to a tenth."""
    lr_schedule = learning_rate(
        optimizer=dict(learning_rate=1.4e-3),
        lr_schedule=dict(warmup_steps=500, decay_steps=10_000, min_ratio=0.1, decay_form="floor"),
    )
    for step, share in [(250, 0.5), (500, 1.0), (5250, 0.55), (10_000, 0.1)]:
        assert lr_schedule.at(updates=step, tokens=0) == pytest.approx(1.4e-3 * share)
