"""Scores rows on one rank: the loop that all ranks of a model's copy run, stage after stage.

All ranks know the rows; only activations travel, and only the last stage has scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from parallel3d.data.marked_text import IGNORED, split_targets
from parallel3d.decoding.rank_decoder import ModelStage, PipelinePlace
from parallel3d.evaluation.rows import RowScore, ScoredRow, fill_up
from parallel3d.layers.document_marks import document_lengths
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.parallel.p2p_messages import Header, Kind


class RankScorer:
    """Runs batches of rows through one rank's layers.

    `document_end`: the token that ends documents, where attention keeps them apart. `on_batch` hears the number of
    targets of each batch that is done.
    """

    def __init__(
        self,
        stage: ModelStage,
        place: PipelinePlace,
        *,
        document_end: int | None = None,
        on_batch: Callable[[int], None] | None = None,
    ):
        self.stage, self.place, self.document_end = stage, place, document_end
        self.on_batch = on_batch or (lambda num_targets: None)

    @torch.inference_mode()
    def run(self, batches: Sequence[Sequence[ScoredRow]]) -> list[RowScore]:
        """The scores of the rows of all batches, one after the other; empty except on the last stage."""
        scores: list[RowScore] = []
        for number, batch in enumerate(batches, start=1):
            found = self._run_batch(number, batch)
            scores += found
            self.on_batch(sum(score.num_targets for score in found))
        return scores

    def _run_batch(self, number: int, rows: Sequence[ScoredRow]) -> list[RowScore]:
        place = self.place
        inputs, targets = split_targets(fill_up(rows))
        micro_batch = MicroBatch(
            seed=0, iteration=0, slots=tuple(range(len(rows))), sequence_length=inputs.shape[1], training=False
        )
        if self.document_end is not None:
            micro_batch = replace(micro_batch, documents=document_lengths(inputs, self.document_end))
        header = Header(
            generation=0,
            iteration=number,
            kind=Kind.ACTIVATION,
            micro_batch=0,
            shape=(inputs.size, place.hidden_size),
            dtype=place.dtype,
        )
        if place.is_first:
            x = torch.from_numpy(inputs.astype(np.int64).reshape(-1)).to(place.device)
        else:
            x = place.links.receive(place.ranks[place.stage - 1], header).to(place.device)
        if not place.is_last:
            place.links.send(place.ranks[place.stage + 1], header, self.stage(x, micro_batch))
            return []
        logits = self.stage.logits(x, micro_batch, slice(None))
        return score_targets(logits, torch.from_numpy(targets.astype(np.int64)).to(place.device))


def score_targets(logits: Tensor, targets: Tensor) -> list[RowScore]:
    """logits (rows x length, vocab) and targets (rows, length), of which negative ones don't count, by row."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = targets != IGNORED
    chosen = targets.clamp(min=0).view(-1, 1)
    log_probs = logits.gather(1, chosen).squeeze(1).double() - logits.logsumexp(-1).double()
    is_likeliest = (logits.argmax(-1) == chosen.squeeze(1)).view_as(targets) | ~counts
    sums = torch.where(counts, log_probs.view_as(targets), 0.0).sum(1)
    columns = (sums.tolist(), counts.sum(1).tolist(), is_likeliest.all(1).tolist())
    return [
        RowScore(log_prob=log_prob, num_targets=num_targets, is_greedy=is_greedy)
        for log_prob, num_targets, is_greedy in zip(*columns)
    ]
