"""Warmups of the batch in the configuration: both forms, refused settings, descriptions."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from parallel3d.config.load import check_config, dump_config, load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.config.warmup_builder import (
    build_shape_schedule,
    check_length_function,
    describe_warmup,
    num_steps,
    run_length,
)
from parallel3d.errors import ConfigError, UserError

BASE: dict[str, dict[str, Any]] = {
    "model": {
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
    },
    "batch": {"global_batch_size": 64, "micro_batch_size": 4, "sequence_length": 1024},
    "optimizer": {"learning_rate": 1e-3},
    "run": {"num_steps": 40_000},
}
LINEAR = {"kind": "linear", "start": 8, "duration": 20_000}
DEEPSPEED = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 1024,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 20_000, "difficulty_step": 8},
}


def config_of(**sections: dict[str, Any]) -> Config:
    raw = copy.deepcopy(BASE)
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values
    return Config.model_validate(raw)


def resolved(**sections: dict[str, Any]) -> Config:
    return resolve(config_of(**sections), config_path="some.json")


def problems(**sections: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        check_config(config_of(**sections))
    return {problem.field: str(problem) for problem in caught.value.problems}


def lengths(config: Config, steps: range = range(0, 30_000, 7)) -> list[int]:
    shape_schedule = build_shape_schedule(config)
    return [shape_schedule.shape(step, step * 65_536).sequence_length for step in steps]


# --- DeepSpeed's block ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ({}, LINEAR),
        (
            {
                "schedule_type": "fixed_root",
                "schedule_config": {"total_curriculum_step": 9000, "difficulty_step": 16, "root_degree": 3},
                "min_difficulty": 64,
            },
            {"kind": "root", "start": 64, "end": 1024, "duration": 9000, "exponent": 1 / 3, "multiple": 16},
        ),
        (
            {
                "schedule_type": "fixed_discrete",
                "min_difficulty": 128,
                "schedule_config": {"difficulty": [128, 512, 1024], "max_step": [5000, 7000]},
            },
            {"kind": "discrete", "lengths": [128, 512, 1024], "until": [5000, 7000]},
        ),
    ],
    ids=["fixed_linear", "fixed_root", "fixed_discrete"],
)
def test_deepspeeds_block_is_another_way_to_say_it(theirs: dict[str, Any], ours: dict[str, Any]):
    block = resolved(curriculum_learning=DEEPSPEED | theirs)
    plain = resolved(warmup={"sequence_length": ours})
    assert lengths(block) == lengths(plain) and len(set(lengths(block))) > 2
    assert not block.curriculum_learning.enabled  # resolved, there is one form


def test_a_resolved_block_survives_dump_and_load(tmp_path: Path):
    config = resolved(curriculum_learning=DEEPSPEED)
    path = tmp_path / "dumped.json"
    path.write_text(dump_config(config))
    assert load_config(path) == config and resolve(load_config(path), config_path="some.json") == config


@pytest.mark.parametrize(
    "change, field, words",
    [
        ({"min_difficulty": 4}, "min_difficulty", "Use 8"),  # DeepSpeed begins at 8
        ({"max_difficulty": 1020}, "max_difficulty", "Use 1016 or 1024"),  # it stays at 1,016, then takes 1,020
        ({"max_difficulty": 2048}, "max_difficulty", "at most batch.sequence_length (1024)"),
        ({"min_difficulty": 1024, "max_difficulty": 512}, "min_difficulty", "the warmup ends with it"),
        ({"max_difficulty": None}, "max_difficulty", "is required"),
        ({"schedule_type": None}, "schedule_type", "is required"),
        ({"schedule_type": "fixed_root"}, "schedule_config.root_degree", "fixed_root requires it"),
        ({"schedule_config": {"difficulty_step": 8}}, "schedule_config.total_curriculum_step", "is required"),
        ({"schedule_type": "custom"}, "schedule_type", "module:function"),
        (
            {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 1000, 1024], "max_step": [5]}},
            "schedule_config.max_step",
            "Give 2 numbers",
        ),
        (
            {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 12], "max_step": [5]}},
            "schedule_config.difficulty.1",
            "Use 8 or 16",
        ),
    ],
)
def test_what_deepspeed_lets_through_is_refused(change: dict[str, Any], field: str, words: str):
    found = problems(curriculum_learning=DEEPSPEED | change)
    assert list(found) == [f"curriculum_learning.{field}"] and words in found[f"curriculum_learning.{field}"]


def random_discrete(random: Random) -> dict[str, Any]:
    """A block with lengths in any order, and a max_difficulty that some of them may reach early."""
    count = random.randint(2, 5)
    difficulty = [8 * random.randint(1, 128) for _ in range(count)]
    top = random.choice([max(difficulty), random.choice(difficulty), 8 * random.randint(2, 128)])
    return DEEPSPEED | {
        "min_difficulty": 8,
        "max_difficulty": max(top, 16),
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": difficulty, "max_step": sorted(random.sample(range(1, 300), count - 1))},
    }


def test_every_discrete_block_equals_deepspeed_or_is_refused():
    """DeepSpeed's scheduler keeps the first length that reaches max_difficulty."""
    module = pytest.importorskip("deepspeed.runtime.data_pipeline.curriculum_scheduler")
    random, num_refused, num_frozen = Random(20), 0, 0
    known = {"difficulty": [8, 280, 232, 40], "max_step": [58, 138, 237]}
    blocks = [DEEPSPEED | {"max_difficulty": 280, "schedule_type": "fixed_discrete", "schedule_config": known}]
    for block in [*blocks, *(random_discrete(random) for _ in range(200))]:
        scheduler = module.CurriculumScheduler(copy.deepcopy(block))
        theirs = [scheduler.update_difficulty(step) for step in range(1, 400)]
        try:
            ours = lengths(resolved(curriculum_learning=block), range(399))
        except ConfigError as error:
            (problem,) = error.problems
            assert problem.field == "curriculum_learning.schedule_config.difficulty" and len(set(theirs)) == 1
            num_refused += 1
        else:
            assert ours == theirs, block
            num_frozen += theirs[-1] != block["schedule_config"]["difficulty"][-1]
    assert num_refused < 120 and num_frozen > 20


@pytest.mark.parametrize("kind, degree", [("fixed_linear", {}), ("fixed_root", {"root_degree": 2})])
def test_rising_blocks_equal_deepspeed(kind: str, degree: dict[str, int]):
    module = pytest.importorskip("deepspeed.runtime.data_pipeline.curriculum_scheduler")
    details = {"total_curriculum_step": 3000, "difficulty_step": 16} | degree
    block = DEEPSPEED | {"min_difficulty": 16, "schedule_type": kind, "schedule_config": details}
    scheduler = module.CurriculumScheduler(copy.deepcopy(block))
    theirs = [scheduler.update_difficulty(step) for step in range(1, 4001)]
    assert lengths(resolved(curriculum_learning=block), range(4000)) == theirs


def test_a_discrete_block_begins_below_its_end():
    block = DEEPSPEED | {
        "min_difficulty": 64,
        "max_difficulty": 64,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [8, 64], "max_step": [5]},
    }
    assert list(problems(curriculum_learning=block)) == ["curriculum_learning.min_difficulty"]


def test_one_form_at_a_time():
    assert list(problems(curriculum_learning=DEEPSPEED, warmup={"sequence_length": LINEAR})) == ["curriculum_learning"]


# --- our own form -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "warmup, fields",
    [
        ({"kind": "linear"}, ["duration"]),
        ({"kind": "root", "start": 12, "duration": 10}, ["start"]),
        ({"kind": "linear", "start": 8, "end": 1000, "multiple": 16, "duration": 10}, ["start", "end"]),
        ({"kind": "linear", "duration": 10, "lengths": [8]}, ["lengths"]),
        ({"kind": "linear", "duration": 10, "exponent": 2.0}, ["exponent"]),
        ({"kind": "discrete", "lengths": [128, 1024]}, ["until"]),
        ({"kind": "discrete", "lengths": [128], "until": []}, ["until"]),
        ({"kind": "discrete", "lengths": [8, 16, 24], "until": [5, 5]}, ["until"]),
        ({"kind": "periodic", "lengths": [128, 1024], "until": [900]}, ["until"]),
        ({"kind": "discrete", "lengths": [128, 2048], "until": [9]}, ["lengths.1"]),
        ({"kind": "custom"}, ["function"]),
        ({"kind": "custom", "function": "math"}, ["function"]),
        ({"kind": "custom", "function": "math:"}, ["function"]),
        ({"kind": "discrete", "lengths": [8, 16], "until": [5], "duration": 7}, ["duration"]),
    ],
)
def test_each_rule_of_the_length(warmup: dict[str, Any], fields: list[str]):
    assert list(problems(warmup={"sequence_length": warmup})) == [f"warmup.sequence_length.{name}" for name in fields]


def test_lengths_are_cut_evenly_by_tensor_parallel_ranks():
    """With sequence parallelism: multiples of lcm(8, tp_size), at every step."""
    for tp_size, batch in ((1, 1024), (2, 1024), (4, 1024), (8, 1024), (3, 1032)):
        parallel = {"tp_size": tp_size, "sequence_parallel": True}
        model = {"num_attention_heads": 24 if tp_size in (3, 8) else 12, "hidden_size": 96}
        sections = dict(parallel=parallel, model=model, batch={"sequence_length": batch})
        start = 24 if tp_size == 3 else 8
        config = resolved(**sections, warmup={"sequence_length": LINEAR | {"start": start}})
        assert all(length % tp_size == 0 and length % 8 == 0 for length in lengths(config))
        assert max(lengths(config)) == batch
    wrong = problems(**sections, warmup={"sequence_length": LINEAR})
    assert "multiple of 24" in wrong["warmup.sequence_length.start"] and "tp_size = 3" in str(wrong)


def test_an_adaptive_length_needs_evaluations_and_a_last_step():
    needs = problems(
        warmup={"sequence_length": {"kind": "adaptive", "tolerance": 0.9}},
        run={"num_steps": None, "num_tokens": 10},
        data={"validation_fraction": 0.0},
    )
    assert set(needs) == {
        "run.evaluate_every",
        "run.num_steps",
        "data.validation_fraction",
        "warmup.sequence_length.tolerance",
    }
    fine = {"num_steps": 10, "num_tokens": 10, "evaluate_every": 2}
    config = resolved(warmup={"sequence_length": {"kind": "adaptive"}}, run=fine)
    assert run_length(config).num_steps == 10 and "adaptive, from 8 to 1,024" in next(describe_warmup(config))


def test_a_length_by_the_variance_needs_values_and_a_last_step():
    needs = problems(
        warmup={"sequence_length": {"kind": "variance", "tolerance": 0.9}},
        run={"num_steps": None, "num_tokens": 10},
        monitor={"norms_every": None},
    )
    assert set(needs) == {"run.num_steps", "monitor.norms_every", "warmup.sequence_length.tolerance"}
    lion = problems(warmup={"sequence_length": {"kind": "variance"}}, run={"num_steps": 10}, optimizer={"kind": "lion"})
    assert set(lion) == {"optimizer.kind"}
    fine = {"num_steps": 10, "num_tokens": None}
    config = resolved(warmup={"sequence_length": {"kind": "variance", "interval": 5}}, run=fine)
    assert run_length(config).num_steps == 10 and "after 5 steps in a row" in next(describe_warmup(config))
    assert build_shape_schedule(config).length.interval == 5


def test_a_function_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_paces.py").write_text("def slowly(step):\n    return 16 if step < 5 else 1024\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = resolved(warmup={"sequence_length": {"kind": "custom", "function": "my_paces:slowly"}})
    assert lengths(config, range(6)) == [16, 16, 16, 16, 1024, 1024]
    assert list(describe_warmup(config)) == [
        "sequence length: custom, my_paces:slowly; tokens beyond are dropped",
        "40,000 steps in total, 2,621,181,952 tokens to train on, 258,048 dropped",
    ]
    sys.modules.pop("my_paces")


@pytest.mark.parametrize("function", ["no_such_module:pace", "math:pi", "math:no_such_function"])
def test_a_function_that_can_not_be_imported(function: str):
    config = resolved(warmup={"sequence_length": {"kind": "custom", "function": function}})
    with pytest.raises(ConfigError, match=r"warmup\.sequence_length\.function = .*can't be imported"):
        check_length_function(config)


@pytest.mark.parametrize("function", ["math:floor", "operator:add"])  # a length of 1; takes two arguments
def test_a_function_that_returns_no_length(function: str):
    with pytest.raises(UserError, match="warmup.sequence_length.function"):
        check_length_function(resolved(warmup={"sequence_length": {"kind": "custom", "function": function}}))


@pytest.mark.parametrize("run", [{"num_steps": 8}, {"num_steps": None, "num_tokens": 10**6}])
def test_reading_a_configuration_runs_no_code_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: dict[str, Any]
):
    (tmp_path / "loud.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = resolved(run=run, warmup={"sequence_length": {"kind": "custom", "function": "loud:length"}})
    assert "loud" not in sys.modules
    assert config.lr_schedule.decay_steps == run["num_steps"]


def test_kind_none_switches_off_the_fields_of_other_kinds():
    for other in (LINEAR, {"lengths": [3, 5], "until": [7], "recycle": True}, {"function": "nonsense", "start": 5000}):
        config = resolved(warmup={"sequence_length": other | {"kind": "none"}}, data={"slice": {}, "sources": ["."]})
        assert build_shape_schedule(config) == build_shape_schedule(resolved())
        assert list(describe_warmup(config)) == []


def test_a_slice_is_read_in_whole_sequences(tmp_path: Path):
    recycled = {"sequence_length": LINEAR | {"recycle": True}}
    assert "warmup.sequence_length.recycle" in problems(warmup=recycled, data={"slice": {}})


@pytest.mark.parametrize(
    "size, fields",
    [
        ({"start": 16}, ["warmup.batch_size.duration"]),
        ({"start": 16, "duration": 10, "increment": 6}, ["warmup.batch_size.increment"]),
        ({"start": 18, "duration": 10}, ["warmup.batch_size.start"]),
        ({"start": 24, "duration": 10, "increment": 24}, ["batch.global_batch_size"]),
        ({"start": 68, "duration": 10}, ["warmup.batch_size.start"]),
        ({"start": 4, "duration": 10}, ["warmup.batch_size.start"]),  # two replicas
    ],
)
def test_each_rule_of_the_batch_size(size: dict[str, Any], fields: list[str]):
    assert list(problems(warmup={"batch_size": size}, parallel={"dp_size": 2})) == fields


def test_a_mistake_of_form_hides_no_rule_and_makes_none_up(tmp_path: Path):
    raw = BASE | {
        "warmup": {"sequence_length": LINEAR | {"duration": "long"}, "batch_size": {"start": 6, "duration": 9}}
    }
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    found = {problem.field for problem in caught.value.problems}
    assert found == {"warmup.sequence_length.duration", "warmup.batch_size.start"}


# --- what follows from it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run, warmup, steps",
    [
        ({"num_steps": 100}, {}, 100),
        ({"num_steps": None, "num_tokens": 655_360}, {}, 10),  # 64 * 1,024 tokens a step
        ({"num_steps": None, "num_tokens": 655_361}, {}, 11),
        ({"num_steps": 10, "num_tokens": 10**12}, {}, 10),
        ({"num_steps": 100, "num_tokens": 1}, {}, 1),
        ({"num_steps": None, "num_tokens": 655_360}, {"batch_size": {"start": 32, "duration": 4}}, 11),
        (
            {"num_steps": None, "num_tokens": 655_360},
            {"sequence_length": {"kind": "discrete", "lengths": [512, 1024], "until": [4]}},
            12,
        ),
    ],
)
def test_a_run_ends_by_steps_or_by_tokens(run: dict[str, Any], warmup: dict[str, Any], steps: int):
    config = resolved(run=run, warmup=warmup)
    assert run_length(config).num_steps == num_steps(config) == config.lr_schedule.decay_steps == steps


def test_the_description_of_a_warmup():
    config = resolved(warmup={"sequence_length": LINEAR}, run={"num_steps": None, "num_tokens": 2 * 10**9})
    assert list(describe_warmup(config)) == [
        "sequence length: linear, from 8 to 1,024 over 20,000 steps, 128 lengths; tokens beyond are dropped",
        "full size from step 20,000; 40,518 steps in total, 2,000,060,416 tokens to train on, 655,327,232 dropped",
    ]
    config = resolved(warmup={"batch_size": {"start": 16, "duration": 10**9, "unit": "tokens"}})
    assert list(describe_warmup(config)) == [
        "batch size: from 16 to 64 over 1,000,000,000 tokens, 13 sizes, each with its own pipeline schedule",
        "full size from step 30,212; 40,000 steps in total, 1,641,533,440 tokens to train on",
    ]
    assert list(describe_warmup(resolved())) == []


@pytest.mark.parametrize(
    "kind, words",
    [
        (LINEAR | {"kind": "root", "recycle": True}, "from 8 to 1,024 over 20,000 steps, exponent 0.5"),
        ({"kind": "discrete", "lengths": [128, 1024], "until": [9000]}, "128 to step 9,000, then 1,024, 2 lengths"),
        ({"kind": "periodic", "lengths": [128, 1024], "until": [900, 1000]}, "1,024 to step 1,000, in a cycle"),
    ],
)
def test_every_kind_has_its_words(kind: dict[str, Any], words: str):
    line = next(describe_warmup(resolved(warmup={"sequence_length": kind}, run={"num_steps": 8})))
    assert words in line and ("no token is dropped" in line) == kind.get("recycle", False)
