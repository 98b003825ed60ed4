"""The configurations in configs/: each loads, fits its own layout, and HLAT's carry the published numbers."""

from __future__ import annotations

import json
import shlex
from math import prod
from pathlib import Path

import pytest

from parallel3d.config import derived
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config, json_schema
from parallel3d.config.warmup_builder import run_length
from parallel3d.config.warnings import warnings
from parallel3d.layers.placement import LayerContext
from parallel3d.models.make import make_decoder
from parallel3d.parallel.tensor_parallel import solo_region
from parallel3d.precision.policy import POLICIES

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(path for path in CONFIGS.glob("*.json") if path.name != "schema.json")


def shipped(name: str, *overrides: str) -> Config:
    return resolve(load_config(CONFIGS / name, overrides), config_path=CONFIGS / name)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_loads_and_says_what_it_is(path: Path):
    config = shipped(path.name)
    assert config.description
    assert config.source
    assert warnings(config) == []
    assert path.name in (CONFIGS / "README.md").read_text()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_builds_with_as_many_parameters_as_it_says(path: Path):
    config = shipped(path.name)
    context = LayerContext(tp=solo_region(), policy=POLICIES[config.precision.policy], device="meta")
    layers = range(config.model.num_hidden_layers)
    stage = make_decoder(config.model, layers, num_positions=8, context=context)
    assert sum(p.numel() for p in stage.parameters()) == derived.num_parameters(config.model)


def test_schema_is_current():
    assert (CONFIGS / "schema.json").read_text() == json_schema(), (
        "run: python -m parallel3d.config.schema > configs/schema.json"
    )


def test_schema_explains_every_field():
    schema = json.loads(json_schema())
    sections = [schema, *schema["$defs"].values()]  # a field that is a section is explained there
    fields = [field for section in sections for field in section["properties"].values()]
    assert len(fields) > 50
    assert all(field.get("description") or "$ref" in field for field in fields)
    assert all(section["description"] for section in sections)
    assert all(section["additionalProperties"] is False for section in sections)


@pytest.mark.parametrize(
    ("name", "num_parameters", "learning_rate", "layout"),
    [
        ("hlat_7b.json", 6_738_415_616, 3e-4, (8, 1, 256)),
        ("hlat_70b.json", 68_976_648_192, 1.5e-4, (32, 8, 32)),
    ],
)
def test_hlat(name: str, num_parameters: int, learning_rate: float, layout: tuple[int, int, int]):
    config = shipped(name)
    assert derived.num_parameters(config.model) == num_parameters
    assert derived.tokens_per_step(config) == 4_194_304
    assert (config.parallel.tp_size, config.parallel.pp_size, config.parallel.dp_size) == layout
    assert derived.world_size(config) == prod(layout)  # NeuronCores: 64 and 256 nodes of 32
    assert config.batch.num_micro_batches // max(derived.stage_replicas(config)) == {1: 4, 8: 32}[layout[1]]
    assert (config.optimizer.learning_rate, config.optimizer.beta2) == (learning_rate, 0.95)
    assert (config.optimizer.weight_decay, config.optimizer.decay_norms_and_biases) == (0.1, True)
    assert (config.lr_schedule.warmup_steps, config.lr_schedule.decay_steps) == (2000, 500_000)
    assert (config.lr_schedule.min_ratio, config.lr_schedule.decay_form) == (0.1, "clamp")
    assert config.precision.policy == {1: "bf16_sr", 8: "bf16"}[layout[1]]  # section III-D
    assert config.parallel.recompute == "selective"  # section III-D
    assert (config.model.initializer_range, config.model.initializer_depth_scaling) == (0.02, "num_layers")


def test_mistral_7b():
    """Table 1 of the paper; 7,241,732,096 is what Hugging Face's mistralai/Mistral-7B-v0.1 counts."""
    config = shipped("mistral_7b.json")
    assert derived.num_parameters(config.model) == 7_241_732_096
    assert derived.attention_window(config.model, 0) == 4096
    assert derived.tokens_per_step(config) == 4_194_304
    assert derived.tokens_per_step(config) * config.run.num_steps == pytest.approx(2e12, rel=1e-5)
    assert derived.world_size(config) == 512


def test_gpt2_163m():
    config = shipped("gpt2_163m.json")
    assert derived.num_parameters(config.model) == 163_009_536
    assert derived.tokens_per_step(config) * config.run.num_steps == 3_260_268_544  # 20 tokens a parameter, rounded up
    assert derived.world_size(config) == 8
    assert config.model.max_position_embeddings == config.batch.sequence_length == 1024


def test_tinystories_78m():
    config = shipped("tinystories_78m.json")
    assert derived.num_parameters(config.model) == 78_408_704
    assert (derived.tokens_per_step(config), config.run.num_steps) == (128 * 256, 5000)
    assert derived.world_size(config) == 2


@pytest.mark.parametrize(
    ("name", "num_parameters", "batch", "learning_rate", "start", "duration", "num_steps"),
    [
        ("slw_gpt2_117m_b512.json", 124_439_808, 512, 1.5e-4, 8, 60_000, 330_000),
        ("slw_gpt2_117m_b4k.json", 124_439_808, 4096, 6e-4, 8, 30_000, 52_500),
        ("slw_gpt2_1.5b_b512.json", 1_557_611_200, 512, 1.5e-4, 64, 270_000, 427_617),
        ("slw_gpt2_1.5b_b4k.json", 1_557_611_200, 4096, 6e-4, 64, 45_000, 58_769),
    ],
)
def test_sequence_length_warmup_gpt2(
    name: str, num_parameters: int, batch: int, learning_rate: float, start: int, duration: int, num_steps: int
):
    """Tables 1 and 2 of "Sequence Length Warmup", section 3 for the rest."""
    config = shipped(name)
    model, lr_schedule, warmup = config.model, config.lr_schedule, config.warmup.sequence_length
    assert derived.num_parameters(model) == num_parameters
    assert (model.num_hidden_layers, model.hidden_size, model.num_attention_heads) in [(12, 768, 12), (48, 1600, 25)]
    assert (config.batch.global_batch_size, config.batch.sequence_length) == (batch, 1024)
    assert (warmup.kind, warmup.start, warmup.duration) == ("linear", start, duration)
    assert run_length(config).num_steps == num_steps
    assert config.run.num_tokens == lr_schedule.decay_tokens == 300_000 * 512 * 1024
    assert (config.optimizer.learning_rate, lr_schedule.warmup_steps, lr_schedule.kind) == (
        learning_rate,
        3000,
        "cosine",
    )
    assert lr_schedule.min_ratio * learning_rate == pytest.approx(1e-5, rel=1e-12)
    assert adam_of(config) == (0.9, 0.999, 1e-8, 0.01, 1.0)
    assert config.precision.policy == "fp16"
    assert derived.world_size(config) == 128


@pytest.mark.parametrize("name", [path.name for path in SHIPPED if path.name.startswith("slw_")])
def test_the_documented_baseline_loads(name: str):
    config = shipped(name, "warmup.sequence_length.kind=none")
    assert run_length(config).num_steps == -(-config.run.num_tokens // derived.tokens_per_step(config))
    assert config.lr_schedule == shipped(name).lr_schedule


def test_the_documented_baseline_of_the_aggressive_gpt3_loads():
    """Its overrides are those in the file's description."""
    description = shipped("gpt3_125m_aggressive.json").description
    overrides = shlex.split(description.partition("Baseline: ")[2])
    config = shipped("gpt3_125m_aggressive.json", *overrides)
    size = config.warmup.batch_size
    assert (size.start, size.duration, size.unit) == (128, 4_000_000_000, "tokens")
    assert config.optimizer.learning_rate == 30 * 6e-4
    assert config.warmup.sequence_length.kind == "none" and derived.world_size(config) == 128


def adam_of(config: Config) -> tuple[float | None, ...]:
    settings = config.optimizer
    return settings.beta1, settings.beta2, settings.eps, settings.weight_decay, settings.max_grad_norm


@pytest.mark.parametrize(
    ("name", "batch", "learning_rate", "min_rate", "num_tokens", "decay_tokens", "world_size"),
    [
        ("gpt3_125m.json", 256, 6e-4, 6e-5, 300_000_000_000, 260_000_000_000, 16),
        ("gpt3_125m_aggressive.json", 2048, 40 * 6e-4, 0.0, 30_000_000_000, 30_000_000_000, 128),
    ],
)
def test_gpt3(
    name: str,
    batch: int,
    learning_rate: float,
    min_rate: float,
    num_tokens: int,
    decay_tokens: int,
    world_size: int,
):
    config = shipped(name)
    assert derived.num_parameters(config.model) == 125_226_240  # GPT-2's with 2048 positions
    assert (config.batch.global_batch_size, config.batch.sequence_length) == (batch, 2048)
    assert config.optimizer.learning_rate == pytest.approx(learning_rate)
    assert config.lr_schedule.min_ratio * learning_rate == pytest.approx(min_rate)
    assert (config.lr_schedule.warmup_tokens, config.lr_schedule.decay_tokens) == (375_000_000, decay_tokens)
    assert config.run.num_tokens == num_tokens
    assert adam_of(config) == (0.9, 0.95, 1e-8, 0.1, 1.0)
    assert derived.world_size(config) == world_size


def test_gpt3_warmups():
    """Either shorter sequences or fewer: both cut the tokens of a step."""
    original, aggressive = shipped("gpt3_125m.json").warmup, shipped("gpt3_125m_aggressive.json").warmup
    size, length = original.batch_size, aggressive.sequence_length
    assert (size.start, size.duration, size.unit) == (16, 4_000_000_000, "tokens")
    assert (length.kind, length.start, length.duration) == ("linear", 72, 11_500)
    assert original.sequence_length.kind == "none" and aggressive.batch_size.start is None
    assert run_length(shipped("gpt3_125m_aggressive.json")).num_steps == 12_723
