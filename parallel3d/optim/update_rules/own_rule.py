"""An update rule of the user's, which `optimizer.kind` names as "package:object": loaded and checked."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from inspect import getfile, isabstract
from pathlib import Path
from typing import Any

from parallel3d.errors import ConfigError, Problem
from parallel3d.optim.update_rules.update_rule import EXP_AVG_SQ, MAX_STATES, MatrixRule, UpdateRule
from parallel3d.user_code import load_object

FIELD = "optimizer.kind"


@cache
def load_rule(name: str, ours: tuple[str, ...]) -> type[UpdateRule]:
    """The class that is called `name`; raises ConfigError, where it can't be one with all reasons."""
    found = load_object(name, field=FIELD)
    broken = list(_broken_rules(found, ours))
    if broken:
        fix = "docs/extending.md has an example of an update rule"
        raise ConfigError([Problem(field=FIELD, value=name, rule="; ".join(broken), fix=fix)])
    rule: type[UpdateRule] = found
    return rule


def _broken_rules(found: Any, ours: tuple[str, ...]) -> Iterator[str]:
    """Why this can't be an update rule."""
    if not (isinstance(found, type) and issubclass(found, UpdateRule)):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        yield f"is {kind}, not a subclass of UpdateRule of parallel3d.optim.update_rules.update_rule"
        return
    missing = [name for name in ("name", "states") if not hasattr(found, name)]
    if missing or isabstract(found):
        undefined = ", ".join([*missing, *sorted(found.__abstractmethods__)])
        yield f"does not define {undefined}"
        return
    if found.name in ours:
        yield f"has the name of another rule, {found.name!r}"
    if len(found.states) > MAX_STATES:
        yield f"keeps {len(found.states)} states, of at most {MAX_STATES}"
    if EXP_AVG_SQ in found.states and "beta2" not in found.model_fields:
        yield "keeps EXP_AVG_SQ, but has no field beta2"
    if issubclass(found, MatrixRule) != (found.fallback in ours):
        yield f"must have a fallback ({', '.join(ours)}) if it is a MatrixRule, and none else"
    for field, info in found.model_fields.items():
        if info.is_required():
            yield f"its field {field} has no default"
    for promise, file in (("has_triton_formula", f"triton_{found.name}.py"), ("has_c_formula", f"c_{found.name}.c")):
        if getattr(found, promise) and not Path(getfile(found)).with_name(file).exists():
            yield f"sets {promise}, but {file} is not beside its file"
