"""The rows of the precision table."""

from typing import get_args

import pytest
import torch

from parallel3d.config.schema import PrecisionConfig
from parallel3d.precision.policy import POLICIES

MIXED = {"fp16": torch.float16, "bf16": torch.bfloat16}
NARROW = ("bf16_sr", "bf16_pure")


def test_the_configuration_offers_exactly_the_table():
    offered = get_args(PrecisionConfig.model_fields["policy"].annotation)
    assert set(offered) == POLICIES.keys() == {policy.name for policy in POLICIES.values()}


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in NARROW])
def test_nothing_that_is_added_up_is_narrower_than_fp32(name):
    """HLAT, section III-D: 16-bit weights and activations; gradients, moments and master weights in fp32."""
    policy = POLICIES[name]
    for wide in (policy.grad, policy.state, policy.keep_fp32_dtype):
        assert wide.itemsize >= 4 and torch.promote_types(wide, policy.compute) is wide
    assert policy.update_rounding == "none"


@pytest.mark.parametrize("name", MIXED)
def test_mixed_precision_computes_in_16_bits(name):
    policy = POLICIES[name]
    assert (policy.compute, policy.grad, policy.state) == (MIXED[name], torch.float32, torch.float32)


def test_without_master_weights_the_weights_have_the_format_of_the_moments():
    assert {name for name, policy in POLICIES.items() if policy.has_master} == MIXED.keys()
    for policy in POLICIES.values():
        assert policy.has_master or policy.state is policy.compute


def test_only_fp16_has_too_few_exponents_for_gradients_as_they_are():
    assert [name for name, policy in POLICIES.items() if policy.scales_loss] == ["fp16"]


def test_the_two_narrow_rows_differ_in_their_rounding_alone():
    stochastic, nearest = (POLICIES[name] for name in NARROW)
    assert {stochastic.compute, stochastic.grad, stochastic.state} == {torch.bfloat16}
    assert (stochastic.update_rounding, nearest.update_rounding) == ("stochastic", "nearest")
    for field in ("compute", "grad", "state", "keep_fp32_dtype", "has_master", "scales_loss"):
        assert getattr(stochastic, field) == getattr(nearest, field)
