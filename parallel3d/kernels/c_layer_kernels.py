"""The C forms of `layer_kernels.py`, for CPUs; what has none is torch's."""

from __future__ import annotations

from dataclasses import replace

from parallel3d.kernels import c_activations, c_attention, c_cross_entropy, c_norms, c_rotary
from parallel3d.kernels.layer_kernels import (
    TORCH_KERNELS,
    Activation,
    AttentionKernels,
    LayerKernels,
    NormKernels,
    RotaryKernels,
)


def c_layer_kernels() -> LayerKernels:
    """The table. fp64 and fp16 take torch's forms."""
    return replace(
        TORCH_KERNELS,
        rms_norm=NormKernels(forward=c_norms.rms_norm, backward=c_norms.rms_norm_grads),
        layer_norm=NormKernels(forward=c_norms.layer_norm, backward=c_norms.layer_norm_grads),
        rotary=RotaryKernels(forward=c_rotary.split_and_rotate, backward=c_rotary.packed_grads),
        attention=AttentionKernels(forward=c_attention.attention, backward=c_attention.attention_grads),
        silu_times=Activation(forward=c_activations.silu_times, backward=c_activations.silu_times_grads),
        gelu={
            **TORCH_KERNELS.gelu,
            "tanh": Activation(forward=c_activations.gelu_tanh, backward=c_activations.gelu_tanh_grads),
        },
        cross_entropy=c_cross_entropy.cross_entropy,
    )
