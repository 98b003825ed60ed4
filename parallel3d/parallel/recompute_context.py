"""Runs or replays a layer's costly operations: matrix products with their collectives, and attention.

A layer that is recomputed runs twice. The results of its products can be saved in the first run and returned in the
second, so that neither the product nor its collectives are repeated. There is one `SavedProducts` per micro-batch and
layer; the second run consumes it. So are those of attention in blocks. SDPA, whose backward pass is torch's own, runs
inside a context that does the same for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

ProductFn = Callable[[], Tensor]
"""A product and its collectives. Its result must not be written to while `keeps_products`."""

ContextPair = tuple[AbstractContextManager[object], AbstractContextManager[object]]
"""Contexts for a layer's first run and for its second."""


class SavedProducts:
    """The results of the products of one run of a layer, in order; None for each if they are not kept.

    The last one is never kept and never recomputed, unless `reads_last`. Only a sum, a bias or dropout may follow it,
    whose backward passes don't need its value. NaNs replace it, so that a layer that breaks this rule shows it.
    """

    def __init__(self, *, keeps: bool, reads_last: bool = False, attention: ContextPair | None = None):
        self._keeps = keeps
        self._reads_last = reads_last
        self._attention = attention or (nullcontext(), nullcontext())
        self._results: deque[Tensor | None] = deque()
        self._last: Tensor | None = None
        self._is_whole = False

    @property
    def keeps(self) -> bool:
        """Whether the results are kept for the second run."""
        return self._keeps

    def run(self, product: ProductFn) -> Tensor:
        """Returns the product, or its saved result."""
        if self._is_whole:
            kept = self._results.popleft()
            return product() if kept is None else kept
        result = product()
        if self._last is not None:
            self._results.append(self._last if self._keeps else None)
        self._last = result.detach()  # the same memory without autograd's history
        return result

    def attention(self) -> AbstractContextManager[object]:
        return self._attention[self._is_whole]

    def close(self) -> None:
        """Ends the first run."""
        if self._last is not None and self._reads_last:
            self._results.append(self._last if self._keeps else None)
        elif self._last is not None:
            self._results.append(self._last.new_full((), float("nan")).expand(self._last.shape))
        self._last, self._is_whole = None, True


class RecomputeContext:
    """Runs the operations of one rank's layers, through a layer's `SavedProducts` while it is recomputed."""

    def __init__(self) -> None:
        self._saved: SavedProducts | None = None

    def run(self, product: ProductFn) -> Tensor:
        return product() if self._saved is None else self._saved.run(product)

    @property
    def is_active(self) -> bool:
        """Whether the layer that runs is one that runs twice."""
        return self._saved is not None

    @property
    def keeps_products(self) -> bool:
        """Whether results of products are kept for a second run; if not, who called `run` may overwrite its own."""
        return self._saved is not None and self._saved.keeps

    def attention(self) -> AbstractContextManager[object]:
        """Returns the context in which attention runs."""
        return nullcontext() if self._saved is None else self._saved.attention()

    @contextmanager
    def first_pass(self, saved: SavedProducts) -> Iterator[None]:
        """Wraps a layer's first run, which fills `saved`."""
        with self.recompute_pass(saved):
            yield
        saved.close()

    @contextmanager
    def recompute_pass(self, saved: SavedProducts) -> Iterator[None]:
        """Wraps a layer's second run, which consumes `saved`."""
        assert self._saved is None, "a layer runs within another"
        self._saved = saved
        try:
            yield
        finally:
            self._saved = None
