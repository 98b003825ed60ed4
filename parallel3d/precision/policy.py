"""Which number format is used where: one row for each `precision.policy`.

Gradients are added up, reduced and normed in `grad`; norms, softmax, loss and rotary tables are computed in
`sensitive`; where `master` is set, the optimizer keeps its own copy of the weights in that format (HLAT, section III-D,
calls the bf16 row "mixed precision").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Formats of one precision policy."""

    name: str
    compute: torch.dtype  # weights as the layers see them, activations, messages between stages
    grad: torch.dtype  # main gradients: accumulation over micro-batches and reduction over replicas
    state: torch.dtype  # optimizer moments, and the master weights where there are any
    sensitive: torch.dtype  # norms, softmax, loss, rotary tables

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a copy of the weights instead of the weights."""
        return self.state != self.compute


POLICIES = {
    "fp32": Policy(
        name="fp32", compute=torch.float32, grad=torch.float32, state=torch.float32, sensitive=torch.float32
    ),
    "fp64": Policy(
        name="fp64", compute=torch.float64, grad=torch.float64, state=torch.float64, sensitive=torch.float64
    ),
    "bf16": Policy(
        name="bf16", compute=torch.bfloat16, grad=torch.float32, state=torch.float32, sensitive=torch.float32
    ),
}
