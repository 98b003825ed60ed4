"""A small GPT-2 on bytes, in plain PyTorch: what llm_faults.py trains, how well it does, and what it writes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, CONTEXT, WIDTH, NUM_LAYERS, NUM_HEADS, DROPOUT = 256, 64, 144, 4, 4, 0.1


class Block(nn.Module):
    """Attention and a feed-forward network, each after a LayerNorm: (batch, seq, WIDTH) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        share = DROPOUT if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(*heads, dropout_p=share, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh")))


class SmallGpt(nn.Module):
    """Ids (batch, seq) to logits (batch, seq, VOCABULARY); the head shares the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                scale = (2 * NUM_LAYERS) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        return functional.linear(self.norm(self.blocks(self.dropout(x))), self.embedding.weight)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """The mean loss over windows (batch, CONTEXT + 1) of ids."""
    return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def split_text(text: bytes) -> tuple[Tensor, Tensor]:
    """Returns windows (number, CONTEXT + 1) to train on, of the first nine tenths, and to validate with."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    split = len(ids) * 9 // 10
    training, validation = (part.unfold(0, CONTEXT + 1, CONTEXT) for part in (ids[:split], ids[split:]))
    return training, validation


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def validation_loss(model: nn.Module, windows: Tensor, *, batch: int = 64) -> float:
    with evaluating(model):
        losses = [loss_of(model, part).item() * len(part) for part in windows.split(batch)]
    return sum(losses) / len(windows)


def generate(model: nn.Module, prompt: bytes, *, length: int, top_k: int, seed: int) -> tuple[bytes, list[float]]:
    """Returns `length` bytes after `prompt`, each drawn from the `top_k` likeliest, and the log of the probability that
    the model gives to each among all bytes."""
    generator, ids, logs = torch.Generator().manual_seed(seed), list(prompt), []
    with evaluating(model):
        for _ in range(length):
            logits = model(torch.tensor([ids[-CONTEXT:]]))[0, -1]
            best = logits.topk(top_k)
            drawn = int(torch.multinomial(best.values.softmax(0), 1, generator=generator))
            ids.append(int(best.indices[drawn]))
            logs.append(logits.log_softmax(0)[ids[-1]].item())
    return bytes(ids[len(prompt) :]), logs


def perplexity(logs: list[float]) -> float:
    """exp(-mean log p)."""
    return math.exp(-sum(logs) / len(logs))
