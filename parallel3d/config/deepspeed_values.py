"""The values of a DeepSpeed file: how they are checked and read.

    ValueKind         what a value must be, in words and as a check
    OwnConfig         the configuration that the file changes: what "auto" stands for
    DeepSpeedSettings fields of ours, notices, and all that is refused
    DeepSpeedBlock    one object of the file: an absent key has DeepSpeed's default, "auto" the configuration's value
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parallel3d.errors import Problem

AUTO = "auto"
MAX_INTEGER = 2**63 - 1
MAX_SCALE_POWER = 127
"""A larger power of two is not a number of fp32, in which gradients are scaled."""


class ValueKind(NamedTuple):
    """A kind of value: in words, and as a check."""

    text: str
    fits: Callable[[Any], bool]


def is_number(value: object, least: float = 0.0, most: float = sys.float_info.max) -> bool:
    """Whether it is a finite number in these limits; true and false are none."""
    return type(value) in (int, float) and least <= value <= most  # type: ignore[operator]


def is_integer(value: object, least: int = 0, most: int = MAX_INTEGER) -> bool:
    return type(value) is int and least <= value <= most


def is_pair_of_betas(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_number(beta) and beta < 1 for beta in value)


POSITIVE_INTEGER = ValueKind("a positive integer (below 2**63)", lambda value: is_integer(value, 1))
COUNT = ValueKind("an integer of at least 0 (below 2**63)", is_integer)
SCALE_POWER = ValueKind(f"an integer from 0 to {MAX_SCALE_POWER}", lambda value: is_integer(value, 0, MAX_SCALE_POWER))
POSITIVE_NUMBER = ValueKind("a positive number", lambda value: is_number(value) and value > 0)
NUMBER = ValueKind("a number of at least 0", is_number)
RATIO = ValueKind("a number from 0 to 1", lambda value: is_number(value, 0, 1))
BETAS = ValueKind("a list of two numbers from 0 to below 1", is_pair_of_betas)
SWITCH = ValueKind("true or false", lambda value: isinstance(value, bool))
TEXT = ValueKind("text", lambda value: isinstance(value, str))
OBJECT = ValueKind("an object, { and }", lambda value: isinstance(value, Mapping))


@dataclass(frozen=True, kw_only=True)
class OwnConfig:
    """The configuration that the file changes, as JSON with its overrides, before it is checked."""

    raw: Mapping[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    """Ranks that a launcher has started; None without a launcher."""

    def value(self, section: str, name: str) -> Any:
        """The field's value; None where it is null or absent."""
        fields = self.raw.get(section)
        return fields.get(name) if isinstance(fields, Mapping) else None

    def integer(self, section: str, name: str) -> int | None:
        """The field's value if it is a positive integer, else None: checks of the configuration report others."""
        value = self.value(section, name)
        return value if POSITIVE_INTEGER.fits(value) else None


@dataclass(kw_only=True)
class DeepSpeedSettings:
    """Fields of ours, and what to say about the rest."""

    own: OwnConfig = field(default_factory=OwnConfig)
    fields: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    @property
    def overrides(self) -> list[str]:
        return [f"{name}={json.dumps(value)}" for name, value in self.fields.items()]

    def set(self, name: str, value: object) -> None:
        """Sets a field of ours; None leaves it to the configuration."""
        if value is not None:
            self.fields[name] = value

    def refuse(self, name: str, value: object, rule: str, fix: str) -> None:
        self.problems.append(Problem(field=name, value=value, rule=rule, fix=fix))

    def read(self, name: str, value: object, kind: ValueKind) -> Any:
        """The value if it is of this kind; None for "auto", and for another, which is refused."""
        if value == AUTO or kind.fits(value):
            return None if value == AUTO else value
        fix = f"Correct it, or remove {name}; {json.dumps(AUTO)} leaves it to the configuration"
        self.refuse(name, value, f"must be {kind.text}", fix)
        return None


@dataclass(frozen=True, kw_only=True)
class DeepSpeedBlock:
    """One object of the file. A null is as an absent key."""

    settings: DeepSpeedSettings
    name: str
    values: Mapping[str, Any]

    def read(self, key: str, kind: ValueKind, default: Any = None) -> Any:
        """The key's value, `default` where it is absent; None leaves the field to the configuration: for "auto", and
        for a value of another kind, which is refused."""
        value = self.values.get(key)
        return default if value is None else self.settings.read(f"{self.name}.{key}", value, kind)

    def inner(self, key: str) -> DeepSpeedBlock | None:
        """The object below a key, empty where it is absent; None where it is "auto" or refused."""
        if (values := self.read(key, OBJECT, {})) is None:
            return None
        return DeepSpeedBlock(settings=self.settings, name=f"{self.name}.{key}", values=values)

    def is_auto(self, key: str) -> bool:
        return self.values.get(key) == AUTO

    def given(self) -> Iterator[tuple[str, Any]]:
        """Keys and values without what is left to the configuration."""
        return ((key, value) for key, value in self.values.items() if value is not None and value != AUTO)

    def refuse(self, key: str, rule: str, fix: str) -> None:
        self.settings.refuse(f"{self.name}.{key}", self.values.get(key), rule, fix)

    def refuse_unknown(self, known: Set[str]) -> None:
        for key, _ in self.given():
            if key not in known:
                self.refuse(key, "is unknown", "Remove it")

    def is_on(self, own: bool) -> bool:
        """Whether the block is enabled; `own`: whether the configuration has what it enables, for "auto"."""
        if self.values.get("enabled") is None:  # DeepSpeed's default
            self.settings.notices.append(f'{self.name} is off, as in DeepSpeed: it has no "enabled": true')
            return False
        return own if self.is_auto("enabled") else bool(self.read("enabled", SWITCH))
