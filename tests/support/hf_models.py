"""Small models as ours and as Hugging Face's, the same function."""

from __future__ import annotations

from functools import cache

import torch

from parallel3d.config.schema import ModelConfig
from parallel3d.models.hf import hf_tensors
from parallel3d.models.hf_config import hf_config

SIZES = dict(
    vocab_size=53,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=16,
)
MODELS = {
    "llama": ModelConfig(**SIZES, rope_theta=500.0, rms_norm_eps=1e-6),
    "llama-gqa": ModelConfig(**SIZES, num_key_value_heads=2),
    "llama-qkv-bias": ModelConfig(**SIZES, num_key_value_heads=2, qkv_bias=True),
    "llama-wide-heads": ModelConfig(**SIZES, num_key_value_heads=2, head_dim=16),
    "llama-linear": ModelConfig(**SIZES, rope_type="linear", rope_factor=4.0),
    "llama-3.1": ModelConfig(
        **SIZES,
        tie_word_embeddings=True,
        num_key_value_heads=2,
        rope_theta=500.0,
        rope_type="llama3",
        rope_factor=8.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_positions=64,
    ),
    "phi3": ModelConfig(**SIZES, architecture="phi3", num_key_value_heads=2, sliding_window=5),
    "qwen3": ModelConfig(**SIZES, architecture="qwen3", num_key_value_heads=2, head_dim=16),
    "qwen3-tied": ModelConfig(**SIZES, architecture="qwen3", tie_word_embeddings=True, rms_norm_eps=1e-6),
    "olmo2": ModelConfig(**SIZES, architecture="olmo2", rope_theta=500.0),
    "olmo2-gqa": ModelConfig(**SIZES, architecture="olmo2", num_key_value_heads=2, rms_norm_eps=1e-6),
    "gemma": ModelConfig(**SIZES, architecture="gemma", tie_word_embeddings=True, num_key_value_heads=1, head_dim=16),
    "gemma3": ModelConfig(
        **SIZES,
        architecture="gemma3",
        tie_word_embeddings=True,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=5,
        sliding_window_pattern=2,
        query_pre_attn_scalar=24,
        rope_theta=1e6,
    ),
    "gemma3-scaled": ModelConfig(
        **SIZES,
        architecture="gemma3",
        num_key_value_heads=1,
        sliding_window=3,
        sliding_window_pattern=2,
        rope_theta=5e3,
        rope_local_base_freq=100.0,
        rope_type="linear",
        rope_factor=8.0,
    ),
    "gemma2": ModelConfig(
        **SIZES,
        architecture="gemma2",
        tie_word_embeddings=True,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=5,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gpt2": ModelConfig(**SIZES, architecture="gpt2", layer_norm_eps=1e-6),
    "mistral": ModelConfig(**SIZES, architecture="mistral", num_key_value_heads=2),
    "mistral-window": ModelConfig(**SIZES, architecture="mistral", num_key_value_heads=2, sliding_window=5),
    "llama-tied": ModelConfig(**SIZES, tie_word_embeddings=True),
    "smollm2": ModelConfig(**SIZES, tie_word_embeddings=True, num_key_value_heads=2),
    "gpt2-tied": ModelConfig(**SIZES, architecture="gpt2", tie_word_embeddings=True),
    "gpt2-gelu-no-qkv-bias": ModelConfig(**SIZES, architecture="gpt2", activation_function="gelu", qkv_bias=False),
}


@cache
def their_model(name):
    """Built from our config.json, all its parameters random but the biases that ours has not."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds to import

    fields = hf_config(MODELS[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    assert type(model).__name__ == fields["architectures"][0]
    random = torch.Generator().manual_seed(3)
    absent = {tensor.hf_name for tensor in hf_tensors(MODELS[name]) if tensor.name is None}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 and "bias" not in key else 0.0, 0.2, generator=random)
            if key in absent:
                parameter.zero_()  # a product would leave -0, which ours do not write
    return model
