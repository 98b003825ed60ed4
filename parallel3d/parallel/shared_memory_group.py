"""A group of processes of one host that exchange through memory they share (shared_memory.py).

A tensor moves in chunks. A call copies as many of them into this rank's slots as are free and returns; `wait` reads the
peers' slots, sums them in rank order and writes the rest. Nothing happens in between, on no thread. So between a call
and its wait a rank must not wait for anything that a peer does after *its* wait. Layers that sum over their
tensor-parallel group only compute there. A rank waits for reduced gradients once it has received and sent all of an
iteration, and for gathered weights right after the update, since nothing would be won by waiting later. With several
stages that would be a deadlock, too: a replica's first forward pass may wait for another stage, which waits for weights
that the replica has not written yet. So do the ranks of a tied embedding, in two stages: these take gloo.

Every rank reads all versions of what it needs, in the order of the ranks, and adds them to the same bits as ranks
that are threads. It writes to its own tensors only in a call or a wait, so that nothing is busy after an abort, and a
peer that dies leaves only a wait behind, which the abort ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.errors import GenerationEnded
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.exchange_loops import add, copy_for_peers, has_exchange_loops
from parallel3d.parallel.group import Group, Work
from parallel3d.parallel.shared_memory import NUM_SLOTS, SLOT_BYTES, SharedCounter, SharedMemory, WaitEnd, WaitSwitch

SPIN_S = 0.5e-3
"""Waking a sleeping core takes some 0.05 ms. Spinning yields the core to other ranks that want it."""

Combine = Callable[..., Tensor]
"""Writes what two versions combine to into `out`: add or torch.maximum."""


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """A collective, as the two things that it does with each of its chunks."""

    dtype: torch.dtype
    num_chunks: int
    write: Callable[[int, Tensor], None]
    """Fills this rank's slot with the chunk of this number."""
    read: Callable[[int, Sequence[Tensor]], None]
    """Takes what it needs from all ranks' slots."""


class SharedMemoryGroup(Group):
    """Ranks that are processes of one host, with tensors on CPUs."""

    runs_in_background = False
    reduces_parts = True

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        ranks: tuple[int, ...],
        memory: SharedMemory,
        token: AbortToken,
        timeout_s: float,
    ):
        super().__init__(name=name, rank=rank, ranks=ranks)
        self.token = token
        self.timeout_s = timeout_s
        has_exchange_loops()  # they are compiled now, not in the first exchange
        self._memory = memory
        self._built_as = name
        self._pending: deque[_SharedWork] = deque()
        self._num_posted = self._num_finished = 0
        self._num_written = self._num_read = 0
        """Chunks since the group was built."""
        self._unwritten: deque[tuple[_Exchange, int]] = deque()
        self._renewing = threading.Lock()
        self._switch = WaitSwitch(memory)
        token.on_abort(self._switch.abort)

    def all_reduce_async(self, tensor: Tensor) -> Work:
        return self._post(self._reduction(tensor, add))

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        self._post(self._reduction(tensor, torch.maximum)).wait()  # bounded: by token and timeout
        return tensor

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._post(self._part_exchange({self.rank: output}, tensor, set(range(self.size)) - {self.rank}))

    def reduce_parts_async(self, outputs: Mapping[int, Tensor], tensor: Tensor) -> Work:
        return self._post(self._part_exchange(outputs, tensor, range(self.size)))

    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        own, whole = _flat(tensor), _flat(output).view(self.size, -1)
        step = SLOT_BYTES // own.element_size()

        def read(chunk: int, slots: Sequence[Tensor]) -> None:
            targets = whole[:, chunk * step : (chunk + 1) * step]
            for rank in set(range(self.size)) - {self.rank}:
                targets[rank].copy_(slots[rank][: targets.shape[1]])
            if targets[self.rank].data_ptr() != own[chunk * step :].data_ptr():  # not a view of the output
                targets[self.rank].copy_(own[chunk * step : (chunk + 1) * step])

        return self._post(_whole_exchange(own, step, read))

    @property
    def state(self) -> str:
        # Between two collectives the slots hold nothing that a rank still needs.
        if self._num_posted != self._num_finished:
            return ""
        return f"{self._built_as}: {self._num_finished} exchanges in shared memory"

    def renew(self, name: str, token: AbortToken) -> None:
        with self._renewing:  # an attempt that is over can't come after the next one
            token.check()
            self.token.remove_callback(self._switch.abort)
            self.name, self.token, self._switch = name, token, WaitSwitch(self._memory)
            token.on_abort(self._switch.abort)

    def close(self) -> None:
        self.token.remove_callback(self._switch.abort)
        self._pending.clear()  # they refer to the group, and so would keep its memory
        self._unwritten.clear()

    def finish(self, work: _SharedWork) -> None:
        """Finishes the collectives up to `work`, in the order in which they were posted."""
        self.token.check()
        while not work.is_done:
            first = self._pending[0]
            for chunk in range(first.num_read, first.exchange.num_chunks):
                self._read(first.exchange, chunk)
                first.num_read += 1
            first.is_done = True
            self._num_finished += 1
            self._pending.popleft()

    def _reduction(self, tensor: Tensor, combine: Combine) -> _Exchange:
        flat = _flat(tensor)
        step = SLOT_BYTES // flat.element_size()

        def read(chunk: int, slots: Sequence[Tensor]) -> None:
            target = flat[chunk * step : (chunk + 1) * step]
            versions = [slot[: len(target)] for slot in slots]
            if self.rank < 2:  # the own one is still in the target when it is read, and nearer
                versions[self.rank] = target
            _combine(target, versions, combine)

        return _whole_exchange(flat, step, read)

    def _part_exchange(self, outputs: Mapping[int, Tensor], tensor: Tensor, offered: Collection[int]) -> _Exchange:
        """Reduces the parts of `outputs`; peers may ask for the parts `offered`."""
        parts, outs = _flat(tensor).view(self.size, -1), {number: _flat(out) for number, out in outputs.items()}
        step = SLOT_BYTES // parts.element_size() // self.size

        def write(chunk: int, slot: Tensor) -> None:
            some = parts[:, chunk * step : (chunk + 1) * step]
            places = slot[: some.numel()].view_as(some)
            for number in offered:
                copy_for_peers(places[number], some[number])

        def read(chunk: int, slots: Sequence[Tensor]) -> None:
            for number, out in outs.items():
                target = out[chunk * step : (chunk + 1) * step]
                place = slice(number * len(target), (number + 1) * len(target))
                versions = [slot[place] for slot in slots]
                versions[self.rank] = parts[number, chunk * step : (chunk + 1) * step]
                _combine(target, versions, add)

        return _Exchange(dtype=parts.dtype, num_chunks=-(-parts.shape[1] // step), write=write, read=read)

    def _post(self, exchange: _Exchange) -> Work:
        self.token.check()
        work = _SharedWork(self, exchange)
        self._num_posted += 1
        self._pending.append(work)
        self._unwritten.extend((exchange, chunk) for chunk in range(exchange.num_chunks))
        self._write_ahead()
        return work

    def _write_ahead(self) -> None:
        """Writes the next chunks to the slots that all ranks have read."""
        while (
            self._unwritten and self._memory.wait(SharedCounter.READ, self._reads_needed, self._switch) is WaitEnd.READY
        ):
            exchange, chunk = self._unwritten.popleft()
            exchange.write(chunk, self._memory.slot(self.rank, self._num_written, exchange.dtype))
            self._num_written += 1
            self._memory.publish(SharedCounter.WRITTEN, self._num_written)

    @property
    def _reads_needed(self) -> int:
        """The chunks that all must have read before the next one can be written."""
        return max(0, self._num_written + 1 - NUM_SLOTS)

    def _read(self, exchange: _Exchange, chunk: int) -> None:
        """Reads a chunk of all ranks, and writes those before it, and it, if they are not written yet."""
        while self._num_written <= self._num_read:
            self._await(SharedCounter.READ, self._reads_needed)
            self._write_ahead()
        self._await(SharedCounter.WRITTEN, self._num_read + 1)
        exchange.read(chunk, [self._memory.slot(rank, self._num_read, exchange.dtype) for rank in range(self.size)])
        self._num_read += 1
        self._memory.publish(SharedCounter.READ, self._num_read)
        self._write_ahead()

    def _await(self, counter: SharedCounter, at_least: int) -> None:
        outcome = self._memory.wait(counter, at_least, self._switch, spin_s=SPIN_S, limit_s=SPIN_S)
        if outcome is WaitEnd.LATE:
            with self.token.waiting(self.name, self.ranks):
                outcome = self._memory.wait(counter, at_least, self._switch, limit_s=self.timeout_s)
        self.token.check()
        if outcome is WaitEnd.LATE:
            raise GenerationEnded(f"group {self.name}: no answer from a peer in {self.timeout_s:.0f} s")


class _SharedWork:
    """A collective under way."""

    def __init__(self, group: SharedMemoryGroup, exchange: _Exchange):
        self._group = group
        self.exchange = exchange
        self.num_read = 0
        self.is_done = False

    def wait(self) -> None:
        self._group.finish(self)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def _whole_exchange(own: Tensor, step: int, read: Callable[[int, Sequence[Tensor]], None]) -> _Exchange:
    """An exchange in which each rank offers all of a flat tensor, `step` elements a chunk."""

    def write(chunk: int, slot: Tensor) -> None:
        some = own[chunk * step : (chunk + 1) * step]
        copy_for_peers(slot[: len(some)], some)

    return _Exchange(dtype=own.dtype, num_chunks=-(-len(own) // step), write=write, read=read)


def _combine(target: Tensor, versions: Sequence[Tensor], combine: Combine) -> None:
    """Combines the ranks' versions in their order."""
    first, second, *others = versions
    combine(first, second, out=target)
    for version in others:
        combine(target, version, out=target)
