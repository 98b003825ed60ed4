"""Feeds a first stage: reads the lanes of a micro-batch's slots, and notes where they now stand.

Training slots are lanes. Evaluation slots are the numbers of fixed sequences: they are dealt over as many lanes as the
validation text can feed, each lane read from its start, so that every evaluation of a run sees the same tokens.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from parallel3d.comm.staging import to_device
from parallel3d.data.lanes import Cursor, Lanes
from parallel3d.layers.micro_batch import MicroBatch


class Reader(Protocol):
    """Lanes, or a prefetcher in front of them."""

    def read(self, lane: int, cursor: Cursor, num_tokens: int) -> tuple[np.ndarray, Cursor]: ...


class LaneLoader:
    """Loads micro-batches from given cursors; `advanced` are the cursors after what was loaded, by slot."""

    def __init__(self, reader: Reader, device: torch.device):
        self._reader = reader
        self._device = device
        self._cursors: tuple[Cursor, ...] = ()
        self.advanced: dict[int, Cursor] = {}

    def begin(self, cursors: tuple[Cursor, ...]) -> None:
        """Sets where the lanes stand before this iteration."""
        self._cursors = cursors
        self.advanced = {}

    def load(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (tokens,) int64 each."""
        rows = []
        for slot in micro_batch.slots:
            tokens, self.advanced[slot] = self._reader.read(slot, self._cursors[slot], micro_batch.sequence_length)
            rows.append(tokens)
        whole = to_device(torch.from_numpy(np.stack(rows).astype(np.int64)), self._device)
        return whole[:, :-1].reshape(-1), whole[:, 1:].reshape(-1)


class EvaluationSequences:
    """A reader whose "lane" is the number of a sequence; cursors play no part. What was read once is kept."""

    def __init__(self, lanes: Lanes):
        self._lanes = lanes
        self._ends: dict[tuple[int, int], list[Cursor]] = {}
        self._kept: dict[tuple[int, int], np.ndarray] = {}

    def read(self, lane: int, cursor: Cursor, num_tokens: int) -> tuple[np.ndarray, Cursor]:
        """Sequence number `lane`, int32 (num_tokens + 1,); the cursor comes back as it was."""
        if (lane, num_tokens) not in self._kept:
            place, row = lane % self._lanes.num_lanes, lane // self._lanes.num_lanes
            ends = self._ends.setdefault((place, num_tokens), [Cursor.start()])
            while len(ends) <= row:
                ends.append(self._lanes.read(place, ends[-1], num_tokens)[1])
            self._kept[lane, num_tokens] = self._lanes.read(place, ends[row], num_tokens)[0]
        return self._kept[lane, num_tokens], cursor
