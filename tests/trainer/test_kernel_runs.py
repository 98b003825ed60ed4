"""Runs whose layers and updates are Triton's kernels follow those of torch's operators."""

import pytest

from tests.support.kernel_forms import DEVICE

pytest.importorskip("triton")


@pytest.mark.full
@pytest.mark.skipif(DEVICE != "cpu", reason="the tiny runs are on the CPU, where Triton's kernels are interpreted")
@pytest.mark.parametrize("architecture, policy", [("llama", "bf16_sr"), ("gpt2", "fp32")])
def test_losses(run_layout, architecture, policy):
    """bf16: activations are rounded in other places, to 8 bits. The second loss is one after an update."""
    torchs, tritons = (
        run_layout(
            steps=2,
            model=dict(architecture=architecture, num_hidden_layers=1, hidden_dropout=0.1),
            batch=dict(global_batch_size=1, sequence_length=8),
            precision=dict(policy=policy),
            run=dict(kernels=kernels),
        ).losses
        for kernels in ("torch", "triton")
    )
    assert tritons == pytest.approx(torchs, rel=1e-6 if policy == "fp32" else 1e-3)
    assert tritons != torchs
