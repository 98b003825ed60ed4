"""Loading: every mistake is reported, once, with its field; a resolved configuration survives a round trip."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from parallel3d.config import derived
from parallel3d.config.load import dump_config, load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.config.shipped import find_config, shipped_configs
from parallel3d.errors import ConfigError
from tests.support.config_files import TINY, problems, write
from tests.support.tiers import examples


def test_defaults_and_overrides(tiny: Path):
    overrides = [
        "parallel.tp_size=2",
        "data.tokenizer.vocab_size=32",
        "run.device=cpu",
        "parallel.layers_per_stage=[4]",
    ]
    config = load_config(tiny, [*overrides, 'run.directory="7"', "optimizer.max_grad_norm=null"])
    assert config.parallel.tp_size == 2
    assert config.data.tokenizer.vocab_size == 32
    assert config.run.device == "cpu"
    assert config.parallel.layers_per_stage == [4]
    assert config.run.directory == "7"
    assert config.optimizer.max_grad_norm is None
    assert config.optimizer.beta2 == 0.95
    assert load_config(tiny) == Config.model_validate(TINY)


def test_objects_are_frozen_and_strict():
    config = Config.model_validate(TINY)
    with pytest.raises(ValidationError):
        config.run.seed = 1  # type: ignore[misc]
    for value in ("8", 8.0, True):
        with pytest.raises(ValidationError):
            Config.model_validate(TINY | {"run": {"num_steps": value}})


def test_schema_entry_is_for_editors(tmp_path: Path):
    assert load_config(write(tmp_path, {"$schema": "./schema.json"} | TINY)) == Config.model_validate(TINY)


def test_checkpoints_follow_an_override_of_the_run(tmp_path: Path):
    """As when a resolved configuration is trained again in another folder."""
    written: dict[str, Any] = {"run": {"num_steps": 1, "directory": "a"}, "checkpoint": {"directory": "a/checkpoints"}}
    file = write(tmp_path, TINY | written)
    assert load_config(file).checkpoint.directory == "a/checkpoints"
    assert load_config(file, ["run.directory=b"]).checkpoint.directory is None
    assert load_config(file, ["run.directory=a"]).checkpoint.directory == "a/checkpoints"
    assert load_config(file, ["run.directory=b", "checkpoint.directory=c"]).checkpoint.directory == "c"
    both = ["run.directory=b", "checkpoint.directory=a/checkpoints"]
    assert load_config(file, both).checkpoint.directory == "a/checkpoints"
    elsewhere = write(tmp_path, TINY | written | {"checkpoint": {"directory": "a/other"}})
    assert load_config(elsewhere, ["run.directory=b"]).checkpoint.directory == "a/other"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("model.hiden_size=3", "Did you mean model.hidden_size?"),
        ("modle.hidden_size=3", "Did you mean model?"),
        ("run.tp_size=3", "Did you mean parallel.tp_size?"),
        ("data.tokenizer.vocab=3", "Did you mean data.tokenizer.vocab_size?"),
        ("precision.xyzzy=3", "precision has sums, policy, stochastic_rounding, loss_scale"),
    ],
)
def test_unknown_fields_name_the_nearest(tiny: Path, override: str, meant: str):
    (problem,) = problems(tiny, override).values()
    assert problem.rule == "no such field exists"
    assert problem.fix == meant


def test_all_kinds_of_mistakes_come_in_one_error(tmp_path: Path):
    raw = copy.deepcopy(TINY)
    raw["model"] |= {"num_attention_heads": 3, "hidden_dropout": 1.0, "num_hiden_layers": 4}
    del raw["model"]["num_hidden_layers"], raw["optimizer"]
    raw["parallel"] = {"stage_replicas": [0, "x"], "pp_size": 9, "tp_size": 3}
    raw["data"] = {"sources": ["no/such/*.txt"], "tokenizer": 5}
    found = problems(write(tmp_path, raw), "nonsense", "run.seed.x=1", "parallel.order=tp")
    assert set(found) == {
        "nonsense",
        "run.seed",  # the override makes it {"x": 1}
        "model.num_hidden_layers",
        "model.num_hiden_layers",
        "model.hidden_dropout",
        "optimizer.learning_rate",  # the section is missing
        "parallel.stage_replicas.0",
        "parallel.stage_replicas.1",
        "parallel.order",
        "data.tokenizer",
        "data.sources.0",
        "model.hidden_size",  # from here on rules between sound fields
        "model.intermediate_size",
    }
    assert "(missing)" in str(found["model.num_hidden_layers"])
    assert "'pp_dp_tp' or 'dp_pp_tp'" in found["parallel.order"].rule
    assert "parallel.pp_size" not in found  # its rule reads num_hidden_layers, which is missing


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{\n  "model": {,}\n}', ["tiny.json", "line 2, column 13"]),
        ('{"run": {"seed": 1, "seed": 2}}', ["tiny.json", "'seed' appears twice"]),
        ('{"description": ' + "[" * 100_000 + "]" * 100_000 + "}", ["tiny.json", "nested too deeply"]),
        ("[1]", ["tiny.json", "must be a JSON object"]),
    ],
)
def test_bad_json(tmp_path: Path, content: str, words: list[str]):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, content))
    assert all(word in str(caught.value) for word in words)


DEEP = "[" * 100 + "]" * 100


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        (f"run.num_tokens={10**400}", "run.num_tokens", "at most 2**128"),
        (f"run.seed={10**400}", "run.seed", "at most 2**128"),
        (f'data.sources=["a", {10**400}]', "data.sources.1", "at most 2**128"),
        (f"description={DEEP}", "description", "nested in more than 32"),
        ("description=" + "[" * 100_000 + "]" * 100_000, "description", "nested too deeply"),
        (f"model={DEEP}", "model", "nested in more than 32"),
        ('description="\\ud800"', "description", "surrogate"),
        ('data={"sources": ["\\ud800"]}', "data.sources.0", "surrogate"),
    ],
)
def test_values_that_nothing_can_compute_with(tiny: Path, override: str, field: str, words: str):
    """Each ended in a traceback: OverflowError, RecursionError, PydanticSerializationError."""
    found = problems(tiny, override)
    (problem,) = [problem for name, problem in found.items() if name.startswith(field) and words in problem.rule]
    assert str(problem)


def test_a_value_that_nothing_can_compute_with_hides_no_other_problem(tiny: Path):
    found = problems(tiny, 'description="\\ud800"', f"run.seed={10**400}", "parallel.tp_size=8", "run.sede=1")
    assert set(found) == {"description", "run.seed", "model.num_attention_heads", "run.sede"}


@pytest.mark.parametrize(
    "override",
    ["run.long" + "x" * 10**6 + "=1", "run.resume=" + "x" * 10**6, "parallel.layers_per_stage=" + str([1] * 10**5)],
    ids=["name", "string", "list"],
)
def test_a_message_quotes_long_values_in_part(tiny: Path, override: str):
    with pytest.raises(ConfigError) as caught:
        load_config(tiny, [override])
    assert len(str(caught.value)) < 3000


def test_a_message_lists_fifty_problems(tiny: Path):
    with pytest.raises(ConfigError, match="1,950 more") as caught:
        load_config(tiny, [f"data.sources={[1] * 2000}"])
    assert len(caught.value.problems) == 2000


def test_stages_that_no_model_has_are_refused_at_once(tiny: Path):
    assert "parallel.pp_size" in problems(tiny, "parallel.pp_size=1000000000", world_size=4)


def test_bytes_that_are_not_utf8(tmp_path: Path):
    (tmp_path / "tiny.json").write_bytes(b'{"description": "\xff"}')
    with pytest.raises(ConfigError, match="utf-8"):
        load_config(tmp_path / "tiny.json")


def test_missing_file_suggests_what_is_in_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "configs").mkdir()
    for name in ("quickstart.json", "schema.json"):
        write(tmp_path / "configs", {}, name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"configs/quikstart\.json.*Did you mean configs/quickstart\.json\?"):
        load_config("configs/quikstart.json")


def test_a_shipped_name_that_is_misspelt(tmp_path, monkeypatch):
    """In a folder without configurations of its own."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"quikstart.*Did you mean quickstart"):
        load_config("quikstart")


def test_a_folder_does_not_hide_the_configuration_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    shipped = shipped_configs()["quickstart"]
    assert find_config("quickstart") == find_config("quickstart.json") == shipped
    (tmp_path / "quickstart.json").write_text("{}")
    assert find_config("quickstart.json") == Path("quickstart.json")
    assert find_config("quickstart") == shipped


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama"}, "It is a Hugging Face folder: parallel3d convert config mine > mine.json"),
        ({"model": {}}, r"Did you mean mine/config.json\?"),
        (None, "It is a folder without a config.json. Give the path of a JSON file"),
    ],
)
def test_a_folder_in_place_of_a_file(tmp_path, monkeypatch, config, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    if config is not None:
        write(tmp_path / "mine", config, "config.json")
    with pytest.raises(ConfigError, match=rf"file = 'mine': cannot be read \(Is a directory\)\. {said}"):
        load_config(find_config("mine"))


def test_an_empty_file(tmp_path):
    """What a shell leaves of `command > file` if the command fails."""
    with pytest.raises(ConfigError, match="is empty. Look for the error of the command that wrote it"):
        load_config(write(tmp_path, "", "mine.json"))


def test_sources_may_be_files_folders_or_globs(tiny: Path):
    folder = tiny.parent
    sources = json.dumps([str(tiny), str(folder), str(folder / "*.json")])
    assert len(load_config(tiny, [f"data.sources={sources}"]).data.sources) == 3


def test_resolve_fills_what_can_be_derived(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config = resolve(load_config(tiny), config_path=tiny)
    assert (config.batch.num_micro_batches, config.model.num_key_value_heads) == (4, 4)
    assert (config.parallel.dp_size, derived.world_size(config)) == (1, 1)
    assert (config.model.qkv_bias, config.model.max_position_embeddings) == (False, 16)
    assert (config.lr_schedule.decay_steps, config.lr_schedule.decay_tokens) == (10, None)
    assert config.data.tokenizer.vocab_size == 64
    assert config.run.directory == "runs/tiny"
    assert config.data.cache_directory == "/home/somebody/.cache/parallel3d"


def test_a_decay_by_tokens_leaves_no_decay_by_steps(tiny: Path):
    lr_schedule = resolve(load_config(tiny, ["lr_schedule.decay_tokens=100"]), config_path=tiny).lr_schedule
    assert (lr_schedule.decay_steps, lr_schedule.decay_tokens) == (None, 100)


def test_resolve_knows_the_architecture(tiny: Path):
    model = resolve(load_config(tiny, ["model.architecture=gpt2"]), config_path=tiny).model
    assert (model.qkv_bias, model.max_position_embeddings, model.activation_function) == (True, 16, "gelu_new")


@settings(max_examples=examples(50), deadline=None)
@given(
    world_size=st.one_of(st.none(), st.sampled_from([4, 8])),
    seed=st.integers(0, 2**70),
    learning_rate=st.floats(1e-12, 10.0),
    description=st.text(),
    uneven=st.booleans(),
)
def test_a_resolved_configuration_survives_dump_and_load(
    tmp_path_factory: pytest.TempPathFactory, world_size, seed, learning_rate, description, uneven
):
    raw: dict[str, Any] = copy.deepcopy(TINY) | {"description": description}
    raw["run"]["seed"], raw["optimizer"]["learning_rate"] = seed, learning_rate
    raw["parallel"] = {"pp_size": 2} | ({"stage_replicas": [world_size - 1, 1]} if uneven and world_size == 4 else {})
    config = Config.model_validate(raw)
    resolved = resolve(config, config_path="configs/some.json", world_size=world_size)
    path = write(tmp_path_factory.getbasetemp(), dump_config(resolved), "dumped.json")
    again = load_config(path, world_size=world_size)
    assert again == resolved
    assert resolve(again, config_path=path, world_size=world_size) == resolved


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 40), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """TINY with a few of its places, known and unknown, overwritten or taken out."""
    raw: dict[str, Any] = copy.deepcopy(TINY)
    for _ in range(draw(st.integers(1, 4))):
        section = draw(st.sampled_from([*Config.model_fields, "other"]))
        fields = getattr(
            Config.model_fields.get(section) and Config.model_fields[section].annotation, "model_fields", {}
        )
        field = draw(st.sampled_from([None, "other", *fields]))
        if field is None or not isinstance(raw.setdefault(section, {}), dict):
            raw[section] = draw(json_values)
        elif draw(st.booleans()):
            raw[section].pop(field, None)
        else:
            raw[section][field] = draw(json_values)
    return raw


@settings(max_examples=examples(200), deadline=None)
@given(damaged())
def test_any_file_is_accepted_or_refused_with_reasons(tmp_path_factory: pytest.TempPathFactory, raw: dict[str, Any]):
    path = write(tmp_path_factory.getbasetemp(), raw, "damaged.json")
    try:
        sound = isinstance(Config.model_validate(raw), Config)
    except ValidationError:
        sound = False
    try:
        config = load_config(path)
    except ConfigError as error:
        assert error.problems
        assert all(problem.rule and problem.fix for problem in error.problems)
    else:
        assert sound
        resolve(config, config_path=path)
