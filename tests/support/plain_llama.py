"""The Llama written with nothing but torch's functions: an oracle that shares no line with the layers."""

import torch
import torch.nn.functional as F


def plain_loss(config, weights, inputs, targets):
    """Sum of the token losses of inputs and targets (batch, seq) int64, under weights given by their global names.

    Without a head's weight the embedding's is used for both.
    """
    batch, seq = inputs.shape
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    x = F.embedding(inputs, weights["embedding.weight"])
    inverse = config.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), inverse)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

    def rotate(t):
        a, b = t.chunk(2, -1)
        return t * cos + torch.cat([-b, a], -1) * sin

    def norm(t, w):
        return F.rms_norm(t, (config.hidden_size,), w, config.rms_norm_eps)

    for i in range(config.num_hidden_layers):
        w = {k.removeprefix(f"layers.{i}."): v for k, v in weights.items() if k.startswith(f"layers.{i}.")}
        qkv = norm(x, w["attention_norm.weight"]) @ w["attention.qkv.weight"].T
        q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], -1)
        q = rotate(q.view(batch, seq, heads, size).transpose(1, 2))
        k = rotate(k.view(batch, seq, kv_heads, size).transpose(1, 2)).repeat_interleave(heads // kv_heads, 1)
        v = v.view(batch, seq, kv_heads, size).transpose(1, 2).repeat_interleave(heads // kv_heads, 1)
        mask = torch.ones(seq, seq).tril().log().to(q.dtype)
        mixed = ((q @ k.transpose(-1, -2)) * size**-0.5 + mask).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).flatten(2) @ w["attention.output.weight"].T
        gate, up = (norm(x, w["mlp_norm.weight"]) @ w["mlp.gate_up.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w["mlp.down.weight"].T
    logits = norm(x, weights["final_norm.weight"]) @ weights.get("head.weight", weights["embedding.weight"]).T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
