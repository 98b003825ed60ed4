"""Models of Hugging Face that are not supported: the error names the field, its value and what is supported."""

import json

import pytest

from parallel3d.errors import CheckpointError
from parallel3d.models.hf_config import model_section
from parallel3d.models.hf_folder import open_hf_folder
from tests.support.hf_models import their_model

LONGROPE = {"type": "longrope", "short_factor": [1.0]}
TYPES = "supported are default, linear, llama3"
MODEL_TYPES = "gemma, gemma2, gemma3_text, gpt2, llama, mistral, olmo2, phi3, qwen2, qwen3"
ORDER = "a number n, or layer_types with full_attention in each n-th layer and sliding_attention in the others"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
OF_EACH_KIND = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
}
REFUSED = {
    "another architecture": ("gpt2", dict(model_type="mamba"), f"model_type is 'mamba'; supported are {MODEL_TYPES}"),
    "no architecture": ("gpt2", dict(model_type=None), f"model_type is None; supported are {MODEL_TYPES}"),
    "a window of Qwen3": ("qwen3", dict(use_sliding_window=True), "use_sliding_window is True; supported is False"),
    "Phi-3 with positions of two lengths": (
        "phi3",
        dict(rope_parameters=None, rope_scaling=LONGROPE),
        f"rope_scaling.rope_type is 'longrope'; {TYPES}",
    ),
    "Phi-4-mini's part of each head": (
        "phi3",
        dict(rope_parameters=None, partial_rotary_factor=0.75),
        "partial_rotary_factor is 0.75; ours turn whole heads (1.0)",
    ),
    "layers without an order": (
        "gemma3",
        dict(layer_types=["full_attention", "sliding_attention"]),
        f"sliding_window_pattern is ['full_attention', 'sliding_attention']; supported is {ORDER}",
    ),
    "scaled positions in the window": (
        "gemma3",
        dict(rope_parameters=OF_EACH_KIND),
        "rope_local_type is 'linear'; supported is 'default'",
    ),
    "soft caps of Gemma 3": (
        "gemma3",
        dict(final_logit_softcapping=30.0),
        "final_logit_softcapping is 30.0; supported is None",
    ),
    "a field is missing": ("llama-gqa", dict(hidden_size=None), "hidden_size is missing"),
    "a field is not a number": (
        "llama-gqa",
        dict(hidden_size="wide"),
        "hidden_size is 'wide': must be a valid integer",
    ),
    "a field below its least value": ("llama-gqa", dict(vocab_size=-1), "vocab_size is -1: must be greater than 0"),
    "a field that is a list": (
        "gpt2",
        dict(vocab_size=[5]),
        "vocab_size is [5]; supported is a single number or text, true or false",
    ),
    "another activation": ("llama-gqa", dict(hidden_act="gelu"), "hidden_act is 'gelu'; supported is 'silu'"),
    "another activation of GPT-2": (
        "gpt2",
        dict(activation_function="relu"),
        "activation_function is 'relu': must be 'gelu_new' or 'gelu'",
    ),
    "positions by YaRN": (
        "llama-gqa",
        dict(rope_parameters={"rope_type": "yarn", "factor": 8.0, "rope_theta": 5e5}),
        f"rope_parameters.rope_type is 'yarn'; {TYPES}",
    ),
    "positions of two lengths": (
        "llama-gqa",
        dict(rope_scaling={"type": "longrope"}, rope_parameters=None),
        f"rope_scaling.rope_type is 'longrope'; {TYPES}",
    ),
    "positions without their bounds": (
        "llama-gqa",
        dict(rope_parameters=LLAMA3),
        "rope_parameters.low_freq_factor is missing, which rope_type 'llama3' needs",
    ),
    "bounds in the wrong order": (
        "llama-gqa",
        dict(rope_parameters={**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
        "rope_high_freq_factor is 1.0: must be above model.rope_low_freq_factor (4)",
    ),
    "a factor that is a text": (
        "llama-gqa",
        dict(rope_scaling={"rope_type": "linear", "factor": "8"}, rope_parameters=None),
        "rope_scaling.factor is '8'; supported are numbers",
    ),
    "positions on a part of each head": (
        "llama-gqa",
        dict(partial_rotary_factor=0.5, rope_parameters=None),
        "partial_rotary_factor is 0.5; ours turn whole heads (1.0)",
    ),
    "biases": ("llama-gqa", dict(attention_bias=True), "attention_bias is True; supported is False"),
    "heads of another width than GPT-2's": (
        "gpt2",
        dict(head_dim=64),
        "head_dim is 64; in a gpt2 it is hidden_size / num_attention_heads",
    ),
    "uneven heads": (
        "llama-gqa",
        dict(num_attention_heads=5, head_dim=None),
        "num_attention_heads is 5, which does not divide the width 32",
    ),
    "a base of positions that is a text": (
        "llama-gqa",
        dict(rope_theta="x", rope_parameters=None),
        "rope_theta is 'x': must be a valid number",
    ),
    "positions that are not an object": (
        "llama-gqa",
        dict(rope_scaling=[2], rope_parameters=None),
        "rope_scaling is [2]; supported are null and an object with rope_type default, linear, llama3",
    ),
    "quantisation": (
        "llama-gqa",
        dict(quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantization_config is {'quant_method': 'gptq', 'bits': 4}; supported are weights of the formats F32,"
        " F64, BF16, F16 without it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_field_and_what_is_supported_are_named(tmp_path, name):
    model, fields, message = REFUSED[name]
    their_model(model).config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    model_section(content, "config.json")
    changed = {key: value for key, value in (content | fields).items() if value is not None}
    path.write_text(json.dumps(changed))
    with pytest.raises(CheckpointError) as caught:
        open_hf_folder(tmp_path)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_a_value_of_any_length_is_quoted_in_part():
    with pytest.raises(CheckpointError) as caught:
        model_section({"model_type": "gpt2", "quantization_config": {"skipped": ["lm_head"] * 10_000}}, "config.json")
    assert "quantization_config is {'skipped': ['lm_head', " in str(caught.value) and len(str(caught.value)) < 1000


def test_no_quantisation_may_be_written_as_null():
    fields = json.loads(their_model("llama-gqa").config.to_json_string()) | {"quantization_config": None}
    assert model_section(fields, "config.json").hidden_size == fields["hidden_size"]
