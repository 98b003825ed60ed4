"""Fields that name one of ours, or an object of the user's as "package:object"."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from parallel3d.errors import ConfigError


def check_named(ours: Iterable[str], find: Callable[[str], object]) -> AfterValidator:
    """Refuses what neither is one of ours nor names an object of the user's that `find` accepts."""
    names = [f"'{name}'" for name in ours]
    known = f"{', '.join(names[:-1])} or {names[-1]}, or name an object of yours: module:object"

    def check(name: str) -> str:
        if name not in ours and ":" not in name:
            raise PydanticCustomError("unknown_name", "should be {known}", {"known": known})
        try:
            find(name)
        except ConfigError as error:
            (problem,) = error.problems
            raise PydanticCustomError("user_object", "{rule}", {"rule": problem.rule, "fix": problem.fix}) from error
        return name

    return AfterValidator(check)


def schema_of_names(ours: Iterable[str]) -> WithJsonSchema:
    """For editors: one of ours, or anything with a colon."""
    return WithJsonSchema({"anyOf": [{"enum": list(ours), "type": "string"}, {"pattern": ":", "type": "string"}]})
