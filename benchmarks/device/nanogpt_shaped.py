"""GPT-2 as a plain compiled loop, of our own writing in nanoGPT's shape: fp32 weights, bf16 autocast, fused AdamW."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.config.schema import Config

VOCAB_MULTIPLE = 64
"""The vocabulary is padded, which the products of the head like."""


class GptBlock(nn.Module):
    """(batch, seq, hidden) -> the same."""

    def __init__(self, hidden: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).split(hidden, dim=2)
        q, k, v = (each.view(batch, seq, self.num_heads, -1).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Token ids and targets (batch, seq) -> the mean loss; the head is the embedding."""

    def __init__(self, config: Config):
        super().__init__()
        model = config.model
        vocab = -(-model.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.tokens = nn.Embedding(vocab, model.hidden_size)
        self.positions = nn.Embedding(config.batch.sequence_length, model.hidden_size)
        self.blocks = nn.ModuleList(
            GptBlock(model.hidden_size, model.num_attention_heads) for _ in range(model.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(model.hidden_size)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nanogpt_shaped(config: Config, device: torch.device, is_smoke: bool) -> tuple[int, Callable[[], object]]:
    """The micro-batch size and a training step."""
    size = config.batch.micro_batch_size
    assert size is not None
    torch.set_float32_matmul_precision("high")
    with device:
        model: nn.Module = Gpt(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        ids = torch.randint(config.model.vocab_size, (size, config.batch.sequence_length + 1))
    compute = model if is_smoke else torch.compile(model)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = compute(ids[:, :-1], ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return size, step
