"""A parameter that knows its global identity and where its gradient is added up.

`main_grad` is a view into a flat bucket of the optimizer's format (fp32 or wider). Layers add their weight gradients
straight into it (for a matrix: one GEMM with beta = 1, no temporary of the weight's size) and then call `grad_added`,
which tells the bucket. A parameter without a bucket gets its `main_grad` on first use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from parallel3d.layers.gemm import add_matmul
from parallel3d.sharding import ParamSharding


class ShardedParameter(nn.Parameter):
    """This rank's share (shape: `sharding.local_shape(tp_size)`) of a global parameter."""

    sharding: ParamSharding
    main_grad: Tensor | None
    on_grad: Callable[[], None] | None

    def __new__(
        cls, sharding: ParamSharding, *, tp_size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> ShardedParameter:
        data = torch.empty(sharding.local_shape(tp_size), dtype=dtype, device=device)
        self = nn.Parameter.__new__(cls, data, True)
        self.sharding = sharding
        self.main_grad = None
        self.on_grad = None
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def grad_buffer(self) -> Tensor:
        """Where gradients are added up; made on first use when no bucket gave one."""
        if self.main_grad is None:
            wide = torch.promote_types(self.dtype, torch.float32)
            self.main_grad = torch.zeros(self.shape, dtype=wide, device=self.device)
        return self.main_grad

    def grad_added(self) -> None:
        """To be called once in each backward pass, after this parameter's gradient was added."""
        if self.on_grad is not None:
            self.on_grad()


def add_matrix_grad(weight: ShardedParameter, grad: Tensor, x: Tensor) -> None:
    """weight.main_grad += grad.T @ x for grad (tokens, out), x (tokens, in)."""
    add_matmul(weight.grad_buffer(), grad.t(), x)
    weight.grad_added()


def parameters_of(module: nn.Module) -> list[ShardedParameter]:
    """All parameters of a module in definition order; every one must be sharded explicitly."""
    parameters = list(module.parameters())
    assert all(isinstance(parameter, ShardedParameter) for parameter in parameters)
    return parameters  # type: ignore[return-value]
