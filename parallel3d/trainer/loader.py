"""Loads micro-batches for first stages: reads the lanes of their slots, and keeps the new cursors.

In training a slot is a lane. In evaluation a slot is the number of a fixed sequence: sequences are distributed over as
many lanes as the validation text can feed, each read from its start, so that every evaluation sees the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from parallel3d.data.lanes import Lanes
from parallel3d.data.marked_text import IGNORED, split_targets
from parallel3d.data.reader import LaneCursor, Reader, ReadResult
from parallel3d.layers.document_marks import document_lengths
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.parallel.staged_group import to_device
from parallel3d.pipeline.executor import LoadedMicroBatch


class LaneLoader:
    """Loads micro-batches from given cursors; `next_cursors` holds the cursors after the loaded tokens, by slot.

    `eos_id` is the token that ends documents, if attention keeps them apart. A lane advances by `read_length` tokens
    each time, and the micro-batch takes as many of them as its sequences are long; None: it advances by just those.
    `num_masked` counts targets without a loss, by slot.
    """

    def __init__(
        self, reader: Reader, device: torch.device, eos_id: int | None = None, *, read_length: int | None = None
    ):
        self._reader = reader
        self._read_length = read_length
        self._device = device
        self._eos_id = eos_id
        self._cursors: Sequence[LaneCursor] = ()
        self._tokens_read = 0
        self.next_cursors: dict[int, LaneCursor] = {}
        self.num_masked: dict[int, int] = {}

    def begin(self, cursors: Sequence[LaneCursor], tokens_read: int) -> None:
        """Sets the cursors before this iteration, and the number of tokens that all lanes have consumed."""
        self._cursors = cursors
        self._tokens_read = tokens_read
        self.next_cursors = {}
        self.num_masked = {}

    def load(self, micro_batch: MicroBatch) -> LoadedMicroBatch:
        """Inputs and targets, (slots x sequence length,) each, and the document lengths."""
        rows, length = [], micro_batch.sequence_length
        for slot in micro_batch.slots:
            moves_by = self._read_length or length
            cursor = self._reader.cursor_at(self._cursors[slot], self._tokens_read + slot * moves_by)
            row, self.next_cursors[slot] = self._reader.read(slot, cursor, moves_by)
            rows.append(row[: length + 1])
        tokens = np.stack(rows).astype(np.int64)
        if micro_batch.masks_targets:
            return self._load_masked(micro_batch, tokens)
        documents = None if self._eos_id is None else document_lengths(tokens[:, :-1], self._eos_id)
        whole = to_device(torch.from_numpy(tokens), self._device)
        return LoadedMicroBatch(whole[:, :-1].reshape(-1), whole[:, 1:].reshape(-1), documents)

    def _load_masked(self, micro_batch: MicroBatch, stored: np.ndarray) -> LoadedMicroBatch:
        inputs, targets = split_targets(stored)
        self.num_masked.update(zip(micro_batch.slots, np.count_nonzero(targets == IGNORED, axis=1).tolist()))
        documents = None if self._eos_id is None else document_lengths(inputs, self._eos_id)
        both = to_device(torch.from_numpy(np.stack((inputs, targets))), self._device)
        return LoadedMicroBatch(both[0].reshape(-1), both[1].reshape(-1), documents)


class EvaluationSequences(Reader):
    """A reader whose "lane" is the number of a sequence; it ignores cursors and keeps what it has read."""

    def __init__(self, lanes: Lanes):
        self._lanes = lanes
        self._ends: dict[tuple[int, int], list[LaneCursor]] = {}
        self._kept: dict[tuple[int, int], np.ndarray] = {}

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> ReadResult:
        """Sequence number `lane`, int32 (num_tokens + 1,), and the cursor unchanged."""
        if (lane, num_tokens) not in self._kept:
            base_lane, row = lane % self._lanes.num_lanes, lane // self._lanes.num_lanes
            ends = self._ends.setdefault((base_lane, num_tokens), [self._lanes.start(base_lane)])
            while len(ends) <= row:
                ends.append(self._lanes.read(base_lane, ends[-1], num_tokens)[1])
            self._kept[lane, num_tokens] = self._lanes.read(base_lane, ends[row], num_tokens)[0]
        return self._kept[lane, num_tokens], cursor
