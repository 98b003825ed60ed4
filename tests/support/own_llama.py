"""Our Llama as a user's own module, in plain torch: the same names, sizes and initial weights, other code.

`build` divides it over tensor-parallel ranks, `build_replicated` has all of it on each, `build_whole` also brings an
embedding and a head. `build_with_normed_heads` and `build_with_dropout` are other models.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from parallel3d import Column, Divided, ModelParts, Partial, Row, Whole
from parallel3d.layers.init import initial_value
from parallel3d.parallel.sharding import UNSHARDED, ParamSharding

SEED = 1
"""run.seed of the runs that are compared."""
RECOMPUTED = ("attention", "mlp")


class Attention(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.size = model.hidden_size // model.num_attention_heads
        self.widths = [model.hidden_size, *[self.size * model.num_key_value_heads] * 2]
        self.qkv = nn.Linear(model.hidden_size, sum(self.widths), bias=False)
        self.output = nn.Linear(model.hidden_size, model.hidden_size, bias=False)
        self.theta = model.rope_theta
        self.head_norm = nn.Identity()
        self.drop = nn.Dropout(0.0)

    def rotate(self, x):
        length = x.shape[-2]
        inverse = self.theta ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse)
        cos, sin = (torch.cat([each] * 2, -1).to(x.dtype) for each in (angles.cos(), angles.sin()))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def forward(self, x, documents=None):
        qkv = self.qkv(x)
        share = qkv.shape[-1] / sum(self.widths)  # of the heads, on this rank
        parts = qkv.split([int(width * share) for width in self.widths], -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        q, k = (self.rotate(self.head_norm(part)) for part in (q, k))
        if documents is None and self.drop.p == 0:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mixed = self.mix(q, k, v, documents)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def mix(self, q, k, v, documents):
        """With weights that can be seen: of tokens of the same document, and dropped."""
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        sees = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        if documents is not None:
            sees = sees & (documents[:, None, :, None] == documents[:, None, None, :])
        scores = (q @ k.transpose(2, 3) / self.size**0.5).masked_fill(~sees, -torch.inf)
        return self.drop(scores.softmax(-1)) @ v


class Mlp(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.gate_up = nn.Linear(model.hidden_size, 2 * model.intermediate_size, bias=False)
        self.down = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.drop(F.silu(gate) * up))


class Block(nn.Module):
    def __init__(self, model, index):
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.attention = Attention(model)
        self.mlp_norm = nn.RMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.mlp = Mlp(model)
        self.drop = nn.Dropout(0.0)
        draw_weights(self, f"layers.{index}", model)

    def forward(self, x, documents=None):
        x = x + self.drop(self.attention(self.attention_norm(x), documents))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


class Head(nn.Module):
    """Without the framework's names: "head.weight" is the only matrix in it."""

    def __init__(self, model):
        super().__init__()
        self.norm = nn.RMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.weight = nn.Parameter(torch.empty(model.vocab_size, model.hidden_size))
        draw_weights(self, "head", model)

    def forward(self, x):
        return self.norm(x) @ self.weight.T


class Embedding(nn.Embedding):
    def __init__(self, model):
        super().__init__(model.vocab_size, model.hidden_size)
        draw_weights(self, "embedding", model)


@torch.no_grad()
def draw_weights(module, name, model):
    """The weights with which `architecture` llama begins."""
    for path, parameter in module.named_parameters():
        if parameter.dim() > 1:
            sharding = ParamSharding(
                name=f"{name}.{path}", shape=tuple(parameter.shape), init_std=model.initializer_range
            )
            parameter.copy_(initial_value(sharding, seed=SEED, tp=UNSHARDED))


def build_replicated(model):
    return ModelParts(block=partial(Block, model), recomputed=RECOMPUTED)


def build(model):
    size = model.hidden_size // model.num_attention_heads
    keys = size * model.num_key_value_heads
    shardings = {
        "attention.qkv": Column((model.hidden_size, keys, keys)),
        "attention.output": Row(),
        "mlp.gate_up": Column((model.intermediate_size, model.intermediate_size)),
        "mlp.down": Row(),
    }
    return ModelParts(block=partial(Block, model), shardings=shardings, recomputed=RECOMPUTED)


def build_with_dropout(model):
    """Drops attention weights and inner activations, which ranks divide, and one module's inputs at two places."""

    def make(index):
        block = Block(model, index)
        for module in (block, block.attention, block.mlp):
            module.drop.p = 0.2
        return block

    dropouts = {"drop": Whole(), "attention.drop": Divided(1), "mlp.drop": Divided()}
    return replace(build(model), block=make, shardings={**build(model).shardings, **dropouts})


def build_with_normed_heads(model):
    """Not our Llama: a norm of single heads, whose weights every rank applies to its own heads."""

    def make(index):
        block = Block(model, index)
        block.attention.head_norm = nn.RMSNorm(block.attention.size)
        return block

    return replace(build(model), block=make, shardings={**build(model).shardings, "attention.head_norm": Partial()})


def build_whole(model):
    return replace(build_replicated(model), embedding=partial(Embedding, model), head=partial(Head, model))
