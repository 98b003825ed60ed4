"""Which text training reads, where that is not all of one source: blends, and slices of a file of tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from parallel3d.config.section import Section


class BlendStageConfig(Section):
    """Weights from one token of the run on."""

    from_token: NonNegativeInt = 0
    """Tokens that the run has read before; 0 for the first stage, growing from one to the next."""
    weights: dict[str, NonNegativeFloat]
    """Share of the tokens by source. They sum to 1; a source that is left out has none."""


class BlendConfig(Section):
    """Several sources, of which each has a share of the tokens: {"sources": {"web": ["web/*.jsonl"], "code": ["src"]},
    "stages": [{"weights": {"web": 0.7, "code": 0.3}}]}. Each sequence is of one source."""

    sources: dict[str, list[str]] = {}
    """Files, folders or globs of each source, by a name of your own. Each needs batch.global_batch_size documents."""
    stages: list[BlendStageConfig] = []
    """Weights, and the tokens at which they change: one stage at least. A source that weighs more than it is long is
    read again, in another order, while others are still at their first pass."""
    renormalise: bool = False
    """Divide the weights of a stage by their sum, whatever it is."""


class SliceConfig(Section):
    """A part of one file of tokens, read from its start to its end in whole global batches, in the file's order."""

    start_token: NonNegativeInt = 0
    """First token. To go on where another run has ended, give the token that it has named at its start."""
    min_tokens: Annotated[int, Field(ge=-1)] = -1
    """Tokens to read, rounded up to whole global batches. -1: as many global batches as fit."""
