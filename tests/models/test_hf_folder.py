"""Hugging Face folders as transformers writes them: read to the last bit; what is wrong with one is named.

tests/models/test_hf_refusals.py has the models that are not supported.
"""

import json
import random
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from parallel3d.config.derived import resolved_model
from parallel3d.config.schema import ModelConfig
from parallel3d.errors import CheckpointError
from parallel3d.families import HF_MODELS
from parallel3d.models.hf_config import hf_config, model_section
from parallel3d.models.hf_folder import open_hf_folder
from parallel3d.models.hf_import import import_folder
from tests.support.hf_models import MODELS, SIZES, their_model
from tests.support.tiers import examples

EVERYTHING = (slice(None),)


@pytest.mark.parametrize("max_shard_size", ["20KB", "1GB"])
@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_has_saved(tmp_path, name, max_shard_size):
    their_model(name).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    folder = open_hf_folder(tmp_path)
    assert folder.model == resolved_model(MODELS[name])
    state = their_model(name).state_dict()
    for tensor in folder.table:
        value = folder.read(tensor.hf_name)
        assert torch.equal(value[EVERYTHING], state[tensor.hf_name])
        assert (value.shape, value.dtype) == (tensor.shape, torch.float32)


@pytest.mark.parametrize("name, base", [("gpt2-tied", "transformer"), ("llama-tied", "model")])
def test_names_without_the_models_prefix_and_tables_of_old_versions(tmp_path, name, base):
    """As OpenAI's GPT-2 is on the hub: the base model's names, masks among the weights."""
    model = their_model(name)
    getattr(model, base).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    assert not any(key.startswith(base) for key in stored)
    tables = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file({**stored, **tables, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    folder, state = open_hf_folder(tmp_path), model.state_dict()
    for tensor in folder.table:
        assert torch.equal(folder.read(tensor.hf_name)[EVERYTHING], state[tensor.hf_name])


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One of each kind in several files."""
    folders = {}
    for name in ("gpt2", "llama-gqa", "olmo2"):
        folders[name] = tmp_path_factory.mktemp(name)
        their_model(name).save_pretrained(folders[name], max_shard_size="20KB")
    return folders


def change_json(folder, name, **fields):
    content = json.loads((folder / name).read_text())
    content |= fields
    (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def change_weights(folder, change):
    """Changes all files, by a function from (name, tensor) to the new tensor."""
    for path in sorted(folder.glob("*.safetensors")):
        changed = dict(pair for name, value in load_file(path).items() if (pair := change(name, value)) is not None)
        save_file(changed, path)


def without(tensor):
    return lambda folder: change_weights(folder, lambda name, value: None if name == tensor else (name, value))


def with_value(tensor, make):
    return lambda folder: change_weights(folder, lambda n, value: (n, make(value) if n == tensor else value))


def with_config(**fields):
    return lambda folder: change_json(folder, "config.json", **fields)


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def truncated(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-5])


BROKEN = {
    "a tensor is not in its file": (
        "gpt2",
        without("transformer.h.1.mlp.c_fc.weight"),
        r"index\.json names tensors that its files lack: transformer\.h\.1\.mlp\.c_fc\.weight",
    ),
    "a tensor is nowhere": (
        "gpt2",
        lambda folder: change_json(
            folder,
            "model.safetensors.index.json",
            weight_map={
                key: value
                for key, value in json.loads((folder / "model.safetensors.index.json").read_text())[
                    "weight_map"
                ].items()
                if key not in ("transformer.h.1.mlp.c_fc.weight", "lm_head.weight")
            },
        ),
        r"lacks transformer\.h\.1\.mlp\.c_fc\.weight, lm_head\.weight",
    ),
    "another shape": (
        "llama-gqa",
        with_value("model.layers.0.mlp.up_proj.weight", lambda value: value[:, :-1].contiguous()),
        r"model\.layers\.0\.mlp\.up_proj\.weight has the shape \(48, 31\), not \(48, 32\)",
    ),
    "quantised": (
        "llama-gqa",
        with_value("model.layers.0.mlp.up_proj.weight", lambda value: value.to(torch.int8)),
        r"up_proj\.weight is of format I8, not one of F32, F64, BF16, F16",
    ),
    "no index": (
        "gpt2",
        lambda folder: (folder / "model.safetensors.index.json").unlink(),
        r"holds model-00001-of-\d+\.safetensors but no model\.safetensors\.index\.json",
    ),
    "an index without a map": ("gpt2", write("model.safetensors.index.json", "{}"), r"index\.json has no weight_map"),
    "an index that is none": ("gpt2", write("model.safetensors.index.json", "{"), r"index\.json is not JSON"),
    "an index that leads out": (
        "gpt2",
        write("model.safetensors.index.json", '{"weight_map": {"a": "../../a.safetensors"}}'),
        r"names '\.\./\.\./a\.safetensors', which is not the name of a file",
    ),
    "a file is missing": (
        "gpt2",
        lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(),
        r"model-00002-of-\d+\.safetensors is missing",
    ),
    "a file ends early": ("gpt2", truncated, r"model-00001-of-\d+\.safetensors is damaged"),
    "no config": ("gpt2", lambda folder: (folder / "config.json").unlink(), r"config\.json can't be read"),
    "a norm is missing": (
        "olmo2",
        without("model.layers.1.self_attn.k_norm.weight"),
        r"index\.json names tensors that its files lack: model\.layers\.1\.self_attn\.k_norm\.weight",
    ),
    "heads of another width": (
        "llama-gqa",
        with_config(head_dim=64),
        r"model\.layers\.0\.self_attn\.q_proj\.weight has the shape \(32, 32\), not \(256, 32\)",
    ),
    "deep nesting": ("gpt2", write("config.json", "[" * 100_000), "nested too deeply"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_clear_error_names_it(tmp_path, whole, name):
    model, corrupt, message = BROKEN[name]
    folder = tmp_path / "folder"
    shutil.copytree(whole[model], folder)
    open_hf_folder(folder)
    corrupt(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_hf_folder(folder)
    assert str(folder) in str(caught.value)


def test_tensors_that_the_model_lacks(tmp_path):
    their_model("llama-gqa").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, file)
    with pytest.raises(CheckpointError, match=r"that the model lacks: model\.layers\.0\.self_attn\.q_norm\.weight"):
        open_hf_folder(tmp_path)


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(MODELS["llama"])))
    torch.save(their_model("llama").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only pickled weights.*save_pretrained"):
        open_hf_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        open_hf_folder(tmp_path)


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(40))
def test_any_changed_byte_is_an_error_of_ours_or_none(tmp_path, whole, seed):
    """Weights have no hashes there; whatever else is changed must not end in another exception."""
    numbers = random.Random(seed)
    folder = tmp_path / "folder"
    shutil.copytree(whole["gpt2"], folder)
    path = numbers.choice(sorted(folder.glob("*.json")) + sorted(folder.glob("*.safetensors")))
    data = bytearray(path.read_bytes())
    for _ in range(numbers.choice((1, 1, 4))):
        data[numbers.randrange(min(len(data), 600))] = numbers.randrange(256)
    path.write_bytes(data[: numbers.choice((len(data), len(data), numbers.randrange(len(data))))])
    try:
        opened = open_hf_folder(folder)
        for tensor in opened.table:
            opened.read(tensor.hf_name)[EVERYTHING]
    except CheckpointError as error:
        assert str(folder) in str(error)


# --- config.json ------------------------------------------------------------------------------------------------------


@st.composite
def models(draw):
    architecture = draw(st.sampled_from(["llama", "gpt2", "mistral"]))
    own = (
        dict(
            rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
            rope_theta=draw(st.sampled_from([1e4, 5e5])),
            num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        )
        if architecture != "gpt2"
        else dict(activation_function=draw(st.sampled_from(["gelu", "gelu_new"])), layer_norm_eps=1e-6)
    )
    if architecture == "mistral":
        own["sliding_window"] = draw(st.sampled_from([None, 1, 4096]))
    ties, bias = draw(st.booleans()), draw(st.booleans()) and architecture != "mistral"
    model = ModelConfig(**SIZES, **own, architecture=architecture, tie_word_embeddings=ties, qkv_bias=bias)
    return resolved_model(model)


@pytest.mark.parametrize("model_type", HF_MODELS)
def test_what_missing_fields_mean_is_what_transformers_takes_them_for(model_type):
    from transformers import AutoConfig  # takes seconds to import

    theirs, (_, hf) = AutoConfig.for_model(model_type).to_dict(), HF_MODELS[model_type]
    compared = [name for name, value in hf.defaults.items() if name in theirs and value is not None]
    assert len(compared) >= 4
    assert {name: hf.defaults[name] for name in compared} == {name: theirs[name] for name in compared}
    assert all(not theirs[name] for name, value in hf.fixed.items() if name in theirs and not value)
    assert all(theirs[name] == value for name, value in hf.fixed.items() if name in theirs and value)


@settings(max_examples=examples(50))
@given(models())
def test_the_configuration_comes_back(model):
    assert model_section(json.loads(json.dumps(hf_config(model))), "config.json") == model


def test_what_a_short_config_means():
    """GPT-2's file on the hub leaves these out; Llama's old ones that."""
    gpt2 = model_section({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}, "x")
    assert (gpt2.intermediate_size, gpt2.max_position_embeddings, gpt2.tie_word_embeddings) == (3072, 1024, True)
    assert (gpt2.activation_function, gpt2.layer_norm_eps, gpt2.qkv_bias) == ("gelu_new", 1e-5, True)
    sizes = {name: SIZES[name] for name in SIZES if name != "max_position_embeddings"}
    llama = model_section({"model_type": "llama", **sizes, "rope_scaling": None, "rope_theta": 5e5}, "x")
    assert (llama.rms_norm_eps, llama.rope_theta, llama.num_key_value_heads) == (1e-6, 5e5, 4)
    assert (llama.tie_word_embeddings, llama.qkv_bias, llama.max_position_embeddings) == (False, False, 2048)


def test_the_first_trainings_length_is_the_longest_sequence_where_the_file_does_not_say():
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = model_section({"model_type": "llama", **SIZES, "rope_scaling": rope}, "x")
    assert (model.rope_type, model.rope_original_positions) == ("llama3", SIZES["max_position_embeddings"])
    assert model_section({"model_type": "llama", **SIZES, "rope_scaling": None, "head_dim": 8}, "x").head_dim is None


def test_what_short_configs_of_gemma_and_gemma_2_mean():
    """The first release says gelu and means its approximation, as transformers reads it."""
    fields = dict(SIZES, model_type="gemma", hidden_act="gelu", head_dim=8, num_key_value_heads=1)
    assert model_section(fields, "x").tie_word_embeddings
    short = model_section(dict(SIZES, model_type="gemma2", head_dim=8, layer_types=["full_attention"] * 2), "x")
    assert (short.attn_logit_softcapping, short.final_logit_softcapping) == (50.0, 30.0)
    assert (short.sliding_window_pattern, short.query_pre_attn_scalar) == (1, 256)


def test_what_a_short_config_of_gemma_3_means():
    """As on the hub: without the kinds of layers, and with a base of their own for those with a window."""
    fields = dict(SIZES, model_type="gemma3_text", rope_local_base_freq=2e4, head_dim=8, query_pre_attn_scalar=8)
    short = model_section(fields, "x")
    assert (short.sliding_window, short.sliding_window_pattern, short.tie_word_embeddings) == (4096, 6, True)
    assert (short.rope_theta, short.rope_local_base_freq, short.query_pre_attn_scalar) == (1e6, 2e4, None)
    assert model_section({**fields, "rope_theta": 5e5, "query_pre_attn_scalar": 9}, "x").query_pre_attn_scalar == 9


def test_what_a_short_config_of_mistral_means():
    """transformers' MistralConfig: 8 key-value heads, and a window of 4096 unless it is null."""
    sizes = dict(SIZES, num_attention_heads=8, model_type="mistral")
    short = model_section(sizes, "x")
    assert (short.num_key_value_heads, short.sliding_window, short.rms_norm_eps) == (8, 4096, 1e-6)
    assert model_section({**sizes, "sliding_window": None}, "x").sliding_window is None


def test_the_path_of_config_json_itself(whole):
    with pytest.raises(CheckpointError, match="config.json is a file: give the Hugging Face folder"):
        open_hf_folder(whole["gpt2"] / "config.json")


def test_a_damaged_generation_config_is_refused_before_anything_is_written(tmp_path, whole):
    folder = tmp_path / "folder"
    shutil.copytree(whole["gpt2"], folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="generation_config.json is not JSON"):
        list(import_folder(folder, tmp_path / "new", weight_format=None))
    assert not (tmp_path / "new").exists()
