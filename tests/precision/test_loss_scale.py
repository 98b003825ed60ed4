"""The loss scale changes as torch's GradScaler does, and is always a power of two."""

from math import frexp

import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.precision.loss_scale import LossScale

POWERS = st.integers(-3, 20).map(lambda n: 2.0**n)


@given(
    POWERS,
    st.integers(1, 5),
    st.sampled_from([1.0, 2.0, 4.0]),
    st.sampled_from([0.25, 0.5, 1.0]),
    st.lists(st.booleans(), max_size=60),
)
def test_it_moves_as_torchs_does(initial, interval, growth, backoff, iterations):
    """torch has no smallest scale."""
    ours = LossScale(
        scale=initial, growth_interval=interval, growth_factor=growth, backoff_factor=backoff, min_scale=0.0
    )
    theirs, tracker = torch.tensor(initial, dtype=torch.float32), torch.tensor(0, dtype=torch.int32)
    for finite in iterations:
        ours = ours.after(finite=finite)
        torch._amp_update_scale_(theirs, tracker, torch.tensor(float(not finite)), growth, backoff, interval)
        assert ours.scale == theirs.item() and ours.num_finite == tracker.item()
        assert frexp(ours.scale)[0] == 0.5


def test_it_does_not_fall_below_the_least_scale():
    scale = LossScale(scale=4.0, growth_interval=10, min_scale=1.0)
    scales = [scale.scale, *((scale := scale.after(finite=False)).scale for _ in range(4))]
    assert scales == [4.0, 2.0, 1.0, 1.0, 1.0]


@given(st.lists(st.booleans(), max_size=20))
def test_without_an_interval_it_stays(iterations):
    fixed = LossScale(scale=1024.0)
    for finite in iterations:
        assert fixed.after(finite=finite) is fixed
    assert LossScale().factor == 1.0


def test_the_factor_is_that_of_the_mean_loss():
    """For 3,000 tokens, rounded up to 4,096, the gradients of the sum are multiplied by scale / 4,096."""
    assert LossScale(scale=65536.0, num_tokens_log2=12).factor == 16.0
    assert LossScale(scale=1.0, num_tokens_log2=22).factor == 2.0**-22
