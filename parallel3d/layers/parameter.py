"""A parameter that knows its global identity and where its gradient is added up.

`main_grad` is a view into a flat bucket of the optimizer's format (fp32 or wider). Layers add their weight gradients
straight into it (for a matrix: one GEMM with beta = 1, no temporary of the weight's size) and then call
`register_grad_ready`, which tells the bucket. A parameter without a bucket gets its `main_grad` on first use.

A split backward pass puts the products for the weights off (Qi et al. 2023, "Zero bubble pipeline parallelism"):
layers hand them to their parameter's `weight_grad_store`, which runs them at once or keeps them. It is the same product
of the same tensors either way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from parallel3d.layers.gemm import add_matmul
from parallel3d.parallel.sharding import ParamSharding

WeightGradTask = Callable[[], None]
"""Adds one micro-batch's gradient to one weight's main gradient."""


class WeightGradStore:
    """Runs the products for weights at once, or keeps them for later; shared by the parameters of one rank's stage."""

    def __init__(self) -> None:
        self._queue: deque[WeightGradTask] | None = None

    def run(self, work: WeightGradTask) -> None:
        """Now, or when whoever keeps it sees fit."""
        if self._queue is None:
            work()
        else:
            self._queue.append(work)

    @contextmanager
    def deferred(self) -> Iterator[deque[WeightGradTask]]:
        """What comes up within goes, in order, into the queue that this gives."""
        assert self._queue is None
        queue: deque[WeightGradTask] = deque()
        self._queue = queue
        try:
            yield queue
        finally:
            self._queue = None


@torch.no_grad()
def run_deferred(work: deque[WeightGradTask]) -> None:
    """Runs what was kept, in order; the tensors of each product are let go before the next."""
    while work:
        work.popleft()()


class ShardedParameter(nn.Parameter):
    """This rank's share (shape: `sharding.local_shape(tp_size)`) of a global parameter."""

    sharding: ParamSharding
    main_grad: Tensor | None
    on_grad: Callable[[], None] | None
    weight_grad_store: WeightGradStore
    accumulate_in_grad_dtype: bool
    """Whether products are added to the main gradient in its own format, not rounded to that of their factors first."""

    def __new__(
        cls, sharding: ParamSharding, *, tp_size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> ShardedParameter:
        data = torch.empty(sharding.local_shape(tp_size), dtype=dtype, device=device)
        self = nn.Parameter.__new__(cls, data, True)
        self.sharding = sharding
        self.main_grad = None
        self.on_grad = None
        self.weight_grad_store = WeightGradStore()
        self.accumulate_in_grad_dtype = False
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def grad_buffer(self) -> Tensor:
        """Where gradients are added up; made on first use when no bucket gave one."""
        if self.main_grad is None:
            wide = torch.promote_types(self.dtype, torch.float32)
            self.main_grad = torch.zeros(self.shape, dtype=wide, device=self.device)
        return self.main_grad

    def register_grad_ready(self) -> None:
        """To be called once for each micro-batch, after this parameter's gradient of it was added.

        Where several modules use the parameter, each adds its part and calls.
        """
        if self.on_grad is not None:
            self.on_grad()


def add_matrix_grad(weight: ShardedParameter, grad: Tensor, x: Tensor) -> None:
    """weight.main_grad += grad.T @ x for grad (tokens, out), x (tokens, in): now, or with a split backward later."""

    def add() -> None:
        add_matmul(weight.grad_buffer(), grad.t(), x, wide=weight.accumulate_in_grad_dtype)
        weight.register_grad_ready()

    weight.weight_grad_store.run(add)


def parameters_of(module: nn.Module) -> list[ShardedParameter]:
    """All parameters of a module in definition order; every one must be sharded explicitly."""
    parameters = list(module.parameters())
    assert all(isinstance(parameter, ShardedParameter) for parameter in parameters)
    return parameters  # type: ignore[return-value]
