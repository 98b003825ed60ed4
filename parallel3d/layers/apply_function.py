"""Calls an autograd function: by `apply`, or its forward pass alone in inference mode, where nothing is recorded.

`apply` looks at each argument for torch's function transforms and makes a node, which costs a token's step of decoding
some 17 us for each of its products and norms (docs/experiments.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function


class _NoRecord:
    """Takes the place of a function's context, and keeps nothing that a backward pass would read."""

    def save_for_backward(self, *tensors: Any) -> None:
        return

    def mark_non_differentiable(self, *tensors: Any) -> None:
        return

    def set_materialize_grads(self, value: bool) -> None:
        return


def apply_function(function: type[Function], *arguments: Any) -> Any:
    """The result of the function's forward pass."""
    if torch.is_inference_mode_enabled():
        return function.forward(_NoRecord(), *arguments)
    return function.apply(*arguments)
