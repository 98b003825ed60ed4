"""Collectives among ranks that are threads. Sums run in rank order, so that results never depend on timing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel3d.inprocess.scheduler import ThreadScheduler
from parallel3d.parallel.group import Group, Work


@dataclass
class Collective:
    """One call of a group, joined by its members one after the other."""

    operation: str
    tensors: dict[int, Tensor] = field(default_factory=dict)
    result: Tensor | None = None
    num_read: int = 0


class ThreadGroup(Group):
    """A group of threads; `collectives` are the calls under way, shared by all ranks, by (group, number)."""

    def __init__(
        self,
        scheduler: ThreadScheduler,
        collectives: dict[tuple[str, int], Collective],
        *,
        name: str,
        rank: int,
        ranks: tuple[int, ...],
    ):
        super().__init__(name=name, rank=rank, ranks=ranks)
        self._scheduler = scheduler
        self._collectives = collectives
        self._sequence = 0

    def all_reduce_async(self, tensor: Tensor) -> Work:
        return self._post("all-reduce", tensor, _sum, lambda total: tensor.copy_(total.view_as(tensor)))

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        work = self._post("all-reduce max", tensor, _max, lambda top: tensor.copy_(top.view_as(tensor)))
        work.wait()  # bounded: by the scheduler's tokens
        return tensor

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        def consume(total: Tensor) -> None:
            output.copy_(total.view(-1).chunk(self.size)[self.rank].view_as(output))

        assert tensor.numel() == output.numel() * self.size, f"{self.name}: {tensor.shape} -> {output.shape}"
        return self._post("reduce-scatter", tensor, _sum, consume)

    def reduce_parts_async(self, outputs: Mapping[int, Tensor], tensor: Tensor) -> Work:
        """Not taken by default (`reduces_parts` is False), since most transports have none."""

        def consume(total: Tensor) -> None:
            parts = total.view(-1).chunk(self.size)
            for number, output in outputs.items():
                output.copy_(parts[number].view_as(output))

        return self._post("reduce-scatter", tensor, _sum, consume)

    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        assert output.numel() == tensor.numel() * self.size, f"{self.name}: {tensor.shape} -> {output.shape}"
        return self._post("all-gather", tensor, _concatenate, lambda whole: output.copy_(whole.view_as(output)))

    def _post(
        self,
        operation: str,
        tensor: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
        consume: Callable[[Tensor], object],
    ) -> Work:
        """Deposits a copy of this rank's tensor; the last rank to arrive combines them all."""
        me = self.ranks[self.rank]
        self._scheduler.count_call(me)
        self._sequence += 1
        key = (self.name, self._sequence)

        def leave() -> Collective:
            call = self._collectives.setdefault(key, Collective(operation))
            assert call.operation == operation, f"{self.name} call {key[1]}: {operation} meets {call.operation}"
            call.tensors[self.rank] = tensor.detach().clone()
            if len(call.tensors) == self.size:
                call.result = combine([call.tensors[r] for r in range(self.size)])
            return call

        call = self._scheduler.run_locked(leave)
        return _ThreadWork(self, key, call, consume)

    def finish(self, key: tuple[str, int], call: Collective, consume: Callable[[Tensor], object]) -> None:
        me = self.ranks[self.rank]

        def what() -> str:
            missing = [self.ranks[r] for r in range(self.size) if r not in call.tensors]
            return f"for {call.operation} {key[1]} of {self.name}, not there: ranks {missing}"

        self._scheduler.wait(me, lambda: call.result is not None, what)
        assert call.result is not None
        with torch.no_grad():
            consume(call.result)

        def leave() -> None:
            call.num_read += 1
            if call.num_read == self.size:
                del self._collectives[key]

        self._scheduler.run_locked(leave)


class _ThreadWork:
    """A posted collective; only the first wait has an effect."""

    def __init__(
        self, group: ThreadGroup, key: tuple[str, int], call: Collective, consume: Callable[[Tensor], object]
    ) -> None:
        self._finish: Callable[[], None] | None = lambda: group.finish(key, call, consume)

    def wait(self) -> None:
        if self._finish is not None:
            self._finish()
            self._finish = None


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _max(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).amax(0)


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
