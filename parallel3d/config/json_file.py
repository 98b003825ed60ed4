"""Reads JSON objects from files, and sets fields of them from the command line."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallel3d.config.shipped import SCHEMA, shipped_configs
from parallel3d.errors import ConfigError, Problem, shorten

_ADDRESS = re.compile(r"([a-z][a-z0-9+]+):/+(.+)")
MAX_DEPTH = 32
"""Nested lists and objects in a value; the configuration itself nests 7."""


def read_json(path: Path) -> dict[str, Any]:
    """Returns the file's JSON object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object_without_repeats)
    except OSError as error:
        fix = _file_of_folder(path) if path.is_dir() else _file_of_address(path) or _similar_name(path)
        raise _file_error(path, f"cannot be read ({error.strerror})", fix) from error
    except json.JSONDecodeError as error:
        if error.pos == len(error.doc) == 0:
            raise _file_error(path, "is empty", "Look for the error of the command that wrote it") from error
        where = f"is not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        raise _file_error(path, where, "Fix the syntax at or just before this position") from error
    except RecursionError as error:
        raise _file_error(path, "is nested too deeply", f"Nest at most {MAX_DEPTH} lists or objects") from error
    except ValueError as error:  # bytes that are not UTF-8, repeated names
        raise _file_error(path, f"is not a configuration: {error}", "Correct the file") from error
    if not isinstance(raw, dict):
        raise _file_error(path, "must be a JSON object", "Put the sections in { and }")
    return raw


def _similar_name(path: Path) -> str:
    """What to give in place of a file that does not exist."""
    known = sorted(Path("configs").glob("*.json"))
    names = [str(other) for other in known if other.name != SCHEMA] or list(shipped_configs())
    near = difflib.get_close_matches(path.stem, {Path(name).stem: name for name in names}, n=3)
    if meant := [name for name in names if Path(name).stem in near]:
        return f"Did you mean {' or '.join(meant)}?"
    return "Give the path of a JSON file" + (f", such as {names[0]}" if names else "")


def _file_of_folder(folder: Path) -> str:
    """What to give in place of a run's folder, of Hugging Face's, or of another one."""
    file = folder / "config.json"
    if (fields := _fields_of(file)) is None:
        return f"It is a folder without a config.json. {_similar_name(folder)}"
    if "model_type" in fields:
        made = f"{folder.name or 'my_run'}.json"
        return f"It is a Hugging Face folder: parallel3d convert config {folder} > {made} makes a configuration for it"
    return f"Did you mean {file}?"


def _file_of_address(path: Path) -> str:
    """What to give in place of an address; empty for a path. A path has lost one of the address's slashes."""
    if (found := _ADDRESS.match(str(path))) is None:
        return ""
    address = f"{found[1]}://{'/' * (found[1] == 'file')}{found[2]}"
    return f"It is an address: parallel3d convert config {address} > my_run.json makes a configuration for its model"


def is_hugging_face(folder: Path) -> bool:
    """Whether it is a folder with a model's Hugging Face configuration."""
    return "model_type" in (_fields_of(folder / "config.json") or ())


def _fields_of(file: Path) -> dict[str, Any] | None:
    """The fields of a JSON object; None where a file holds none."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


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


def apply_override(raw: dict[str, Any], override: str) -> Iterator[Problem]:
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
