"""Feeds a first stage: reads the lanes of a micro-batch's slots, and notes where they now stand.

Training slots are lanes. Evaluation slots are the numbers of fixed sequences: they are dealt over as many lanes as the
validation text can feed, each lane read from its start, so that every evaluation of a run sees the same tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from parallel3d.data.lanes import Lanes
from parallel3d.data.reader import LaneCursor, Reader, ReadResult
from parallel3d.layers.documents import document_lengths
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.parallel.staged_group import to_device
from parallel3d.pipeline.executor import LoadedMicroBatch


class LaneLoader:
    """Loads micro-batches from given cursors; `advanced` are the cursors after what was loaded, by slot.

    `eos_id` is the token at which documents end, where attention keeps them apart. A lane moves on by `read_length`
    tokens each time, of which the micro-batch takes as many as its sequences are long; None: by just those.
    """

    def __init__(
        self, reader: Reader, device: torch.device, eos_id: int | None = None, *, read_length: int | None = None
    ):
        self._reader = reader
        self._read_length = read_length
        self._device = device
        self._eos_id = eos_id
        self._cursors: tuple[LaneCursor, ...] = ()
        self._tokens_read = 0
        self.next_cursors: dict[int, LaneCursor] = {}

    def begin(self, cursors: tuple[LaneCursor, ...], tokens_read: int) -> None:
        """Sets where the lanes stand before this iteration, and how many tokens of all lanes lie behind."""
        self._cursors = cursors
        self._tokens_read = tokens_read
        self.next_cursors = {}

    def load(self, micro_batch: MicroBatch) -> LoadedMicroBatch:
        rows, length = [], micro_batch.sequence_length
        for slot in micro_batch.slots:
            moves_by = self._read_length or length
            cursor = self._reader.cursor_at(self._cursors[slot], self._tokens_read + slot * moves_by)
            row, self.next_cursors[slot] = self._reader.read(slot, cursor, moves_by)
            rows.append(row[: length + 1])
        tokens = np.stack(rows).astype(np.int64)
        documents = None if self._eos_id is None else document_lengths(tokens[:, :-1], self._eos_id)
        whole = to_device(torch.from_numpy(tokens), self._device)
        return LoadedMicroBatch(whole[:, :-1].reshape(-1), whole[:, 1:].reshape(-1), documents)


class EvaluationSequences(Reader):
    """A reader whose "lane" is the number of a sequence; cursors play no part. What was read once is kept."""

    def __init__(self, lanes: Lanes):
        self._lanes = lanes
        self._ends: dict[tuple[int, int], list[LaneCursor]] = {}
        self._kept: dict[tuple[int, int], np.ndarray] = {}

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> ReadResult:
        """Sequence number `lane`, int32 (num_tokens + 1,); the cursor comes back as it was."""
        if (lane, num_tokens) not in self._kept:
            base_lane, row = lane % self._lanes.num_lanes, lane // self._lanes.num_lanes
            ends = self._ends.setdefault((base_lane, num_tokens), [self._lanes.start(base_lane)])
            while len(ends) <= row:
                ends.append(self._lanes.read(base_lane, ends[-1], num_tokens)[1])
            self._kept[lane, num_tokens] = self._lanes.read(base_lane, ends[row], num_tokens)[0]
        return self._kept[lane, num_tokens], cursor
