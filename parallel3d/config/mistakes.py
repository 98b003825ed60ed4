"""Explains mistakes in a JSON object that should have the fields of a section: where, what, and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from parallel3d.config.json_file import MAX_DEPTH
from parallel3d.config.sections.section import Section
from parallel3d.errors import Problem

MAX_INTEGER = 2**128
"""Larger integers overflow the floats that are computed from them."""
MAX_NAME = 100
"""Characters of a mistyped name that are compared with the right ones."""


class _Missing:
    def __repr__(self) -> str:
        return "(missing)"


def explain_mistake(mistake: Any, known: dict[str, FieldInfo]) -> Problem:
    """Translates an error of pydantic's."""
    location = field_name(mistake)
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
    fix = mistake.get("ctx", {}).get("fix") or f"It is: {meaning}"
    return Problem(field=location, value=mistake["input"], rule=rule, fix=fix)


def field_name(mistake: Any) -> str:
    return ".".join(map(str, mistake["loc"]))


def _suggest(location: str, known: list[str]) -> str:
    """Suggests the field that was probably meant: one of that name in another section, or one of a similar name
    here."""
    section, _, name = location.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    meant = [other for other in known if other.rpartition(".")[2] == name]
    meant = meant or [siblings[near] for near in difflib.get_close_matches(name[:MAX_NAME], siblings, n=1)]
    return f"Did you mean {' or '.join(meant)}?" if meant else f"{section or 'The file'} has {', '.join(siblings)}"


def fields_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields all fields with their dotted names, sections included."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if inner := section_of(field) or _element_of(field):
            yield from fields_of(inner, f"{prefix}{name}.")


def section_of(field: FieldInfo | None) -> type[Section] | None:
    """Returns the field's class if it is a section, or a section that may be null."""
    kind = field.annotation if field else None
    if get_origin(kind) is UnionType:
        kind = next(part for part in get_args(kind) if part is not NoneType)
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _element_of(field: FieldInfo) -> type[Section] | None:
    """Returns the class of the elements if the field is a list of sections."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) is list else ()
    return kinds[0] if kinds and isinstance(kinds[0], type) and issubclass(kinds[0], Section) else None


def unusable_values(raw: dict[str, Any]) -> Iterator[tuple[tuple[int | str, ...], Problem]]:
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
