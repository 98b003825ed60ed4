"""Small shapes of the families, as fields of `model`, for the tests that train and convert them.

Windows of 5 tokens are shorter than any sequence there."""

FAMILY_SHAPES = {
    "llama-3.1": dict(
        num_key_value_heads=2,
        head_dim=12,
        rope_theta=500.0,
        rope_type="llama3",
        rope_factor=8.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_positions=64,
    ),
    "qwen3": dict(architecture="qwen3", num_key_value_heads=2, head_dim=12),
    "olmo2": dict(architecture="olmo2", num_key_value_heads=2),
    "phi3": dict(architecture="phi3", num_key_value_heads=2, sliding_window=5),
    "gemma": dict(architecture="gemma", num_key_value_heads=1, head_dim=12),
    "gemma2": dict(
        architecture="gemma2",
        num_key_value_heads=2,
        head_dim=12,
        tie_word_embeddings=True,
        sliding_window=5,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": dict(
        architecture="gemma3",
        num_key_value_heads=2,
        head_dim=12,
        tie_word_embeddings=True,
        sliding_window=5,
        sliding_window_pattern=3,
        query_pre_attn_scalar=16,
    ),
}
"""By name; tests/support/hf_models.py has those that are compared with transformers."""
