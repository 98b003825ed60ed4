"""A plain Llama on torch's own functions, for peers without a model of their own.

Layouts avoid all unnecessary copies, and so that torch's own tensor parallelism can cut the
weights: the fused QKV product has its outputs by head, (head, q|k|v, element), so that a cut along them keeps heads
whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.workload import Workload


class Attention(nn.Module):
    """(batch, seq, hidden) -> (batch, seq, hidden), causal."""

    def __init__(self, workload: Workload, rotations: Tensor):
        super().__init__()
        hidden = workload.hidden_size
        self.head_size = hidden // workload.num_attention_heads
        self.rotations = rotations  # (seq, 1, 1, head_size / 2), complex
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        qkv = self.qkv(x).view(batch, seq, -1, 3, self.head_size)
        pairs = torch.view_as_complex(qkv[:, :, :, :2].float().unflatten(-1, (-1, 2)))
        rotated = torch.view_as_real(pairs * self.rotations).flatten(-2).type_as(qkv)
        q, k, v = (part.transpose(1, 2) for part in (rotated[:, :, :, 0], rotated[:, :, :, 1], qkv[:, :, :, 2]))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """(batch, seq, hidden) -> (batch, seq, hidden)."""

    def __init__(self, workload: Workload):
        super().__init__()
        sizes = (workload.hidden_size, workload.intermediate_size)
        self.gate, self.up = nn.Linear(*sizes, bias=False), nn.Linear(*sizes, bias=False)
        self.down = nn.Linear(*reversed(sizes), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """x + attention(norm(x)), then x + swiglu(norm(x))."""

    def __init__(self, workload: Workload, rotations: Tensor):
        super().__init__()
        self.attention_norm = nn.RMSNorm(workload.hidden_size, eps=1e-5)
        self.attention = Attention(workload, rotations)
        self.mlp_norm = nn.RMSNorm(workload.hidden_size, eps=1e-5)
        self.mlp = SwiGLU(workload)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """(batch, seq, hidden) -> logits (batch, seq, vocab)."""

    def __init__(self, workload: Workload):
        super().__init__()
        self.norm = nn.RMSNorm(workload.hidden_size, eps=1e-5)
        self.projection = nn.Linear(workload.hidden_size, workload.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))


def build_llama(workload: Workload, layers: range | None = None) -> nn.Sequential:
    """Token ids (batch, seq) -> logits: embedding, layers and head in a row; with `layers`, only that stage's part."""
    every = range(workload.num_hidden_layers)
    layers = every if layers is None else layers
    rotations = rotary_table(workload)
    modules: list[nn.Module] = [Layer(workload, rotations) for _ in layers]
    if layers.start == every.start:
        modules.insert(0, nn.Embedding(workload.vocab_size, workload.hidden_size))
    if layers.stop == every.stop:
        modules.append(Head(workload))
    model = nn.Sequential(*modules)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def rotary_table(workload: Workload) -> Tensor:
    """exp(i position frequency), (seq, 1, 1, head_size / 2) complex."""
    head_size = workload.hidden_size // workload.num_attention_heads
    frequencies = 10000.0 ** -(torch.arange(0, head_size, 2) / head_size)
    angles = torch.outer(torch.arange(workload.sequence_length), frequencies)
    return torch.polar(torch.ones_like(angles), angles)[:, None, None]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
