"""Each rule alone, with the field that its problem names; what the rules allow; numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel3d.config.load import check_config, load_config, resolve
from parallel3d.errors import ConfigError
from tests.support.config_files import problems

WAVES = {"model.rope_low_freq_factor", "model.rope_high_freq_factor"}
ORIGINAL_POSITIONS = {"model.rope_original_positions"}
LLAMA3 = (
    *("model.rope_type=llama3", "model.rope_factor=8", "model.rope_original_positions=64"),
    *("model.rope_low_freq_factor=1", "model.rope_high_freq_factor=4"),
)
INTERLEAVED = ("parallel.schedule=interleaved", "parallel.virtual_stages=2")


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (["restart.max_restarts=3"], {"restart.max_restarts"}),
        (["restart.backoff_s=400"], {"restart.backoff_s"}),
        (["checkpoint.upload=folder/below"], {"checkpoint.upload"}),
        (["checkpoint.upload=s3://"], {"checkpoint.upload"}),
        (["checkpoint.upload=s3://key:secret@bucket/run"], {"checkpoint.upload"}),
        (["checkpoint.upload=s3://bucket/run?signature=secret"], {"checkpoint.upload"}),
        (["checkpoint.upload_keep_last=3"], {"checkpoint.upload_keep_last"}),
        (["run.resume=s3://key:secret@bucket/run"], {"run.resume"}),
        (["run.initialize_from=https://host/run?signature=secret"], {"run.initialize_from"}),
        (["model.num_attention_heads=3"], {"model.hidden_size"}),
        (["model.hidden_size=20"], {"model.hidden_size"}),  # heads of width 5
        (["model.num_key_value_heads=3"], {"model.num_attention_heads"}),
        (["parallel.tp_size=8"], {"model.num_attention_heads"}),
        (
            [
                *("model.num_attention_heads=12", "model.hidden_size=24", "model.intermediate_size=48"),
                *("parallel.tp_size=6", "model.num_key_value_heads=4"),
            ],
            {"model.num_key_value_heads"},
        ),
        (["model.head_dim=5"], {"model.head_dim"}),
        (["model.rope_factor=2"], {"model.rope_factor"}),
        (["model.rope_type=linear"], {"model.rope_factor"}),
        (["model.rope_type=linear", "model.rope_factor=2", "model.rope_original_positions=8"], ORIGINAL_POSITIONS),
        (["model.rope_type=llama3"], {"model.rope_factor", *WAVES, *ORIGINAL_POSITIONS}),
        ([*LLAMA3, "model.rope_low_freq_factor=4"], {"model.rope_high_freq_factor"}),
        (["model.architecture=gpt2", *LLAMA3], {"model.rope_type", "model.rope_factor", *WAVES, *ORIGINAL_POSITIONS}),
        (["model.architecture=gpt2", "model.rope_theta=5e5"], {"model.rope_theta"}),
        (["model.architecture=gpt2", "model.rms_norm_eps=1e-6"], {"model.rms_norm_eps"}),
        (["model.layer_norm_eps=1e-6"], {"model.layer_norm_eps"}),
        (["model.activation_function=gelu"], {"model.activation_function"}),
        (["model.max_position_embeddings=7"], {"batch.sequence_length"}),
        (["model.architecture=gpt2", "model.max_position_embeddings=7"], {"batch.sequence_length"}),
        (["parallel.tp_size=2", "model.intermediate_size=33"], {"model.intermediate_size"}),
        (
            ["parallel.tp_size=2", "parallel.sequence_parallel=true", "batch.sequence_length=9"],
            {"batch.sequence_length"},
        ),
        (["parallel.pp_size=5"], {"parallel.pp_size"}),
        (["parallel.pp_size=1000000000"], {"parallel.pp_size"}),  # before a tuple of that size is built
        (["parallel.virtual_stages=1000000000"], {"parallel.virtual_stages"}),
        (["parallel.schedule=zigzag"], {"parallel.schedule"}),
        (["parallel.pp_size=2", "parallel.schedule=zb-v"], {"parallel.virtual_stages"}),
        (["parallel.pp_size=2", "parallel.schedule=interleaved"], {"parallel.virtual_stages"}),
        (["parallel.pp_size=2", "parallel.virtual_stages=2"], {"parallel.virtual_stages"}),
        (["parallel.schedule=interleaved", "parallel.virtual_stages=2"], {"parallel.schedule"}),
        (["parallel.pp_size=2", *INTERLEAVED, "parallel.virtual_stages=3"], {"parallel.pp_size"}),
        (["parallel.pp_size=2", *INTERLEAVED, "parallel.layers_per_stage=[2,2]"], {"parallel.layers_per_stage"}),
        (["parallel.layers_per_stage=[2,2]"], {"parallel.layers_per_stage"}),
        (["parallel.pp_size=2", "parallel.layers_per_stage=[2,1]"], {"parallel.layers_per_stage"}),
        (["parallel.pp_size=2", "parallel.stage_replicas=[1]"], {"parallel.stage_replicas"}),
        (["parallel.stage_replicas=[2]", "parallel.dp_size=2"], {"parallel.stage_replicas"}),
        (["batch.global_batch_size=null"], {"batch"}),
        (["batch.num_micro_batches=3"], {"batch.global_batch_size"}),
        (["batch.micro_batch_size=3"], {"batch.global_batch_size"}),
        (["batch.micro_batch_size=16"], {"batch.global_batch_size"}),
        (["parallel.dp_size=5"], {"parallel.dp_size"}),
        (["parallel.pp_size=2", "parallel.stage_replicas=[1,5]"], {"parallel.stage_replicas"}),
        (["lr_schedule.warmup_steps=6", "lr_schedule.decay_steps=5"], {"lr_schedule.warmup_steps"}),
        (["lr_schedule.warmup_tokens=6", "lr_schedule.decay_tokens=5"], {"lr_schedule.warmup_tokens"}),
        (["lr_schedule.warmup_steps=6", "lr_schedule.warmup_tokens=6"], {"lr_schedule.warmup_tokens"}),
        (["lr_schedule.decay_steps=6", "lr_schedule.decay_tokens=6"], {"lr_schedule.decay_tokens"}),
        (["data.tokenizer.vocab_size=65"], {"data.tokenizer.vocab_size"}),
        (["data.tokenizer.kind=bytes"], {"model.vocab_size"}),
        (
            ["data.tokenizer.kind=bytes", "model.vocab_size=257", "data.tokenizer.path=configs/README.md"],
            {"data.tokenizer.path"},
        ),
        (['data.sources=["nowhere.txt"]'], {"data.sources.0"}),
        (['data.sources=["~nobody/text"]'], {"data.sources.0"}),
        (["data.tokenizer.path=nowhere.model"], {"data.tokenizer.path"}),
        (
            [f"optimizer.learning_rate={10**400}", f"model.hidden_size={10**400 + 1}"],
            {"optimizer.learning_rate", "model.hidden_size"},
        ),
        (["optimizer.learning_rate=NaN"], {"optimizer.learning_rate"}),
        (['precision.stochastic_rounding=["outputs"]'], {"precision.stochastic_rounding"}),
        (["precision.loss_scale.initial=1000"], {"precision.loss_scale.initial"}),
        (["precision.loss_scale.initial=0.5"], {"precision.loss_scale.initial"}),
        (["precision.loss_scale.growth_factor=3"], {"precision.loss_scale.growth_factor"}),
        (["precision.loss_scale.growth_factor=0.5"], {"precision.loss_scale.growth_factor"}),
        (["precision.loss_scale.backoff_factor=2"], {"precision.loss_scale.backoff_factor"}),
        (["precision.loss_scale.min=0.3"], {"precision.loss_scale.min"}),
        (["debug.profile.steps=[3]"], {"debug.profile.steps"}),
        (["debug.profile.steps=[3,2]"], {"debug.profile.steps"}),
        (["debug.profile.steps=[3,11]"], {"debug.profile.steps"}),
        (["debug.dump_tensors.steps=[3,11]"], {"debug.dump_tensors.steps"}),
        (["debug.profile.ranks=[1]"], {"debug.profile.ranks"}),
        (["debug.replica_check_every=0"], {"debug.replica_check_every"}),
        (["run.num_steps=null"], {"run.num_steps"}),
        (["run.p2p=nccl", "run.device=cpu"], {"run.p2p"}),
        (["run.p2p=nccl", "run.device=cuda_shared"], {"run.p2p"}),
        (["run.p2p=nccl", "data.document_mask=true"], {"run.p2p"}),
        (["run.num_steps=null", "debug.profile.steps=[3,2]"], {"run.num_steps", "debug.profile.steps"}),
    ],
)
def test_each_rule_alone(tiny: Path, overrides: list[str], fields: set[str]):
    assert set(problems(tiny, *overrides)) == fields


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.tp_size=4", "parallel.sequence_parallel=true", "parallel.pp_size=4"],
        ["parallel.sequence_parallel=true", "batch.sequence_length=9"],
        ["parallel.pp_size=2", "parallel.layers_per_stage=[3,1]", "parallel.stage_replicas=[4,1]"],
        ["parallel.pp_size=2", *INTERLEAVED, "parallel.layers_per_stage=[1,1,1,1]"],
        ["parallel.tp_size=2", "model.vocab_size=65"],
        ["parallel.tp_size=4", "model.num_key_value_heads=2"],
        ["parallel.tp_size=4", "model.num_key_value_heads=1"],
        ["model.architecture=gpt2", "model.hidden_size=20", "model.rope_theta=1e4", "model.layer_norm_eps=1e-6"],
        [*LLAMA3, "model.num_attention_heads=3", "model.head_dim=6"],
        ["model.architecture=gpt2", "model.head_dim=5"],
        ["batch.num_micro_batches=4"],
        ["precision.policy=bf16_sr", 'precision.stochastic_rounding=["update", "outputs", "accumulation"]'],
        [
            "precision.loss_scale.initial=0.5",
            "precision.loss_scale.min=0.25",
            "precision.loss_scale.growth_interval=null",
        ],
        ["lr_schedule.kind=constant", "lr_schedule.warmup_steps=11"],
        ["lr_schedule.warmup_steps=11", "lr_schedule.decay_steps=11"],
        ["lr_schedule.warmup_steps=11", "lr_schedule.decay_tokens=5"],  # of two units: neither is known to be longer
        ["run.num_steps=null", "run.num_tokens=1000", "debug.profile.steps=[3,11]"],
        ["run.num_tokens=1000"],
        ["run.p2p=nccl", "run.device=cuda"],
        ["run.p2p=host", "run.device=cuda_shared", "data.document_mask=true"],
    ],
)
def test_what_the_rules_allow(tiny: Path, overrides: list[str]):
    load_config(tiny, overrides)


@pytest.mark.parametrize(
    ("world_size", "overrides", "field"),
    [
        (6, ["parallel.tp_size=2", "parallel.pp_size=2"], "parallel.dp_size"),
        (1, ["parallel.tp_size=2"], "parallel.dp_size"),
        (4, ["parallel.dp_size=2"], "parallel.dp_size"),
        (4, ["parallel.pp_size=2", "parallel.stage_replicas=[2,1]"], "parallel.stage_replicas"),
        (8, [], "batch.num_micro_batches"),  # 8 replicas, 4 micro-batches
    ],
)
def test_number_of_ranks(tiny: Path, world_size: int, overrides: list[str], field: str):
    assert set(problems(tiny, *overrides, world_size=world_size)) == {field}
    with pytest.raises(ConfigError):
        check_config(load_config(tiny, overrides), world_size)


def test_number_of_ranks_that_fits(tiny: Path):
    uneven = load_config(tiny, ["parallel.pp_size=2", "parallel.stage_replicas=[2,1]"], world_size=3)
    assert resolve(uneven, config_path=tiny, world_size=3).parallel.dp_size is None
    config = load_config(tiny, ["parallel.tp_size=2"], world_size=8)
    assert resolve(config, config_path=tiny, world_size=8).parallel.dp_size == 4


FAULT = dict(rank=0, step=1)


@pytest.mark.parametrize(
    ("override", "field", "rule"),
    [
        ([dict(rank=64, step=1)], "elastic.faults.0.rank", "doesn't exist: the last rank is "),
        ([FAULT, dict(rank=0, step=10**6)], "elastic.faults.1.step", "doesn't exist: the last step is "),
        ([dict(step=1)], "elastic.faults.0", "must name the worker at fault once"),
        ([dict(rank=0, joiner=1)], "elastic.faults.0", "must name the worker at fault once"),
        ([dict(coordinates="pp0")], "elastic.faults.0.coordinates", "String should match pattern"),
        ([dict(rank=0, step=1, phase="lunch")], "elastic.faults.0.phase", "should be 'build', "),
        ([dict(rank=0, step=1, rnk=1)], "elastic.faults.0.rnk", "no such field exists"),
        (5, "elastic.faults", "should be a valid list"),
    ],
)
def test_faults_that_can_not_be(tiny: Path, override: object, field: str, rule: str):
    (problem,) = problems(tiny, f"elastic.faults={json.dumps(override)}").values()
    assert problem.field == field and problem.rule.startswith(rule)


def test_timeouts_are_between_their_bounds(tiny: Path):
    (problem,) = problems(tiny, "elastic.heartbeat_timeout.min_s=9").values()
    assert problem.rule == "must be at most elastic.heartbeat_timeout.max_s (5.0)"
