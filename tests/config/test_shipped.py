"""The configurations in configs/: each loads, fits its own layout, and HLAT's carry the published numbers."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from models.make import make_decoder
from parallel3d.comm.tensor_parallel import solo_region
from parallel3d.config import derived
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config, json_schema
from parallel3d.layers.placement import Placement
from parallel3d.precision.policy import POLICIES

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(path for path in CONFIGS.glob("*.json") if path.name != "schema.json")


def shipped(name: str) -> Config:
    return resolve(load_config(CONFIGS / name), config_path=CONFIGS / name)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_loads_and_says_what_it_is(path: Path):
    config = shipped(path.name)
    assert config.description
    assert config.source
    assert derived.warnings(config) == []
    assert path.name in (CONFIGS / "README.md").read_text()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_builds_with_as_many_parameters_as_it_says(path: Path):
    config = shipped(path.name)
    on = Placement(tp=solo_region(), policy=POLICIES[config.precision.policy], device="meta")
    layers = range(config.model.num_hidden_layers)
    stage = make_decoder(config.model, layers, num_positions=8, on=on)
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
    assert (config.schedule.warmup_steps, config.schedule.decay_steps) == (2000, 500_000)
    assert (config.schedule.min_ratio, config.schedule.decay_form) == (0.1, "clamp")
    assert config.precision.policy == {1: "bf16_sr", 8: "bf16"}[layout[1]]  # section III-D
    assert (config.model.initializer_range, config.model.initializer_depth_scaling) == (0.02, "num_layers")


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
