"""Which stage holds which chunk of layers.

The model is cut into *virtual stages*, contiguous ranges of layers that every micro-batch passes in order. A stage
holds one or more of them, its *chunks*, numbered in that order. Two layouts of 8 virtual stages over 4 stages::

    round robin    0 1 2 3 0 1 2 3     Narayanan et al. 2021, section 2.2: the pairs of stages form a ring
    V-shape        0 1 2 3 3 2 1 0     Qi et al. 2024: the stage with the embedding computes the loss
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class ChunkLayout:
    """`stages[k]` is the stage that holds virtual stage k; every stage holds equally many."""

    stages: tuple[int, ...]

    @staticmethod
    def round_robin(num_stages: int, virtual_stages: int = 1) -> ChunkLayout:
        return ChunkLayout(tuple(range(num_stages)) * virtual_stages)

    @staticmethod
    def v_shape(num_stages: int) -> ChunkLayout:
        """Two chunks a stage: down to the last stage and back up."""
        return ChunkLayout((*range(num_stages), *reversed(range(num_stages))))

    @property
    def first_stage(self) -> int:
        """The stage that reads tokens and embeds them."""
        return self.stages[0]

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return self.stages[-1]

    @property
    def last(self) -> int:
        """The last virtual stage."""
        return len(self.stages) - 1

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """The chunk of its stage that each virtual stage is."""
        return tuple(self.stages[:k].count(stage) for k, stage in enumerate(self.stages))

    @cached_property
    def virtual_stages(self) -> tuple[tuple[int, ...], ...]:
        """`virtual_stages[stage][chunk]`."""
        return tuple(
            tuple(k for k, other in enumerate(self.stages) if other == stage) for stage in sorted(set(self.stages))
        )

    @property
    def borders(self) -> tuple[tuple[int, int], ...]:
        """The pairs of different stages, the lower one first, between which a micro-batch passes."""
        return tuple(sorted({(min(pair), max(pair)) for pair in pairwise(self.stages) if pair[0] != pair[1]}))

    @property
    def embedding_stages(self) -> tuple[int, ...]:
        """The stages that hold a tied embedding: the first virtual stage's and the last one's, once if they agree."""
        return tuple(dict.fromkeys((self.first_stage, self.last_stage)))
