"""Measures the memory of the tensors created within a `with` block: current and peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that operators create on this thread, each storage once, on any device.

    Temporary memory of a kernel is not counted. It slows the host down.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        """Bytes created within the block that are still alive."""
        self.peak = 0
        self._tracked: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._track(tensor.untyped_storage(), 0)  # an unknown input was created outside of the block
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._track(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return result

    def _track(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        if storage._cdata in self._tracked:
            return
        self._tracked.add(storage._cdata)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._untrack, storage._cdata, num_bytes)

    def _untrack(self, key: int, num_bytes: int) -> None:
        self._tracked.discard(key)
        self.live -= num_bytes


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
