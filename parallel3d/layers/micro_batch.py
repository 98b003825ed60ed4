"""The batch of one iteration, and what layers are told of the micro-batch they work on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

GradPass = Literal["forward", "backward"]
"""The pass that gives a gradient: the head's comes in the forward pass."""


@dataclass(frozen=True, kw_only=True)
class TokenSpan:
    """Consecutive tokens of one sequence or document, as far as a rank has them."""

    slot: int
    positions: range
    """Where they stand in the sequence, or in the document."""
    rows: slice
    """Where they stand among the rank's tokens."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """`slots` are the sequence slots of the iteration whose sequences lie end to end in this micro-batch."""

    seed: int
    iteration: int
    slots: tuple[int, ...]
    sequence_length: int
    training: bool = True
    loss_factor: float = 1.0
    """Multiplies the gradients where they begin."""
    documents: tuple[int, ...] | None = None
    """Lengths of the documents, sequences end to end, that attention keeps apart; None: it knows of none."""

    @property
    def batch_size(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.slots) * self.sequence_length

    def token_spans(self, begin: int, num_local: int) -> Iterator[TokenSpan]:
        """Tokens `begin` to `begin + num_local - 1` of the micro-batch, sequence by sequence."""
        return self._split((self.sequence_length,) * self.batch_size, begin, num_local)

    def document_spans(self, begin: int, num_local: int) -> Iterator[TokenSpan]:
        """The same document by document, where they are kept apart: positions are then those in the document."""
        return (
            self.token_spans(begin, num_local)
            if self.documents is None
            else self._split(self.documents, begin, num_local)
        )

    def _split(self, lengths: Iterable[int], begin: int, num_local: int) -> Iterator[TokenSpan]:
        start = 0
        for length in lengths:
            first, last = max(begin, start), min(begin + num_local, start + length)
            if first < last:
                yield TokenSpan(
                    slot=self.slots[start // self.sequence_length],
                    positions=range(first - start, last - start),
                    rows=slice(first - begin, last - begin),
                )
            start += length


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batch of one iteration: which sequence slots make up micro-batch m. Nothing here knows of ranks."""

    seed: int
    iteration: int
    num_micro_batches: int
    micro_batch_size: int
    sequence_length: int
    training: bool = True
    loss_factor: float = 1.0
    """Multiplies the gradients where they begin; the optimizer divides by it again."""
    masks_documents: bool = False
    """Attention keeps documents apart: who loads a micro-batch finds them, the others are told."""

    @property
    def num_slots(self) -> int:
        return self.num_micro_batches * self.micro_batch_size

    @property
    def num_tokens(self) -> int:
        return self.num_slots * self.sequence_length

    def slots(self, micro_batch: int) -> tuple[int, ...]:
        first = micro_batch * self.micro_batch_size
        return tuple(range(first, first + self.micro_batch_size))

    def micro_batch(self, number: int) -> MicroBatch:
        return MicroBatch(
            seed=self.seed,
            iteration=self.iteration,
            slots=self.slots(number),
            sequence_length=self.sequence_length,
            training=self.training,
            loss_factor=self.loss_factor,
        )
