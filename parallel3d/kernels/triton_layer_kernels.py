"""The Triton forms of `layer_kernels.py`, with the function that starts them."""

# mypy: ignore-errors

from __future__ import annotations

from functools import partial
from typing import get_args

from parallel3d.kernels import (
    triton_activations,
    triton_cross_entropy,
    triton_dropout,
    triton_embedding,
    triton_norms,
    triton_rotary,
    triton_row_sums,
)
from parallel3d.kernels.launch_kernel import Launch, launch_triton
from parallel3d.kernels.layer_kernels import (
    TORCH_KERNELS,
    Activation,
    DropoutKernels,
    GeluForm,
    LayerKernels,
    NormKernels,
    RotaryKernels,
)


def triton_layer_kernels(launch: Launch = launch_triton) -> LayerKernels:
    """The table whose kernels are started by `launch`."""

    def bind(function):
        return partial(function, launch)

    def gated(*, is_gelu: bool) -> Activation:
        return Activation(
            forward=partial(bind(triton_activations.gate_times), is_gelu=is_gelu),
            backward=partial(bind(triton_activations.gate_times_grads), is_gelu=is_gelu),
        )

    return LayerKernels(
        rms_norm=NormKernels(forward=bind(triton_norms.rms_norm), backward=bind(triton_norms.rms_norm_grads)),
        layer_norm=NormKernels(forward=bind(triton_norms.layer_norm), backward=bind(triton_norms.layer_norm_grads)),
        rotary=RotaryKernels(forward=bind(triton_rotary.split_and_rotate), backward=bind(triton_rotary.packed_grads)),
        silu_times=gated(is_gelu=False),
        gelu_times=gated(is_gelu=True),
        gelu={
            form: Activation(
                forward=partial(bind(triton_activations.gelu), approximate=form),
                backward=partial(bind(triton_activations.gelu_grads), approximate=form),
            )
            for form in get_args(GeluForm)
        },
        attention=TORCH_KERNELS.attention,
        cross_entropy=bind(triton_cross_entropy.cross_entropy),
        dropout=DropoutKernels(forward=bind(triton_dropout.drop), backward=bind(triton_dropout.drop_grad)),
        add_rows=bind(triton_embedding.add_rows),
        sum_rows=bind(triton_row_sums.sum_rows),
    )
