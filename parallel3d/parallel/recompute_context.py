"""A layer's costly operations run, or replayed: matrix products with the collectives that belong to them, attention.

A layer that will be recomputed runs twice. What its products gave the first time can be kept, and given back the second
time, so that neither the product nor its collectives happen again. A record is made of the first run, one for each
micro-batch of each layer; the second run uses it up. Attention, whose backward pass is torch's own, runs inside of a
context that does the same for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

ProductFn = Callable[[], Tensor]
"""A product and its collectives. Nobody may write into what it gives."""

ContextPair = tuple[AbstractContextManager[object], AbstractContextManager[object]]
"""For a layer's first run, and for its second."""


class SavedProducts:
    """What the products of one run of a layer gave, in order; if they are not kept, only that they were.

    The last one is never kept and never computed again. After it come a sum, a bias, dropout at most: nothing of that
    needs its value for a backward pass. In its place stand NaNs, so that a layer of which that is not true shows it.
    """

    def __init__(self, *, keeps: bool, attention: ContextPair | None = None):
        self._keeps = keeps
        self._attention = attention or (nullcontext(), nullcontext())
        self._results: deque[Tensor | None] = deque()
        self._last: Tensor | None = None
        self._is_whole = False

    def run(self, product: ProductFn) -> Tensor:
        """The product, or what is kept of it."""
        if self._is_whole:
            kept = self._results.popleft()
            return product() if kept is None else kept
        result = product()
        if self._last is not None:
            self._results.append(self._last if self._keeps else None)
        self._last = result.detach()  # the same memory, but without the history that autograd hangs on the result
        return result

    def attention(self) -> AbstractContextManager[object]:
        return self._attention[self._is_whole]

    def close(self) -> None:
        """The first run is over."""
        if self._last is not None:
            self._results.append(self._last.new_full((), float("nan")).expand(self._last.shape))
        self._last, self._is_whole = None, True


class RecomputeContext:
    """Runs what one rank's layers ask for, or has a record run it."""

    def __init__(self) -> None:
        self._saved: SavedProducts | None = None

    def run(self, product: ProductFn) -> Tensor:
        return product() if self._saved is None else self._saved.run(product)

    def attention(self) -> AbstractContextManager[object]:
        """The context in which attention runs."""
        return nullcontext() if self._saved is None else self._saved.attention()

    @contextmanager
    def first_pass(self, saved: SavedProducts) -> Iterator[None]:
        """A layer's first run: afterwards the record is whole."""
        with self.recompute_pass(saved):
            yield
        saved.close()

    @contextmanager
    def recompute_pass(self, saved: SavedProducts) -> Iterator[None]:
        """A layer's second run."""
        assert self._saved is None, "a layer runs within another"
        self._saved = saved
        try:
            yield
        finally:
            self._saved = None
