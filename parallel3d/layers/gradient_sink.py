"""Where a layer's backward pass puts the gradients of its parameters.

Each parameter has one sink, which the optimizer's bucket gives it once, when the rank is built::

    layer's backward  ->  sink.add_product(grad, x)  ->  buffer += grad.T @ x   ->  on_added()
                          now, or with a split           a view of the bucket       the bucket counts, and starts its
                          backward later                                            reduction when it has all

Nothing is zeroed at the start of an iteration: the first gradient overwrites the buffer (a GEMM with beta = 0), and a
buffer that is read before it is zeroed then.

A split backward pass puts the products for the weights off (Qi et al. 2023, "Zero bubble pipeline parallelism"): a
`WeightGradStore`, which the executor shares with the sinks, runs them at once or keeps them. It is the same product of
the same tensors either way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from parallel3d.layers.gemm import Gemm

WeightGradTask = Callable[[], None]
"""Adds one micro-batch's gradient to one weight's main gradient."""


class WeightGradStore:
    """Runs the products for weights at once, or keeps them for later; shared by all parameters of a rank."""

    def __init__(self) -> None:
        self._queue: deque[WeightGradTask] | None = None

    def run(self, task: WeightGradTask) -> None:
        """Runs `task` now, or queues it within `deferred`."""
        if self._queue is None:
            task()
        else:
            self._queue.append(task)

    @contextmanager
    def deferred(self) -> Iterator[deque[WeightGradTask]]:
        """Queues the tasks of this context, in order, in the queue that it yields."""
        assert self._queue is None
        queue: deque[WeightGradTask] = deque()
        self._queue = queue
        try:
            yield queue
        finally:
            self._queue = None


@torch.no_grad()
def run_deferred(tasks: deque[WeightGradTask]) -> None:
    """Runs the tasks in order; the tensors of each product are released before the next."""
    while tasks:
        tasks.popleft()()


class GradientSink:
    """Adds one parameter's gradients up in `buffer`, of the parameter's shape, and calls `on_added` after each.

    Each module that uses the parameter adds one gradient for each micro-batch.
    """

    def __init__(
        self,
        buffer: Tensor,
        *,
        weight_grads: WeightGradStore | None = None,
        on_added: Callable[[], None] = lambda: None,
        accumulate_in_grad_dtype: bool = False,
        gemm: Gemm | None = None,
    ):
        self._buffer = buffer
        self._is_stale = False
        """Whether the buffer has the gradients of an earlier iteration."""
        self.on_added = on_added
        self.accumulate_in_grad_dtype = accumulate_in_grad_dtype
        """Whether products are computed in the buffer's format, not rounded to that of their factors first."""
        self._weight_grads = weight_grads or WeightGradStore()
        self._gemm = gemm or Gemm()

    @staticmethod
    def with_own_buffer(
        weight: Tensor,
        *,
        weight_grads: WeightGradStore | None = None,
        on_added: Callable[[], None] = lambda: None,
        gemm: Gemm | None = None,
    ) -> GradientSink:
        """Returns a sink with a buffer of its own, in fp32 or wider, for a `weight` that is in no bucket."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        buffer = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        return GradientSink(buffer, weight_grads=weight_grads, on_added=on_added, gemm=gemm)

    @property
    def buffer(self) -> Tensor:
        """The main gradient, in the optimizer's gradient format (bf16, fp32 or wider)."""
        if self._take_stale():
            self._buffer.zero_()
        return self._buffer

    @property
    def dtype(self) -> torch.dtype:
        """The main gradient's format."""
        return self._buffer.dtype

    def rebind(self, buffer: Tensor) -> None:
        """Moves to another buffer, which has the same content, or zeros."""
        self._buffer = buffer

    def clear(self) -> None:
        """Starts an iteration: what was added is forgotten."""
        self._is_stale = True

    def _take_stale(self) -> bool:
        """Whether the buffer is stale, which the caller will end."""
        is_stale, self._is_stale = self._is_stale, False
        return is_stale

    def add(self, grad: Tensor) -> None:
        """buffer += grad."""
        if self._take_stale():
            self._buffer.copy_(grad)
        else:
            self._buffer.add_(grad)
        self.on_added()

    def add_product(self, grad: Tensor, x: Tensor) -> None:
        """buffer += grad.T @ x for grad (tokens, out), x (tokens, in): one GEMM with beta = 1, or 0 for the
        first, without a temporary of the weight's size; now, or with a split backward later."""

        def add() -> None:
            wide, overwrite = self.accumulate_in_grad_dtype, self._take_stale()
            self._gemm.add_weight_grad(self._buffer, grad, x, wide=wide, overwrite=overwrite)
            self.on_added()

        self.run_or_defer(add)

    def run_or_defer(self, task: WeightGradTask) -> None:
        """Runs a task that adds a gradient: now, or with a split backward later."""
        self._weight_grads.run(task)
