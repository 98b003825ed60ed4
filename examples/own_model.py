"""A model of your own on four workers: `python examples/own_model.py [section.field=value ...]`.

Two stages, each divided over two tensor-parallel ranks. `build` returns the parts; nothing in them knows of ranks.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

import parallel3d


class GatedBlock(nn.Module):
    """Attention and a gated MLP side by side behind one norm, with heads that are normed (as in ViT-22B, Qwen 3)."""

    def __init__(self, model):
        super().__init__()
        self.head_size = model.hidden_size // model.num_attention_heads
        self.norm = nn.RMSNorm(model.hidden_size)
        self.queries, self.keys, self.values = (
            nn.Linear(model.hidden_size, model.hidden_size, bias=False) for _ in range(3)
        )
        self.head_norm = nn.RMSNorm(self.head_size)
        self.output = nn.Linear(model.hidden_size, model.hidden_size, bias=False)
        self.gate, self.up = (nn.Linear(model.hidden_size, model.intermediate_size, bias=False) for _ in range(2))
        self.down = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)
        distances = torch.arange(model.max_position_embeddings)
        self.register_buffer("bias", -0.1 * (distances[:, None] - distances).float(), persistent=False)

    def forward(self, x):
        normed, length = self.norm(x), x.shape[1]
        heads = (each(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for each in self.projections)
        queries, keys, values = heads  # (sequences, heads of this rank, length, head_size)
        mask = self.bias[:length, :length].masked_fill(self.bias[:length, :length] > 0, float("-inf")).to(x.dtype)
        mixed = functional.scaled_dot_product_attention(
            self.head_norm(queries), self.head_norm(keys), values, attn_mask=mask
        )
        gated = functional.gelu(self.gate(normed)) * self.up(normed)
        return x + self.output(mixed.transpose(1, 2).flatten(2)) + self.down(gated)

    @property
    def projections(self):
        return self.queries, self.keys, self.values


def build(model):
    """`model` is the section of the configuration. Named modules are divided over the tensor-parallel ranks."""
    columns = dict.fromkeys(("queries", "keys", "values", "gate", "up"), parallel3d.Column())
    rows = dict.fromkeys(("output", "down"), parallel3d.Row())
    # every rank norms its own heads with the same weights, so these add up their gradients
    shardings = {**columns, **rows, "head_norm": parallel3d.Partial()}
    return parallel3d.ModelParts(block=lambda index: GatedBlock(model), shardings=shardings)


if __name__ == "__main__":
    config = {
        "model": {
            "module": build,
            "vocab_size": 2048,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        },
        "parallel": {"tp_size": 2, "pp_size": 2},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 128},
        "optimizer": {"learning_rate": 3e-3},
        "lr_schedule": {"warmup_steps": 10},
        "run": {"num_steps": 100, "threads_per_rank": 1, "directory": "runs/own_model"},
    }
    result = parallel3d.train(config, sys.argv[1:])
    print(f"loss {result.metrics[0]['loss']:.3f} -> {result.final_loss:.3f} in {result.final_step} steps")
