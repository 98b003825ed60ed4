"""A decoder over a range of layers, whatever its family: embedding, layers, final norm, head.

A stage that holds the first layer has the embedding, one that holds the last has the final norm and the head. Between
the stages travels one tensor (tokens_local, hidden). A family says what its layers and norms are.

A tied head is the embedding's matrix. The first stage and the last each hold it, as parameters of one name; a stage
that is both holds one parameter, which two modules use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from parallel3d.config.schema import ModelConfig
from parallel3d.layers.cross_entropy import LinearCrossEntropy
from parallel3d.layers.dropout import dropout
from parallel3d.layers.embedding import VocabParallelEmbedding
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.placement import Placement
from parallel3d.recompute import Recompute, run_layer


class Family(ABC):
    """What sets one family of decoders apart from another."""

    def positions(self) -> nn.Module | None:
        """What adds positions to the embedded tokens: (x (tokens_local, hidden), micro_batch) -> the same shape."""
        return None

    @abstractmethod
    def layer(self, index: int) -> nn.Module:
        """The 0-based layer: called with (x (tokens_local, hidden), micro_batch), gives the same shape."""

    @abstractmethod
    def norm(self, name: str) -> nn.Module:
        """A norm like those of the layers, for the end: (tokens_local, hidden) -> the same."""


class DecoderStage(nn.Module):
    """Layers `layers` of the model. Input: token ids (tokens,) on the first stage, else (tokens_local, hidden).

    Output: (tokens_local, hidden), or on the last stage the sum of the token losses (float64 scalar), for which it
    needs the targets (tokens,).
    """

    def __init__(
        self, config: ModelConfig, layers: range, family: Family, *, on: Placement, recompute: Recompute = "none"
    ):
        super().__init__()
        self.tp, self.drop, self.recompute = on.tp, config.hidden_dropout, recompute
        sizes, std, tied = (config.vocab_size, config.hidden_size), config.initializer_range, config.tie_word_embeddings
        is_first, is_last = layers.start == 0, layers.stop == config.num_hidden_layers
        name, head_name = "embedding.weight", "embedding.weight" if tied else "head.weight"
        self.embedding = VocabParallelEmbedding(name, *sizes, init_std=std, on=on, tied=tied) if is_first else None
        self.positions = family.positions() if is_first else None
        self.layers = nn.ModuleList(family.layer(index) for index in layers)
        self.final_norm = family.norm("final_norm") if is_last else None
        self.head = LinearCrossEntropy(head_name, *sizes, init_std=std, on=on, tied=tied) if is_last else None
        if tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, micro_batch: MicroBatch, targets: Tensor | None = None) -> Tensor:
        x = self._run_layers(x, micro_batch)
        if self.head is None or self.final_norm is None:
            return x
        assert targets is not None
        return self.head(self.final_norm(x), targets, micro_batch.loss_factor)

    @torch.no_grad()
    def logits(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        """What forward is given -> (tokens, vocab) on every rank of the tensor-parallel group; on the last stage.

        The weights must be whole: an optimizer that gathers them may still be at it (`finish_gather`).
        """
        assert self.head is not None and self.final_norm is not None, "logits come from the last stage"
        return self.head.logits(self.final_norm(self._run_layers(x, micro_batch)))

    def _run_layers(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
            x = x if self.positions is None else self.positions(x, micro_batch)
            x = dropout(x, self.drop, micro_batch=micro_batch, layer=-1, site="embedding", tp=self.tp)
        for layer in self.layers:
            x = run_layer(layer, x, micro_batch, recompute=self.recompute, products=self.tp.products)
        return x
