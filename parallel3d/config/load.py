"""From a JSON file and `section.field=value` overrides to a checked configuration.

    load_config -> Config as written, all its mistakes reported at once
    resolve     -> Config with every derivable null filled in, for a given number of ranks
    dump_config -> JSON that loads to the same Config

Mistakes of form (schema.py) and broken rules between fields (rules.py) end in one ConfigError. So that one does
not hide the other, fields with mistakes are replaced by something valid, and only the rules that read none of these
fields are checked.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from parallel3d.config import derived
from parallel3d.config.rules import broken_rules, expand_home
from parallel3d.config.schema import Config
from parallel3d.config.sections.base import Section
from parallel3d.config.sections.warmup import CurriculumLearning
from parallel3d.config.warmup_builder import length_warmup, num_steps
from parallel3d.errors import ConfigError, Problem

CACHE_DIRECTORY = "~/.cache/parallel3d"


def load_config(path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Config:
    """The configuration in `path`, changed by `overrides`; raises one ConfigError with all that is wrong with it.

    An override is `section.field=value`, its value JSON or, failing that, a plain string. A `$schema` entry in the file
    is for editors and is left out.
    """
    raw = _read(Path(path))
    raw.pop("$schema", None)
    problems = [problem for override in overrides for problem in _apply_override(raw, override)]
    config, mistakes, broken = _parse(raw)
    problems += [*mistakes, *broken_rules(config, world_size, broken)]
    if problems:
        raise ConfigError(problems)
    return config


def check_config(config: Config, world_size: int | None = None) -> None:
    """Raises one ConfigError with all broken rules between fields; `world_size` None leaves the ranks to the config."""
    if problems := list(broken_rules(config, world_size, set())):
        raise ConfigError(problems)


def resolve(config: Config, *, config_path: str | Path, world_size: int | None = None) -> Config:
    """The configuration with every null filled in that the other fields, the file's name and the ranks decide.

    Checks it on the way. What the machine or the corpus decides stays null: run.threads_per_rank, run.evaluate_every,
    data.document_chars, data.tokenizer.path, parallel.layers_per_stage. A leading ~ in a path becomes the home folder.
    """
    check_config(config, world_size)
    raw = config.model_dump()
    model, parallel, batch, lr_schedule, data, run = (
        raw[name] for name in ("model", "parallel", "batch", "lr_schedule", "data", "run")
    )
    sizes = derived.batch_sizes(config.batch)
    batch["global_batch_size"], batch["micro_batch_size"], batch["num_micro_batches"] = sizes
    model |= derived.resolved_model(config.model).model_dump()
    model["max_position_embeddings"] = config.model.max_position_embeddings or config.batch.sequence_length
    if parallel["stage_replicas"] is None:
        parallel["dp_size"] = derived.replicas_in_world(config.parallel, world_size)[0]
    run["directory"] = expand_home(run["directory"] or f"runs/{Path(config_path).stem}")
    run["resume"] = expand_home(run["resume"])
    run["initialize_from"] = run["initialize_from"] and expand_home(run["initialize_from"])
    raw["checkpoint"]["directory"] = expand_home(raw["checkpoint"]["directory"] or f"{run['directory']}/checkpoints")
    data["cache_directory"] = expand_home(data["cache_directory"] or CACHE_DIRECTORY)
    data["sources"] = [expand_home(source) for source in data["sources"]]
    if data["blend"]:
        sources = data["blend"]["sources"]
        data["blend"]["sources"] = {name: [expand_home(path) for path in paths] for name, paths in sources.items()}
    tokenizer = data["tokenizer"]
    tokenizer["vocab_size"] = tokenizer["vocab_size"] or model["vocab_size"]
    tokenizer["path"] = tokenizer["path"] and expand_home(tokenizer["path"])
    warmup = raw["warmup"]
    if config.curriculum_learning.enabled:
        warmup["sequence_length"] = length_warmup(config).model_dump()
        raw["curriculum_learning"] = CurriculumLearning().model_dump()
    warmup["batch_size"]["increment"] = warmup["batch_size"]["increment"] or batch["micro_batch_size"]
    if lr_schedule["decay_tokens"] is None:
        last_step = num_steps(Config.model_validate(raw))
        lr_schedule["decay_steps"] = lr_schedule["decay_steps"] or max(last_step, lr_schedule["warmup_steps"])
    return Config.model_validate(raw)


def dump_config(config: Config) -> str:
    """The configuration as JSON, all fields written out."""
    return config.model_dump_json(indent=2) + "\n"


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    """The file's JSON object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object_without_repeats)
    except OSError as error:
        known = sorted(Path("configs").glob("*.json"))
        names = [str(other) for other in known if other.name != "schema.json"]
        near = difflib.get_close_matches(str(path), names, n=3) or names
        fix = f"Did you mean {' or '.join(near)}?" if near else "Give the path of a JSON file"
        raise _file_error(path, f"cannot be read ({error.strerror})", fix) from error
    except json.JSONDecodeError as error:
        where = f"is not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        raise _file_error(path, where, "Mend it there, or just before") from error
    except ValueError as error:  # bytes that are not UTF-8, repeated names
        raise _file_error(path, f"is not a configuration: {error}", "Mend the file") from error
    if not isinstance(raw, dict):
        raise _file_error(path, "holds no JSON object", "Begin it with { and the sections in it")
    return raw


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, refused when a name stands in it twice: JSON itself would keep the last and say nothing."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return result


def _file_error(path: Path, rule: str, fix: str) -> ConfigError:
    return ConfigError([Problem(field="file", value=str(path), rule=rule, fix=fix)])


def _apply_override(raw: dict[str, Any], override: str) -> Iterator[Problem]:
    """Sets one field in `raw`; names that do not exist are found out by the schema."""
    field, equals, text = override.partition("=")
    *sections, name = field.split(".")
    if not equals:
        yield Problem(field=field, value="", rule="an override is section.field=value", fix="Put a value after an =")
        return
    node = raw
    for depth, section in enumerate(sections, start=1):
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            prefix = ".".join(sections[:depth])
            yield Problem(field=field, value=text, rule=f"{prefix} has no fields", fix=f"Set {prefix} itself")
            return
    try:
        node[name] = json.loads(text)
    except ValueError:
        node[name] = text


# --- mistakes of form -------------------------------------------------------------------------------------------------


class _Missing:
    def __repr__(self) -> str:
        return "(missing)"


def _parse(raw: dict[str, Any]) -> tuple[Config, list[Problem], set[str]]:
    """The configuration, its mistakes of form, and the fields that hold a stand-in because of these."""
    required = {name for name, field in Config.model_fields.items() if field.is_required()}
    repaired = {name: {} for name in required} | copy.deepcopy(raw)  # names each missing field, not their section
    problems: list[Problem] = []
    broken: set[str] = set()
    while True:
        try:
            return Config.model_validate(repaired), problems, broken
        except ValidationError as error:
            mistakes = error.errors()
        if not broken:  # a later round only meets what the first one's stand-ins left open
            problems = [_problem(mistake) for mistake in mistakes]
        broken |= {_repair(repaired, mistake["loc"]) for mistake in mistakes}


def _repair(raw: dict[str, Any], location: tuple[int | str, ...]) -> str:
    """Takes the mistake at `location` out of `raw`, and returns the field that held it.

    An unknown field goes, an optional one falls back to its default, a required one becomes 1, a required section {}.
    """
    section: type[Section] = Config
    names = [str(part) for part in location]
    for depth, name in enumerate(names, start=1):
        field = section.model_fields.get(name)
        inner = _section_of(field)
        if inner is None or depth == len(names):
            break
        raw, section = raw[name], inner
    if field is not None and field.is_required():
        raw[name] = {} if inner else 1
    else:
        raw.pop(name, None)
    return ".".join(names[:depth])


def _problem(mistake: Any) -> Problem:
    """What pydantic found, in our words."""
    location = ".".join(map(str, mistake["loc"]))
    name = ".".join(part for part in mistake["loc"] if isinstance(part, str))  # elements of a list have its meaning
    known = dict(_fields(Config))
    if mistake["type"] == "extra_forbidden":
        rule, fix = "there is no such field", _suggest(name, list(known))
        return Problem(field=location, value=mistake["input"], rule=rule, fix=fix)
    while name not in known:  # a key of a dictionary, which the user has named
        name = name.rpartition(".")[0]
    field = known[name]
    meaning = " ".join((field.description or "").split()).removesuffix(".")
    if mistake["type"] == "missing":
        return Problem(field=location, value=_Missing(), rule="is required", fix=f"Add it: {meaning}")
    is_section = mistake["type"] == "model_type"
    rule = "must be a section in {}" if is_section else mistake["msg"].removeprefix("Input ")
    return Problem(field=location, value=mistake["input"], rule=rule, fix=f"It is: {meaning}")


def _suggest(location: str, known: list[str]) -> str:
    """The field that was probably meant: one of that name in another section, or else one of a similar name here."""
    section, _, name = location.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    meant = [other for other in known if other.rpartition(".")[2] == name]
    meant = meant or [siblings[near] for near in difflib.get_close_matches(name, siblings, n=1)]
    return f"Did you mean {' or '.join(meant)}?" if meant else f"{section or 'The file'} has {', '.join(siblings)}"


def _fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All fields with their dotted names, sections included."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if inner := _section_of(field) or _element_of(field):
            yield from _fields(inner, f"{prefix}{name}.")


def _section_of(field: FieldInfo | None) -> type[Section] | None:
    """The field's own class, if it is a section; one that may be null, too."""
    kind = field.annotation if field else None
    if get_origin(kind) is UnionType:
        kind = next(part for part in get_args(kind) if part is not NoneType)
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _element_of(field: FieldInfo) -> type[Section] | None:
    """The class of the elements, if the field is a list of sections."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) is list else ()
    return kinds[0] if kinds and isinstance(kinds[0], type) and issubclass(kinds[0], Section) else None
