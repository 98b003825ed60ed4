"""A stage of a user's own layers (`model.module`), which trains as the decoder's own does."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel3d.errors import UserError
from parallel3d.layers.cross_entropy import LinearCrossEntropy
from parallel3d.layers.embedding import VocabParallelEmbedding
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.models.blocks import BlockBuilder
from parallel3d.models.user_layers import UserBlock, UserEmbedding, UserHead, UserPart
from parallel3d.models.user_parts import ModelParts, load_parts
from parallel3d.recompute import Recompute


class UserStage(nn.Module):
    """Layers `layers` of the model, with the interface of `DecoderStage`."""

    def __init__(self, build: BlockBuilder, layers: range, *, recompute: Recompute, seed: int):
        super().__init__()
        config, context = build.config, build.context
        self.config, self.recompute = config, recompute
        parts, tied = load_parts(config), config.tie_word_embeddings
        make: dict[str, Any] = dict(context=context, seed=seed, function=config.module)
        ours: dict[str, Any] = dict(init_std=config.initializer_range, context=context, tied=tied)
        sizes = config.vocab_size, config.hidden_size
        is_first, is_last = layers.start == 0, layers.stop == config.num_hidden_layers
        self.embedding: UserEmbedding | VocabParallelEmbedding | None = None
        self.head: UserHead | LinearCrossEntropy | None = None
        self.positions = self.final_norm = self.embedding_factor = None
        if is_first and parts.embedding:
            self.embedding = UserEmbedding("embedding", parts.embedding, shardings={}, **make)
        elif is_first:
            self.embedding = VocabParallelEmbedding("embedding.weight", *sizes, **ours)
            self.positions = build.positions()
            self.embedding_factor = config.hidden_size**0.5 if build.family.scales_embedding else None
        self.layers = nn.ModuleList(
            UserBlock(f"layers.{index}", partial(parts.block, index), shardings=parts.shardings, **make)
            for index in layers
        )
        if recompute == "selective":
            self._recompute_modules(parts)
        if is_last and parts.head:
            self.head = UserHead("head", parts.head, shardings={}, **make)
        elif is_last:
            self.final_norm = build.norm("final_norm")
            cap = build.value_of(build.family.logit_cap_field)
            self.head = LinearCrossEntropy("embedding.weight" if tied else "head.weight", *sizes, cap=cap, **ours)
        if tied and isinstance(self.embedding, VocabParallelEmbedding) and isinstance(self.head, LinearCrossEntropy):
            self.head.weight = self.embedding.weight

    def check_documents(self) -> None:
        """Raises UserError if a block can't keep documents apart (`data.document_mask`)."""
        for layer in self.layers:
            assert isinstance(layer, UserBlock)
            if "documents" not in layer.accepts:
                block = f"{type(layer.part).__name__}.forward of model.module {self.config.module}"
                raise UserError(
                    f"data.document_mask: {block} takes no `documents`, by whose numbers its attention would keep"
                    " documents apart: add the argument (docs/python.md), or set data.document_mask to false"
                )

    def saved_buffers(self) -> dict[str, Tensor]:
        """The buffers that the state_dict of the user's parts holds, by global name."""
        parts = (part for part in (self.embedding, *self.layers, self.head) if isinstance(part, UserPart))
        return {name: buffer for part in parts for name, buffer in part.saved_buffers().items()}

    def _recompute_modules(self, parts: ModelParts) -> None:
        if not parts.recomputed:
            raise UserError(
                f"parallel.recompute selective: model.module {self.config.module} names no modules to recompute: return"
                ' ModelParts(recomputed=("attention",)), or use parallel.recompute full'
            )
        for layer in self.layers:
            assert isinstance(layer, UserBlock)
            layer.recompute(parts.recomputed, type(layer.part).__name__)

    def forward(self, x: Tensor, micro_batch: MicroBatch, targets: Tensor | None = None) -> Tensor:
        x = self._run_layers(x, micro_batch)
        if self.head is None:
            return x
        assert targets is not None
        if isinstance(self.head, UserHead):
            return self.head(x, targets, micro_batch, self.config.vocab_size)
        assert self.final_norm is not None
        _, normed = self.final_norm(x)
        return self.head(normed, targets, micro_batch.loss_factor, masks_targets=micro_batch.masks_targets)

    @torch.no_grad()
    def logits(self, x: Tensor, micro_batch: MicroBatch, rows: slice = slice(None)) -> Tensor:
        """As `DecoderStage.logits`."""
        x = self._run_layers(x, micro_batch)
        if isinstance(self.head, UserHead):
            return self.head.logits(x, micro_batch, self.config.vocab_size)[rows]
        assert self.head is not None and self.final_norm is not None, "logits come from the last stage"
        _, normed = self.final_norm(x)
        return self.head.logits(normed[rows])

    def _run_layers(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        if isinstance(self.embedding, UserEmbedding):
            x = self.embedding(x, micro_batch, self.config.hidden_size)
        elif self.embedding is not None:
            x = self.embedding(x)
            if self.embedding_factor is not None:
                x = x * torch.tensor(self.embedding_factor, dtype=x.dtype).item()  # rounded to x's format
            x = x if self.positions is None else self.positions(x, micro_batch)
        for layer in self.layers:
            if self.recompute != "full" or not torch.is_grad_enabled():
                x = layer(x, micro_batch)
            else:  # torch's own: anything may follow a product here, so its result is computed again
                x = checkpoint(layer, x, micro_batch, use_reentrant=False, preserve_rng_state=False)
        return x
