"""Loads a configuration from a JSON file and `section.field=value` overrides, and checks it.

    load_config -> Config as written, all its mistakes reported at once
    resolve     -> Config with every derivable null filled in, for a given number of ranks
    dump_config -> JSON that loads to the same Config

Malformed fields (schema.py) and broken rules between fields (rules.py) are reported in one ConfigError. So that one
does not hide the other, malformed fields are replaced by valid values, and the rules that read such a field are
skipped.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from parallel3d.config import derived
from parallel3d.config.json_file import apply_override, read_json
from parallel3d.config.mistakes import explain_mistake, field_name, fields_of, section_of, unusable_values
from parallel3d.config.rules import broken_rules
from parallel3d.config.schema import Config
from parallel3d.config.sections.curriculum import CurriculumLearning
from parallel3d.config.sections.section import Section, expand_home
from parallel3d.config.warmup_builder import length_warmup, needs_user_code, num_steps
from parallel3d.errors import ConfigError, Problem

CACHE_DIRECTORY = "~/.cache/parallel3d"


def load_config(path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Config:
    """Returns the configuration in `path`, changed by `overrides`; raises one ConfigError with all its problems.

    An override is `section.field=value`; a value that isn't JSON is a plain string. A `$schema` entry in the file is
    for editors and is ignored. `checkpoint.directory` follows an override of `run.directory` where the file has it at
    its default place.
    """
    raw = read_json(Path(path))
    raw.pop("$schema", None)
    default = _default_checkpoints(raw)
    if default is not None:
        del raw["checkpoint"]["directory"]
    problems = [problem for override in overrides for problem in apply_override(raw, override)]
    if default is not None and default == _default_checkpoints(raw, default):
        raw["checkpoint"]["directory"] = default
    config, mistakes, broken = _parse(raw)
    problems += [*mistakes, *broken_rules(config, world_size, broken)]
    if problems:
        raise ConfigError(problems)
    return config


def _default_checkpoints(raw: dict[str, Any], otherwise: str | None = None) -> str | None:
    """The `checkpoint.directory` of a file (`otherwise` if it has none) where it is the default of the file's own
    `run.directory`; else None. Kept beside another run.directory it would be the folder of another run."""
    run, checkpoint = raw.get("run"), raw.get("checkpoint")
    if not isinstance(run, dict) or not isinstance(checkpoint, dict) or not run.get("directory"):
        return None
    directory = checkpoint.get("directory", otherwise)
    return directory if directory == default_checkpoint_directory(run["directory"]) else None


def default_checkpoint_directory(run_directory: object) -> str:
    return f"{run_directory}/checkpoints"


def check_config(config: Config, world_size: int | None = None) -> None:
    """Raises one ConfigError with all broken rules between fields. If `world_size` is None, the config sets the
    ranks."""
    if problems := list(broken_rules(config, world_size, set())):
        raise ConfigError(problems)


def resolve(config: Config, *, config_path: str | Path, world_size: int | None = None) -> Config:
    """Checks the configuration and fills in every null that follows from other fields, the file's name and the ranks.

    What depends on the machine, the corpus or a function of the user's stays null: run.threads_per_rank,
    run.evaluate_every, data.document_chars, data.tokenizer.path, parallel.layers_per_stage; lr_schedule.decay_steps if
    counting the steps would call warmup.sequence_length.function. A leading ~ in a path becomes the home folder.
    """
    check_config(config, world_size)
    raw = config.model_dump()
    model, parallel, batch, lr_schedule = (raw[name] for name in ("model", "parallel", "batch", "lr_schedule"))
    sizes = derived.batch_sizes(config.batch)
    batch["global_batch_size"], batch["micro_batch_size"], batch["num_micro_batches"] = sizes
    model |= derived.resolved_model(config.model).model_dump()
    model["max_position_embeddings"] = config.model.max_position_embeddings or config.batch.sequence_length
    if parallel["stage_replicas"] is None:
        parallel["dp_size"] = derived.replicas_in_world(config.parallel, world_size)[0]
    tokenizer, warmup = raw["data"]["tokenizer"], raw["warmup"]
    tokenizer["vocab_size"] = tokenizer["vocab_size"] or model["vocab_size"]
    if config.curriculum_learning.enabled:
        warmup["sequence_length"] = length_warmup(config).model_dump()
        raw["curriculum_learning"] = CurriculumLearning().model_dump()
    warmup["batch_size"]["increment"] = warmup["batch_size"]["increment"] or batch["micro_batch_size"]
    if lr_schedule["decay_tokens"] is None and lr_schedule["decay_steps"] is None and not needs_user_code(config):
        last_step = num_steps(Config.model_validate(raw))
        lr_schedule["decay_steps"] = max(last_step, lr_schedule["warmup_steps"])
    _resolve_paths(raw, Path(config_path).stem)
    return Config.model_validate(raw)


def _resolve_paths(raw: dict[str, Any], name: str) -> None:
    """Fills in the folders of the run called `name`, and replaces a leading ~ in all paths."""
    data, run, checkpoint, tokenizer = raw["data"], raw["run"], raw["checkpoint"], raw["data"]["tokenizer"]
    run["directory"] = expand_home(run["directory"] or f"runs/{name}")
    run["resume"] = expand_home(run["resume"])
    run["initialize_from"] = run["initialize_from"] and expand_home(run["initialize_from"])
    checkpoint["directory"] = expand_home(checkpoint["directory"] or default_checkpoint_directory(run["directory"]))
    data["cache_directory"] = expand_home(data["cache_directory"] or CACHE_DIRECTORY)
    data["sources"] = [expand_home(source) for source in data["sources"]]
    if data["blend"]:
        sources = data["blend"]["sources"]
        data["blend"]["sources"] = {name: [expand_home(path) for path in paths] for name, paths in sources.items()}
    tokenizer["path"] = tokenizer["path"] and expand_home(tokenizer["path"])


def dump_config(config: Config) -> str:
    """Returns the configuration as JSON, with all fields."""
    return config.model_dump_json(indent=2) + "\n"


# --- malformed fields -------------------------------------------------------------------------------------------------


def _parse(raw: dict[str, Any]) -> tuple[Config, list[Problem], set[str]]:
    """Returns the configuration, the problems of malformed fields, and the fields that were replaced because of
    them."""
    required = {name for name, field in Config.model_fields.items() if field.is_required()}
    repaired: dict[str, Any] = {name: {} for name in required} | raw  # reports each missing field, not their section
    broken: set[str] = set()
    unusable = list(unusable_values(repaired))
    problems = [problem for _, problem in unusable]
    for location, _ in unusable:
        broken.add(_repair(repaired, location))
    repaired = copy.deepcopy(repaired)
    is_first, known = True, dict(fields_of(Config))
    while True:
        try:
            return Config.model_validate(repaired), problems, broken
        except ValidationError as error:
            mistakes = error.errors()
        if is_first:  # later rounds only find what the replacements of the first left open
            problems += [explain_mistake(mistake, known) for mistake in mistakes if field_name(mistake) not in broken]
            is_first = False
        broken |= {_repair(repaired, mistake["loc"]) for mistake in mistakes}


def _repair(raw: dict[str, Any], location: tuple[int | str, ...]) -> str:
    """Removes the malformed value at `location` from `raw`, and returns the name of its field.

    An unknown field is removed, an optional one gets its default, a required one becomes 1, a required section {}.
    """
    section: type[Section] = Config
    names = [str(part) for part in location]
    for depth, name in enumerate(names, start=1):
        field = section.model_fields.get(name)
        inner = section_of(field)
        if inner is None or depth == len(names) or not isinstance(raw.get(name), dict):
            break
        raw, section = raw[name], inner
    if field is not None and field.is_required():
        raw[name] = {} if inner else 1
    else:
        raw.pop(name, None)
    return ".".join(names[:depth])
