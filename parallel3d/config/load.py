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
import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from parallel3d.config import derived
from parallel3d.config.rules import broken_rules
from parallel3d.config.schema import Config
from parallel3d.config.sections.curriculum import CurriculumLearning
from parallel3d.config.sections.section import Section, expand_home
from parallel3d.config.warmup_builder import length_warmup, needs_user_code, num_steps
from parallel3d.errors import ConfigError, Problem, shorten

CACHE_DIRECTORY = "~/.cache/parallel3d"
MAX_DEPTH = 32
"""Nested lists and objects in a value; the schema itself nests 7."""
MAX_INTEGER = 2**128
"""Larger integers overflow the floats that are computed from them."""
MAX_NAME = 100
"""Characters of a mistyped name that are compared with the right ones."""


def load_config(path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Config:
    """Returns the configuration in `path`, changed by `overrides`; raises one ConfigError with all its problems.

    An override is `section.field=value`; a value that isn't JSON is a plain string. A `$schema` entry in the file is
    for editors and is ignored.
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
    checkpoint["directory"] = expand_home(checkpoint["directory"] or f"{run['directory']}/checkpoints")
    data["cache_directory"] = expand_home(data["cache_directory"] or CACHE_DIRECTORY)
    data["sources"] = [expand_home(source) for source in data["sources"]]
    if data["blend"]:
        sources = data["blend"]["sources"]
        data["blend"]["sources"] = {name: [expand_home(path) for path in paths] for name, paths in sources.items()}
    tokenizer["path"] = tokenizer["path"] and expand_home(tokenizer["path"])


def dump_config(config: Config) -> str:
    """Returns the configuration as JSON, with all fields."""
    return config.model_dump_json(indent=2) + "\n"


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    """Returns the file's JSON object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object_without_repeats)
    except OSError as error:
        known = sorted(Path("configs").glob("*.json"))
        names = [str(other) for other in known if other.name != "schema.json"]
        near = difflib.get_close_matches(path.stem, {Path(name).stem: name for name in names}, n=3)
        meant = [name for name in names if Path(name).stem in near]
        fix = f"Did you mean {' or '.join(meant)}?" if meant else "Give the path of a JSON file"
        fix += f", such as {names[0]}" if names and not meant else ""
        raise _file_error(path, f"cannot be read ({error.strerror})", fix) from error
    except json.JSONDecodeError as error:
        where = f"is not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        raise _file_error(path, where, "Fix the syntax at or just before this position") from error
    except RecursionError as error:
        raise _file_error(path, "is nested too deeply", f"Nest at most {MAX_DEPTH} lists or objects") from error
    except ValueError as error:  # bytes that are not UTF-8, repeated names
        raise _file_error(path, f"is not a configuration: {error}", "Correct the file") from error
    if not isinstance(raw, dict):
        raise _file_error(path, "must be a JSON object", "Put the sections in { and }")
    return raw


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; raises ValueError for a repeated name, of which JSON itself keeps the last."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{shorten(repr(name))} appears twice in one object")
        result[name] = value
    return result


def _file_error(path: Path, rule: str, fix: str) -> ConfigError:
    return ConfigError([Problem(field="file", value=str(path), rule=rule, fix=fix)])


def _apply_override(raw: dict[str, Any], override: str) -> Iterator[Problem]:
    """Sets one field in `raw`. The schema reports names that don't exist."""
    field, equals, text = override.partition("=")
    *sections, name = field.split(".")
    if not equals:
        yield Problem(field=field, value="", rule="must have the form section.field=value", fix="Add = and a value")
        return
    node = raw
    for depth, section in enumerate(sections, start=1):
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            prefix = ".".join(sections[:depth])
            yield Problem(
                field=field, value=text, rule=f"doesn't exist: {prefix} is not a section", fix=f"Set {prefix} itself"
            )
            return
    try:
        node[name] = json.loads(text)
    except ValueError:
        node[name] = text
    except RecursionError:
        yield Problem(
            field=field, value=text, rule="is nested too deeply", fix=f"Nest at most {MAX_DEPTH} lists or objects"
        )


# --- malformed fields -------------------------------------------------------------------------------------------------


class _Missing:
    def __repr__(self) -> str:
        return "(missing)"


def _parse(raw: dict[str, Any]) -> tuple[Config, list[Problem], set[str]]:
    """Returns the configuration, the problems of malformed fields, and the fields that were replaced because of
    them."""
    required = {name for name, field in Config.model_fields.items() if field.is_required()}
    repaired: dict[str, Any] = {name: {} for name in required} | raw  # reports each missing field, not their section
    broken: set[str] = set()
    unusable = list(_unusable_values(repaired))
    problems = [problem for _, problem in unusable]
    for location, _ in unusable:
        broken.add(_repair(repaired, location))
    repaired = copy.deepcopy(repaired)
    is_first, known = True, dict(_fields(Config))
    while True:
        try:
            return Config.model_validate(repaired), problems, broken
        except ValidationError as error:
            mistakes = error.errors()
        if is_first:  # later rounds only find what the replacements of the first left open
            problems += [_problem(mistake, known) for mistake in mistakes if _field_name(mistake) not in broken]
            is_first = False
        broken |= {_repair(repaired, mistake["loc"]) for mistake in mistakes}


def _field_name(mistake: Any) -> str:
    return ".".join(map(str, mistake["loc"]))


def _unusable_values(raw: dict[str, Any]) -> Iterator[tuple[tuple[int | str, ...], Problem]]:
    """(location, problem) of values that nothing here can compute with, or write to a file.

    Walks with a list instead of recursion, so that no nesting is too deep for it.
    """
    pending: list[tuple[tuple[int | str, ...], Any]] = [((), raw)]
    while pending:
        location, node = pending.pop()
        field, rule = ".".join(map(str, location)), ""
        if isinstance(node, dict | list):
            if len(location) > MAX_DEPTH:
                rule, fix = f"is nested in more than {MAX_DEPTH} lists or objects", "Give it fewer levels"
            else:
                pending += [((*location, name), value) for name, value in _items(node)]
        elif isinstance(node, int) and abs(node) > MAX_INTEGER:
            rule, fix = "must be at most 2**128", "Use a smaller number"
        elif isinstance(node, str) and not _is_text((*location, node)):
            rule, fix = "must be text that UTF-8 can encode, and has half of a surrogate pair", "Remove it"
        if rule:
            shown = "(nested)" if isinstance(node, dict | list) else node
            yield location, Problem(field=field, value=shown, rule=rule, fix=fix)


def _items(node: dict[str, Any] | list[Any]) -> Iterator[tuple[int | str, Any]]:
    yield from node.items() if isinstance(node, dict) else enumerate(node)


def _is_text(parts: Iterable[object]) -> bool:
    try:
        return all(str(part).encode() is not None for part in parts)
    except UnicodeEncodeError:
        return False


def _repair(raw: dict[str, Any], location: tuple[int | str, ...]) -> str:
    """Removes the malformed value at `location` from `raw`, and returns the name of its field.

    An unknown field is removed, an optional one gets its default, a required one becomes 1, a required section {}.
    """
    section: type[Section] = Config
    names = [str(part) for part in location]
    for depth, name in enumerate(names, start=1):
        field = section.model_fields.get(name)
        inner = _section_of(field)
        if inner is None or depth == len(names) or not isinstance(raw.get(name), dict):
            break
        raw, section = raw[name], inner
    if field is not None and field.is_required():
        raw[name] = {} if inner else 1
    else:
        raw.pop(name, None)
    return ".".join(names[:depth])


def _problem(mistake: Any, known: dict[str, FieldInfo]) -> Problem:
    """Translates an error of pydantic's."""
    location = _field_name(mistake)
    name = ".".join(part for part in mistake["loc"] if isinstance(part, str))  # an element of a list has its meaning
    if mistake["type"] == "extra_forbidden":
        rule, fix = "no such field exists", _suggest(name, list(known))
        return Problem(field=location, value=mistake["input"], rule=rule, fix=fix)
    while name not in known:  # a key of a dictionary, chosen by the user
        name = name.rpartition(".")[0]
    field = known[name]
    meaning = " ".join((field.description or "").split()).removesuffix(".")
    if mistake["type"] == "missing":
        return Problem(field=location, value=_Missing(), rule="is required", fix=f"Add it: {meaning}")
    is_section = mistake["type"] == "model_type"
    rule = "must be a section in {}" if is_section else mistake["msg"].removeprefix("Input ")
    return Problem(field=location, value=mistake["input"], rule=rule, fix=f"It is: {meaning}")


def _suggest(location: str, known: list[str]) -> str:
    """Suggests the field that was probably meant: one of that name in another section, or one of a similar name
    here."""
    section, _, name = location.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    meant = [other for other in known if other.rpartition(".")[2] == name]
    meant = meant or [siblings[near] for near in difflib.get_close_matches(name[:MAX_NAME], siblings, n=1)]
    return f"Did you mean {' or '.join(meant)}?" if meant else f"{section or 'The file'} has {', '.join(siblings)}"


def _fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields all fields with their dotted names, sections included."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if inner := _section_of(field) or _element_of(field):
            yield from _fields(inner, f"{prefix}{name}.")


def _section_of(field: FieldInfo | None) -> type[Section] | None:
    """Returns the field's class if it is a section, or a section that may be null."""
    kind = field.annotation if field else None
    if get_origin(kind) is UnionType:
        kind = next(part for part in get_args(kind) if part is not NoneType)
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _element_of(field: FieldInfo) -> type[Section] | None:
    """Returns the class of the elements if the field is a list of sections."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) is list else ()
    return kinds[0] if kinds and isinstance(kinds[0], type) and issubclass(kinds[0], Section) else None
