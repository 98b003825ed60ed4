"""Numbers that a device has computed, all of which reach the host in one copy: one wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from parallel3d.parallel.staged_group import HostCopy


class HostNumbers:
    """Numbers of one iteration. First all are added, then they are read."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._values: list[float] | None = None

    def add(self, tensor: Tensor) -> Callable[[], list[float]]:
        """Adds the numbers in `tensor`, of any shape and float format; the function returns them after `read`."""
        self._tensors.append(tensor.detach().reshape(-1).double())
        stop = sum(len(each) for each in self._tensors)

        def values() -> list[float]:
            assert self._values is not None, "numbers are asked for before they were read"
            return self._values[stop - tensor.numel() : stop]

        return values

    def add_all(self, numbers: Iterable[Tensor]) -> Callable[[], list[float]]:
        """Adds single numbers."""
        tensors = list(numbers)
        return self.add(torch.stack(tensors) if tensors else torch.zeros(0))

    def read(self) -> None:
        """Waits for the numbers, if there are any."""
        parts = [each for each in self._tensors if len(each)]
        self._values = HostCopy(torch.cat(parts)).read().tolist() if parts else []
