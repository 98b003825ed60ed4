"""Random bits for rounding weights, optimizer states and gradients: functions of a key and the global element index.

    an update          ("update", seed, iteration, name): 16 bits each for the weight and up to three states
    a gradient added   ("accumulation", seed, iteration, first slot of its micro-batch, forward or backward, name)

They depend neither on the rank nor on the range, the bucket or the block. So owner and backup round alike, ranks that
hold the same norm weight keep it the same, and an update that is repeated after a loss, or on another layout, gives
the same bits. The head adds its gradient in the forward pass; a tied embedding adds to the same weight in the backward
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.layers.global_index import global_index
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.optim.bucket_plan import BucketPlan
from parallel3d.parallel.sharding import TpShard
from parallel3d.precision.stochastic_rounding import Noise
from parallel3d.random_keys import Key, bits, key_of


@dataclass(frozen=True, kw_only=True)
class ParameterNoise:
    """The rounding noise of one rank's parameters; `tp` decides only which elements those are."""

    seed: int
    tp: TpShard

    def key(self, purpose: str, *when: int | str, name: str) -> Key:
        return key_of(purpose, self.seed, *when, name)

    def of_range(
        self, plan: BucketPlan, parameters: Sequence[ShardedParameter], offset: int, purpose: str, *when: int | str
    ) -> Noise:
        """Returns the noise of a range that begins at element `offset` of the bucket; it is zero between parameters."""

        def words(span: range) -> Tensor:
            return self._words(plan, parameters, range(offset + span.start, offset + span.stop), purpose, *when)

        return words

    def _words(
        self, plan: BucketPlan, parameters: Sequence[ShardedParameter], span: range, purpose: str, *when: int | str
    ) -> Tensor:
        words = torch.zeros(len(span), dtype=torch.int64, device=parameters[0].device)
        for parameter, param_slot in zip(parameters, plan.param_slots):
            start, stop = max(param_slot.offset, span.start), min(param_slot.offset + param_slot.length, span.stop)
            if start < stop:
                index = global_index(
                    parameter.sharding,
                    range(start - param_slot.offset, stop - param_slot.offset),
                    tp=self.tp,
                    device=words.device,
                )
                key = self.key(purpose, *when, name=param_slot.name)
                words[start - span.start : stop - span.start] = bits(key, index)
        return words
