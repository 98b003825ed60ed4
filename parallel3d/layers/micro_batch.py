"""The batch of one iteration, and the description of a micro-batch that layers get."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

GradPass = Literal["forward", "backward"]
"""The pass that computes a gradient: the head's is computed in the forward pass."""


@dataclass(frozen=True, kw_only=True)
class TokenSpan:
    """Consecutive tokens of one sequence or document that a rank has."""

    slot: int
    positions: range
    """Their positions in the sequence, or in the document."""
    rows: slice
    """Their rows among the rank's tokens."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch: the sequences of the iteration's slots `slots`, one after another."""

    seed: int
    iteration: int
    slots: tuple[int, ...]
    sequence_length: int
    training: bool = True
    loss_factor: float = 1.0
    """Multiplies the gradients where they begin."""
    documents: tuple[int, ...] | None = None
    """Lengths of the documents that attention keeps apart, sequence after sequence; None: it keeps none apart."""
    masks_targets: bool = False
    """Whether targets may be negative: these have no loss."""

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
        """The same tokens document by document, with positions in the document, if attention keeps documents apart."""
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
    """The batch of one iteration: which sequence slots make up micro-batch m. It does not depend on ranks."""

    seed: int
    iteration: int
    num_micro_batches: int
    micro_batch_size: int
    sequence_length: int
    training: bool = True
    loss_factor: float = 1.0
    """Multiplies the gradients where they begin; the optimizer divides by it."""
    masks_documents: bool = False
    """Whether attention keeps documents apart: the first stage finds them, the others receive them."""
    masks_targets: bool = False
    """Whether some targets have no loss."""

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
            masks_targets=self.masks_targets,
        )
