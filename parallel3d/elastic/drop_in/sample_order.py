"""Which samples a step has, who computes them, and what becomes of those of a lost worker. Pure.

    redo    a step has `batch_size` samples, in slots of at most `slot_size`. Slots of lost workers go to the others
    drop    a step has one slot for each worker. That of a lost worker is left out; its samples return in the next epoch

All workers compute the same from the same history of grids, so that no message is needed. A slot's samples depend on
(seed, epoch, place in the epoch's order), and with `redo` on nothing else: not on the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

DROPPED = -1
"""The owner of a slot that is left out."""


@dataclass(frozen=True, kw_only=True)
class SampleState:
    """The coming step, and what earlier ones have left."""

    step: int = 1
    """Its number, from 1."""
    epoch: int = 0
    offset: int = 0
    """Samples of the epoch's order that earlier steps have had."""
    size: int = 0
    """Samples of this step, with those that are left out."""
    owners: tuple[int, ...] = ()
    """The worker of each slot."""
    returned: tuple[int, ...] = ()
    """Samples that the last epoch has left out: this one has them twice."""
    dropped: tuple[int, ...] = ()
    """Samples that this epoch has left out so far."""

    def slots_of(self, worker: int) -> tuple[int, ...]:
        return tuple(slot for slot, owner in enumerate(self.owners) if owner == worker)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> SampleState:
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        return SampleState(**fields)


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The rules by which samples become steps."""

    num_samples: int
    slot_size: int
    batch_size: int | None = None
    """Samples of a step; None: one slot for each worker, and slots of lost workers are left out."""
    seed: int = 0
    shuffle: bool = True

    def begin(self, workers: Sequence[int]) -> SampleState:
        """The first step of a run."""
        return self._deal(SampleState(), workers)

    def advance(self, state: SampleState, workers: Sequence[int]) -> SampleState:
        """The step after `state`, which is committed. `workers`: those that have committed it."""
        return self._deal(replace(state, step=state.step + 1, offset=state.offset + state.size), workers)

    def change_workers(self, state: SampleState, workers: Sequence[int]) -> SampleState:
        """The same step with other workers: those that stay keep their slots, and what they have computed."""
        if self.batch_size is not None:
            return replace(state, owners=_hand_over(state.owners, workers))
        lost = [slot for slot, owner in enumerate(state.owners) if owner not in (*workers, DROPPED)]
        left_out = tuple(sample for slot in lost for sample in self.samples(state, slot))
        owners = tuple(DROPPED if slot in lost else owner for slot, owner in enumerate(state.owners))
        return replace(state, owners=owners, dropped=state.dropped + left_out)

    def samples(self, state: SampleState, slot: int) -> tuple[int, ...]:
        """The indices of a slot's samples."""
        begin, end = _bounds(state, slot)
        order = self._order(state)
        return tuple(order[state.offset + begin : state.offset + end].tolist())

    def num_samples_of(self, state: SampleState, slot: int) -> int:
        begin, end = _bounds(state, slot)
        return end - begin

    def num_used(self, state: SampleState) -> int:
        """The samples of a step without those that are left out."""
        used = [slot for slot, owner in enumerate(state.owners) if owner != DROPPED]
        return sum(self.num_samples_of(state, slot) for slot in used)

    def _deal(self, state: SampleState, workers: Sequence[int]) -> SampleState:
        left = self.num_samples + len(state.returned) - state.offset
        if left == 0:
            state = replace(state, epoch=state.epoch + 1, offset=0, returned=state.dropped, dropped=())
            left = self.num_samples + len(state.returned)
        size = min(left, self.batch_size or self.slot_size * len(workers))
        num_slots = -(-size // self.slot_size) if self.batch_size else min(size, len(workers))
        owners = tuple(workers[slot % len(workers)] for slot in range(num_slots))
        return replace(state, size=size, owners=owners)

    def _order(self, state: SampleState) -> np.ndarray[Any, np.dtype[np.int64]]:
        return _epoch_order(self.num_samples, self.seed, state.epoch, state.returned, self.shuffle)


def _bounds(state: SampleState, slot: int) -> tuple[int, int]:
    """Where a slot begins and ends in its step: slots are as equal as can be."""
    num_slots = len(state.owners)
    return slot * state.size // num_slots, (slot + 1) * state.size // num_slots


def _hand_over(owners: Sequence[int], workers: Sequence[int]) -> tuple[int, ...]:
    """Gives the slots of workers that are gone to those with the fewest."""
    counts = Counter({worker: 0 for worker in workers})
    counts.update(owner for owner in owners if owner in counts)
    new = []
    for owner in owners:
        if owner not in counts:
            owner = min(workers, key=lambda worker: (counts[worker], worker))
            counts[owner] += 1
        new.append(owner)
    return tuple(new)


@lru_cache(maxsize=2)
def _epoch_order(
    num_samples: int, seed: int, epoch: int, returned: tuple[int, ...], shuffle: bool
) -> np.ndarray[Any, np.dtype[np.int64]]:
    samples = np.concatenate([np.arange(num_samples), np.array(returned, dtype=np.int64)])
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(samples) if shuffle else samples
