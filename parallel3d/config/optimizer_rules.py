"""Rules between the update rule and its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parallel3d.config.schema import Config
from parallel3d.config.specs.policies import names_of
from parallel3d.config.specs.update_rules import ALL_SETTINGS, UPDATE_RULES, default_settings
from parallel3d.errors import Problem

APEX_POLICIES = names_of(lambda policy: policy.fits_apex)


def check_backend(config: Config, world_size: int | None) -> Iterator[Problem]:
    """apex's kernel is one rule's, and updates fp32 weights."""
    policy, kind = config.precision.policy, config.optimizer.kind
    if config.optimizer.backend != "apex":
        return
    if policy not in APEX_POLICIES:
        yield Problem(
            field="optimizer.backend",
            value="apex",
            rule=f"apex updates fp32 weights, and precision.policy {policy} has none",
            fix=f"Take torch or auto, or a policy of {', '.join(APEX_POLICIES)}",
        )
    if "apex" not in UPDATE_RULES[kind].backends:
        rule = f"apex has no kernel for optimizer.kind {kind}"
        yield Problem(field="optimizer.backend", value="apex", rule=rule, fix="Take torch or auto")


def check_settings(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A setting that the update rule does not have would do nothing."""
    kind, known = config.optimizer.kind, default_settings(config.optimizer.kind)
    for name in ALL_SETTINGS:
        value = getattr(config.optimizer, name)
        if name not in known and value is not None:
            rule = f"optimizer.kind {kind} has no such setting"
            fix = f"Leave it out; {kind} has {', '.join(known) or 'none'}"
            yield Problem(field=f"optimizer.{name}", value=value, rule=rule, fix=fix)


OPTIMIZER_RULES: tuple[tuple[Callable[[Config, int | None], Iterator[Problem]], tuple[str, ...]], ...] = (
    (check_backend, ("optimizer.kind", "optimizer.backend", "precision.policy")),
    (check_settings, ("optimizer.kind", *(f"optimizer.{name}" for name in ALL_SETTINGS))),
)
"""Each rule with the fields that it reads."""
