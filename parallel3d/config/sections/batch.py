"""The configuration's section `batch`, and its rules."""

from __future__ import annotations

from pydantic import PositiveInt

from parallel3d.config.sections.base import Section


class BatchConfig(Section):
    """Sizes of an iteration: give two of the three sizes, the third follows from
    global_batch_size = micro_batch_size * num_micro_batches."""

    global_batch_size: PositiveInt | None = None
    """Sequences of one iteration, over all replicas."""
    micro_batch_size: PositiveInt | None = None
    """Sequences that a replica runs at once."""
    num_micro_batches: PositiveInt | None = None
    """Micro-batches of one iteration, counted over all replicas; at least as many as the replicas of any stage."""
    sequence_length: PositiveInt
    """Tokens of a sequence."""
