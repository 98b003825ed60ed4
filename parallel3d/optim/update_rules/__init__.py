"""The update rules, one file each: every module in this folder that defines a RULE adds it, and every entry point of
the group parallel3d.update_rules. One more may be named as "package:object" (own_rule.py).

A rule's file has no torch in it at run time, so that the configuration, the planner and the optimizer read the same
class. docs/extending.md shows how to add one. Its formula for Triton, if it has one, is in `triton_<name>.py`, which is
imported only where it runs.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from parallel3d.optim.update_rules.own_rule import load_rule
from parallel3d.optim.update_rules.update_rule import EXP_AVG_SQ, MAX_STATES, MatrixRule, UpdateRule
from parallel3d.user_code import installed

_names = [module.name for module in iter_modules(__path__) if not module.name.startswith("triton_")]
_modules = [import_module(f"{__name__}.{name}") for name in _names]
_found: list[type[UpdateRule]] = [module.RULE for module in _modules if hasattr(module, "RULE")]
_found += installed("parallel3d.update_rules")

UPDATE_RULES: dict[str, type[UpdateRule]] = {
    rule.name: rule for rule in sorted(_found, key=lambda rule: (not rule.is_default, rule.name))
}
"""By name, which is `optimizer.kind`; the default comes first."""
DEFAULT_UPDATE_RULE = next(rule.name for rule in UPDATE_RULES.values() if rule.is_default)

assert len(_found) == len(UPDATE_RULES) and sum(rule.is_default for rule in _found) == 1, "two rules of one name"
for _rule in _found:
    assert len(_rule.states) <= MAX_STATES, _rule.name
    assert issubclass(_rule, MatrixRule) == (_rule.fallback is not None), _rule.name


def find_rule(kind: str) -> type[UpdateRule]:
    """The rule of a name in UPDATE_RULES, or the user's that is called "package:object"; raises ConfigError."""
    return UPDATE_RULES[kind] if kind in UPDATE_RULES else load_rule(kind, tuple(UPDATE_RULES))


def rules_of(kind: str) -> tuple[type[UpdateRule], ...]:
    """The rule `kind`, then the one that updates the parameters that it leaves out."""
    rule = find_rule(kind)
    return (rule,) if rule.fallback is None else (rule, UPDATE_RULES[rule.fallback])


def default_settings(kind: str) -> dict[str, Any]:
    """The settings of the rule and of its fallback, with their defaults."""
    rules = reversed(rules_of(kind))
    return {name: field.default for rule in rules for name, field in rule.model_fields.items()}


def has_exp_avg_sq(kind: str) -> bool:
    """Whether some parameters have a running mean of squared gradients, which decays by `optimizer.beta2`."""
    return any(EXP_AVG_SQ in rule.states for rule in rules_of(kind))


ALL_SETTINGS = tuple(dict.fromkeys(name for kind in UPDATE_RULES for name in default_settings(kind)))
"""The fields of the section `optimizer` that only some rules have."""
