"""The random bits that round an update: a function of (seed, iteration, parameter name, global element index).

Not of the rank, the range, the bucket or the block: owner and backup round alike, ranks that hold the same norm weight
keep it the same, an update that is made again after a loss, or on another layout, gives the same bits. One word of 64
bits serves all that is stored of an element, 16 bits each: weight, first moment, second moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.layers.global_index import global_index
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.optim.adamw import Noise
from parallel3d.optim.buckets import BucketPlan
from parallel3d.random_keys import Key, bits, key_of


@dataclass(frozen=True, kw_only=True)
class UpdateNoise:
    """The noise of one rank's parameters; `tp_rank` says which elements those are, and nothing else."""

    seed: int
    tp_rank: int
    tp_size: int

    def key(self, iteration: int, name: str) -> Key:
        return key_of("update", self.seed, iteration, name)

    def of_range(self, plan: BucketPlan, parameters: Sequence[ShardedParameter], iteration: int, offset: int) -> Noise:
        """The noise of a range that begins at element `offset` of the bucket; between parameters it is zero."""

        def words(span: range) -> Tensor:
            return self._words(plan, parameters, iteration, range(offset + span.start, offset + span.stop))

        return words

    def _words(self, plan: BucketPlan, parameters: Sequence[ShardedParameter], iteration: int, span: range) -> Tensor:
        words = torch.zeros(len(span), dtype=torch.int64, device=parameters[0].device)
        for parameter, place in zip(parameters, plan.places):
            start, stop = max(place.offset, span.start), min(place.offset + place.length, span.stop)
            if start < stop:
                index = global_index(
                    parameter.sharding,
                    range(start - place.offset, stop - place.offset),
                    tp_rank=self.tp_rank,
                    tp_size=self.tp_size,
                    device=words.device,
                )
                words[start - span.start : stop - span.start] = bits(self.key(iteration, place.name), index)
        return words
