"""Our Llama as a user's own module, in plain torch: the same names, sizes and initial weights, other code.

`build` divides it over tensor-parallel ranks, `build_replicated` has all of it on each, `build_whole` also brings an
embedding and a head. `build_with_normed_heads` is another model.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from parallel3d import Column, ModelParts, Partial, Row
from parallel3d.layers.init import initial_value
from parallel3d.parallel.sharding import UNSHARDED, ParamSharding

SEED = 1
"""run.seed of the runs that are compared."""


class Attention(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.size = model.hidden_size // model.num_attention_heads
        self.widths = [model.hidden_size, *[self.size * model.num_key_value_heads] * 2]
        self.qkv = nn.Linear(model.hidden_size, sum(self.widths), bias=False)
        self.output = nn.Linear(model.hidden_size, model.hidden_size, bias=False)
        self.theta = model.rope_theta
        self.head_norm = nn.Identity()

    def rotate(self, x):
        length = x.shape[-2]
        inverse = self.theta ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse)
        cos, sin = (torch.cat([each] * 2, -1).to(x.dtype) for each in (angles.cos(), angles.sin()))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def forward(self, x):
        qkv = self.qkv(x)
        share = qkv.shape[-1] / sum(self.widths)  # of the heads, on this rank
        parts = qkv.split([int(width * share) for width in self.widths], -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        q, k = (self.rotate(self.head_norm(part)) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.gate_up = nn.Linear(model.hidden_size, 2 * model.intermediate_size, bias=False)
        self.down = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, model, index):
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.attention = Attention(model)
        self.mlp_norm = nn.RMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.mlp = Mlp(model)
        draw_weights(self, f"layers.{index}", model)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


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
    return ModelParts(block=partial(Block, model))


def build(model):
    size = model.hidden_size // model.num_attention_heads
    keys = size * model.num_key_value_heads
    shardings = {
        "attention.qkv": Column((model.hidden_size, keys, keys)),
        "attention.output": Row(),
        "mlp.gate_up": Column((model.intermediate_size, model.intermediate_size)),
        "mlp.down": Row(),
    }
    return ModelParts(block=partial(Block, model), shardings=shardings)


def build_with_normed_heads(model):
    """Not our Llama: a norm of single heads, whose weights every rank applies to its own heads."""

    def make(index):
        block = Block(model, index)
        block.attention.head_norm = nn.RMSNorm(block.attention.size)
        return block

    return ModelParts(block=make, shardings={**build(model).shardings, "attention.head_norm": Partial()})


def build_whole(model):
    return ModelParts(block=partial(Block, model), embedding=partial(Embedding, model), head=partial(Head, model))
