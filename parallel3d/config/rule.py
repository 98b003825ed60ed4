"""Rules between fields: what a rule is, and the problems that most rules report.

A rule stands in the file of the section that it judges. It declares what it reads and is passed nothing else, so it
can't depend on more, and it is skipped where one of these fields is malformed:

    @rule("model.num_key_value_heads", "parallel.tp_size")
    def check_key_value_heads(heads: int | None, tp_size: int) -> Iterator[Problem]: ...

"section.field" passes the field's value. "section: field field" passes the section, of which the rule reads only these
fields. WORLD_SIZE passes the number of ranks, or None where no launcher has set one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from parallel3d.errors import Problem
from parallel3d.remote_address import QUERY_FIX, broken_query_rule, has_user

WORLD_SIZE = "world size"

Check = Callable[..., Iterator[Problem]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A check, and what it reads in the order of its parameters."""

    check: Check
    reads: tuple[str, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """Dotted names of all fields that the check reads."""
        return tuple(field for read in self.reads if read != WORLD_SIZE for field in fields_of(read))

    def problems(self, config: object, world_size: int | None) -> Iterator[Problem]:
        """The problems that the check finds in `config`."""
        values = (world_size if read == WORLD_SIZE else _value(config, read.partition(":")[0]) for read in self.reads)
        return self.check(*values)


def rule(*reads: str) -> Callable[[Check], Rule]:
    """Decorator: makes a rule of a check that takes the values of `reads`."""
    return lambda check: Rule(check=check, reads=reads)


def multiple_rule(field: str, divisor: str, why: str) -> Rule:
    """The rule that one field is a multiple of another. Null fields obey it."""

    @rule(field, divisor)
    def check_multiple(value: int | None, unit: int | None) -> Iterator[Problem]:
        if value is not None and unit is not None:
            yield from must_be_multiple(field, value, divisor, unit, why)

    return check_multiple


def fields_of(read: str) -> tuple[str, ...]:
    """The fields that one declaration names: "section: a b" names section.a and section.b."""
    section, _, names = read.partition(":")
    return tuple(f"{section}.{name}" for name in names.split()) or (section,)


def _value(config: object, field: str) -> Any:
    node = config
    for name in field.split("."):
        node = getattr(node, name)
    return node


# --- common problems --------------------------------------------------------------------------------------------------


def must_be_multiple(field: str, value: int, divisor: str, unit: int, why: str) -> Iterator[Problem]:
    """A problem if `value` is not a multiple of `unit`, the value of `divisor`."""
    if value % unit:
        fix = f"{nearest_multiples(value, unit)}, or change {divisor}"
        yield Problem(field=field, value=value, rule=f"must be a multiple of {divisor} ({unit}): {why}", fix=fix)


def too_large(field: str, value: object, limit: str, most: object, why: str = "") -> Problem:
    """`value` is above `most`, the value of the field `limit`."""
    return Problem(
        field=field,
        value=value,
        rule=f"must be at most {limit} ({most})" + (f": {why}" if why else ""),
        fix=f"Use at most {most}, or raise {limit}",
    )


def excludes(field: str, value: object, other: str, other_value: object, why: str) -> Problem:
    """Two fields are given that exclude each other."""
    rule = f"can't be combined with {other} ({other_value}): {why}"
    return Problem(field=field, value=value, rule=rule, fix="Remove one of them")


def required(field: str, meaning: str) -> Problem:
    """A field that other fields make necessary is null or empty."""
    return Problem(field=field, value=None, rule="is required here", fix=f"Add it: {meaning}")


def without_credentials(field: str, address: str, *, query: bool = True) -> Iterator[Problem]:
    """Addresses are kept in files of the run, where a password doesn't belong, nor a query that may be a signature;
    `query`: one that holds nothing secret, or names the environment variable that holds it, is allowed."""
    shown = address.partition("://")[0] + "://..."
    if not query and "?" in address:
        rule_text = "must not have a query: it would be kept in config.json, signature and all"
        fix = "Remove it: give the driver credentials in its environment"
        yield Problem(field=field, value=shown, rule=rule_text, fix=fix)
    elif problem := broken_query_rule(address):
        yield Problem(field=field, value=shown, rule=problem, fix=QUERY_FIX)
    if has_user(address):
        rule_text = "must not have a user or password: it would be kept in config.json"
        fix = "Give them to the driver in its environment (AWS_ACCESS_KEY_ID, HF_TOKEN, ...), and remove them here"
        yield Problem(field=field, value=shown, rule=rule_text, fix=fix)


def nearest_multiples(value: int, unit: int) -> str:
    """The fix that names the multiples of `unit` on both sides of `value`."""
    below = value - value % unit
    return f"Use {below} or {below + unit}" if below else f"Use {unit}"
