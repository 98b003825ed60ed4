"""GPT-2 written with nothing but torch's functions: an oracle that shares no line with the layers."""

import torch
import torch.nn.functional as F


def plain_loss(config, weights, inputs, targets):
    """Sum of the token losses of inputs and targets (batch, seq) int64, under weights given by their global names.

    Without a head's weight the embedding's is used for both.
    """
    batch, seq = inputs.shape
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    x = F.embedding(inputs, weights["embedding.weight"]) + weights["positions.weight"][:seq]

    def norm(t, w, name):
        centred = t - t.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + config.layer_norm_eps).rsqrt()
        return centred * scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(t):
        if config.activation_function == "gelu":
            return t * (1 + torch.erf(t / 2**0.5)) / 2
        return t / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (t + 0.044715 * t**3)))

    for i in range(config.num_hidden_layers):
        w = {k.removeprefix(f"layers.{i}."): v for k, v in weights.items() if k.startswith(f"layers.{i}.")}
        qkv = norm(x, w, "attention_norm") @ w["attention.qkv.weight"].T
        if config.qkv_bias is not False:
            qkv = qkv + w["attention.qkv.bias"]
        q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], -1)
        q = q.view(batch, seq, heads, size).transpose(1, 2)
        k = k.view(batch, seq, kv_heads, size).transpose(1, 2).repeat_interleave(heads // kv_heads, 1)
        v = v.view(batch, seq, kv_heads, size).transpose(1, 2).repeat_interleave(heads // kv_heads, 1)
        mask = torch.ones(seq, seq).tril().log().to(q.dtype)
        mixed = ((q @ k.transpose(-1, -2)) * size**-0.5 + mask).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).flatten(2) @ w["attention.output.weight"].T + w["attention.output.bias"]
        inner = gelu(norm(x, w, "mlp_norm") @ w["mlp.up.weight"].T + w["mlp.up.bias"])
        x = x + inner @ w["mlp.down.weight"].T + w["mlp.down.bias"]
    logits = norm(x, weights, "final_norm") @ weights.get("head.weight", weights["embedding.weight"]).T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
