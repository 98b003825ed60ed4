"""Lanes of conversations: each begins and ends in one sequence.

    lane 0     [conversation 7] EOS [conversation 0] EOS  fill fill     [conversation 8, longer than a sequence, cut
               |------------------ one sequence -----------------|     |------------------ the next one -----------|

A conversation that does not fit into what is left of a sequence opens the next one: its replies would be trained
without their prompts otherwise. What a sequence has left is filled with tokens that are not targets, and that no
target sees. Of a conversation that is longer than a whole sequence the end is left out.

Unpacked, a sequence has one conversation and needs no document mask: no target is among or after what fills it up.

A cursor always stands at the beginning of a conversation.
"""

from __future__ import annotations

import numpy as np

from parallel3d.data.documents import TokenDocuments
from parallel3d.data.lanes import Cursor, Lanes
from parallel3d.data.reader import LaneCursor


class ConversationLanes(Lanes):
    """The lanes of one set of conversations."""

    def __init__(self, documents: TokenDocuments, seed: int, num_lanes: int, *, packs: bool = True):
        super().__init__(documents, seed, num_lanes)
        self._packs = packs

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> tuple[np.ndarray, Cursor]:
        """Returns tokens, int32 (num_tokens + 1,), ~id where one is not a target, and the cursor after them."""
        filler = 1 if self._documents.eos_id == 0 else 0
        row = np.full(num_tokens + 1, ~filler, np.int32)
        position, used = Cursor(*cursor), 0
        while used < num_tokens and (self._packs or not used):  # a target needs an input before it
            sequence = self._sequence(lane, position.epoch)
            tokens = self._tokens(lane, Cursor(position.epoch, position.document, 0), sequence)[: num_tokens + 1]
            if used + len(tokens) > num_tokens + 1:
                break
            row[used : used + len(tokens)] = tokens
            if row[used] >= 0:
                row[used] = ~row[used]  # nothing comes before it but another conversation
            used += len(tokens)
            ends = position.document + 1 == len(sequence)
            position = Cursor(position.epoch + 1, 0, 0) if ends else Cursor(position.epoch, position.document + 1, 0)
        return row, position
