"""The sharding of each parameter over the tensor-parallel ranks: declared once, read by initialisation, gradient norm,
checkpoints and recovery.

A parameter is sharded along one dimension, *inside each fused block*: QKV has the blocks q, k and v, and every rank
holds its part of each, so that a rank owns whole heads::

    global rows   | q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3 |
    rank 1 of 2   |       q2 q3 |       k2 k3 |       v2 v3 |   -> local rows  q2 q3 k2 k3 v2 v3

A block with fewer parts than ranks (fewer key heads) is sharded into these parts. Neighbouring ranks hold copies of the
same part, which belongs to the first of them::

    global rows   | q0 q1 q2 q3 | k0 k1 | v0 v1 |            (heads)
    rank 1 of 4   |    q1       | k0    | v0    |   -> k0 and v0 are copies of those of rank 0

A padded parameter (the vocabulary) gives each rank ceil(size / tp_size) rows; the last ranks have rows of padding,
which have no global index, are never saved, and never reach the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod


@dataclass(frozen=True, kw_only=True)
class TpShard:
    """Which share of every parameter a rank holds: that of tensor-parallel rank `rank` of `size`."""

    rank: int
    size: int


UNSHARDED = TpShard(rank=0, size=1)
"""All of every parameter."""


@dataclass(frozen=True, kw_only=True)
class FusedBlock:
    """A named block of a fused parameter along its sharded dimension, in global elements."""

    name: str
    size: int
    max_parts: int | None = None
    """The largest number of parts into which it divides; more ranks hold copies. None: any number."""

    def copies(self, tp_size: int) -> int:
        """The number of neighbouring ranks that hold the same part."""
        num_parts = min(tp_size, self.max_parts or tp_size)
        assert tp_size % num_parts == 0, f"{tp_size} ranks can't share {num_parts} parts of {self.name}"
        return tp_size // num_parts


@dataclass(frozen=True, kw_only=True)
class IndexRun:
    """`length` consecutive indices along the sharded dimension, from `local_start` in the share and from `global_start`
    in the whole."""

    global_start: int
    local_start: int
    length: int
    copies: int = 1
    """The number of neighbouring ranks that hold these indices."""


@dataclass(frozen=True, kw_only=True)
class ParamSharding:
    """The global identity of one parameter and its sharding.

    `shape` is global and unpadded. `dim` None: every tensor-parallel rank holds the whole; then `partial_grad` says
    that each holds only a part of the gradient, to be summed over the tensor-parallel group: under sequence parallelism
    that of its own tokens (Korthikanti et al., "Reducing activation recomputation", section 4.2.2), of a norm of heads
    that of its own heads.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    fused_blocks: tuple[FusedBlock, ...] = ()
    padded: bool = False
    partial_grad: bool = False
    init_std: float | None = None  # None: ones (a norm's weight); 0: zeros (a bias)
    is_norm_or_bias: bool = False
    is_token_table: bool = False
    """One row for each token or position: embeddings and the output head, which matrix-wise update rules leave out."""
    tied: bool = False
    """Embedding and output head at once: a parameter of the first stage and of the last, the same on both."""

    def __post_init__(self) -> None:
        if self.fused_blocks:
            assert self.dim is not None and sum(c.size for c in self.fused_blocks) == self.shape[self.dim], self.name

    @property
    def is_layer_matrix(self) -> bool:
        """Whether it is a matrix that multiplies activations inside a layer."""
        return len(self.shape) == 2 and not (self.is_norm_or_bias or self.is_token_table)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def local_shape(self, tp_size: int) -> tuple[int, ...]:
        """The shape that each rank allocates, padding included."""
        if self.dim is None:
            return self.shape
        size = sum(self._part(block, tp_size) for block in self._fused_blocks())
        return self.shape[: self.dim] + (size,) + self.shape[self.dim + 1 :]

    def runs(self, tp: TpShard) -> tuple[IndexRun, ...]:
        """The indices along the sharded dimension that a rank holds, without padding. Empty if all of it is padding."""
        if self.dim is None:
            return (IndexRun(global_start=0, local_start=0, length=self.shape[0], copies=tp.size),)
        runs, offset, local = [], 0, 0
        for block in self._fused_blocks():
            part, copies = self._part(block, tp.size), block.copies(tp.size)
            start = min(part * (tp.rank // copies), block.size)
            length = min(part, block.size - start)
            if length:
                runs.append(IndexRun(global_start=offset + start, local_start=local, length=length, copies=copies))
            offset += block.size
            local += part
        return tuple(runs)

    def copies(self, tp_size: int) -> int:
        """The number of ranks that share a part of a block with fewer parts than ranks; 1 without such a block."""
        return max((block.copies(tp_size) for block in self.fused_blocks), default=1)

    def _fused_blocks(self) -> tuple[FusedBlock, ...]:
        assert self.dim is not None
        return self.fused_blocks or (FusedBlock(name="", size=self.shape[self.dim]),)

    def _part(self, block: FusedBlock, tp_size: int) -> int:
        num_parts = tp_size // block.copies(tp_size)
        assert self.padded or block.size % num_parts == 0, f"{self.name}: {block.size} over {num_parts}"
        return ceil(block.size / num_parts)
