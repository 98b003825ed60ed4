"""The rows of the precision table."""

import torch

from parallel3d.precision.policy import POLICIES


def test_policies_are_named_by_their_keys():
    assert {key: policy.name for key, policy in POLICIES.items()} == {name: name for name in ("fp32", "fp64", "bf16")}


def test_nothing_that_is_added_up_is_narrower_than_fp32():
    """HLAT, section III-D: bf16 weights and activations; gradients, moments and master weights in fp32."""
    for policy in POLICIES.values():
        for wide in (policy.grad, policy.state, policy.sensitive):
            assert wide.itemsize >= 4 and torch.promote_types(wide, policy.compute) is wide
    bf16 = POLICIES["bf16"]
    assert (bf16.compute, bf16.grad, bf16.state) == (torch.bfloat16, torch.float32, torch.float32)


def test_only_a_narrow_compute_format_needs_master_weights():
    assert {name: policy.has_master for name, policy in POLICIES.items()} == {
        "fp32": False,
        "fp64": False,
        "bf16": True,
    }
