"""A cluster, its failures and what they cost, as a JSON file: the input of `launch/goodput.py`. Pure.

Every field has a default; together the defaults are FlexiTrain's failures on 8,192 devices, with the seconds that
docs/results.md has for this project's recoveries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from parallel3d.config.json_file import apply_override, read_json
from parallel3d.config.mistakes import explain_mistake, field_name, fields_of, unusable_values
from parallel3d.config.sections.section import Section
from parallel3d.errors import ConfigError, Problem

PAPER_RATE = 1.5e-5
"""Failures of a device in an hour: FlexiTrain, section 2.1, after MegaScale's 100 on 10,000 in a month."""
MAX_FAILURES = 20_000_000
"""Failures to simulate, over all runs and strategies: some minutes."""
MAX_DEVICES = 10_000_000

Seconds = Annotated[NonNegativeFloat, Field(le=1e8)]
PositiveSeconds = Annotated[PositiveFloat, Field(ge=1e-3, le=1e8)]


class ClusterSection(Section):
    """How the devices are divided."""

    tp_size: PositiveInt = 8
    """Devices of one replica of a stage: if one fails, none of them trains."""
    pp_size: PositiveInt = 16
    """Pipeline stages."""
    num_replicas: Annotated[list[PositiveInt], Field(min_length=1)] = [64]
    """Replicas of each stage; several numbers compare clusters of several sizes."""

    def num_devices(self, num_replicas: int) -> int:
        return self.tp_size * self.pp_size * num_replicas


class ObservedFailures(Section):
    """Failures that were counted on a real cluster."""

    num_failures: PositiveFloat
    """Failures of devices, or of anything that stopped a device."""
    num_devices: PositiveInt
    """Devices on which they were counted."""
    days: PositiveFloat
    """Days in which they were counted."""

    @property
    def per_device_hour(self) -> float:
        return self.num_failures / self.num_devices / self.days / 24


class FailureRate(Section):
    """How often devices fail."""

    per_device_hour: PositiveFloat | None = None
    """Failures of one device in an hour; null: FlexiTrain's 1.5e-5, or what `observed` gives."""
    observed: ObservedFailures | None = None
    """Counted failures, as another way to give the rate."""
    multiples: Annotated[list[PositiveFloat], Field(min_length=1)] = [1, 10, 50, 200]
    """Multiples of the rate to compare; preemptible machines are at 10 and above."""

    @property
    def base_rate(self) -> float:
        """Failures of one device in an hour, at multiple 1."""
        return self.observed.per_device_hour if self.observed else self.per_device_hour or PAPER_RATE


class RestartsSection(Section):
    """Checkpoints, and starts from them."""

    interval_s: PositiveSeconds = 10_800.0
    """Seconds of training between two checkpoints; FlexiTrain's 3 hours."""
    save_s: Seconds = 300.0
    """Seconds for which a checkpoint stops training: an assumption."""
    restart_s: Seconds = 1_200.0
    """Seconds from a failure until training goes on, if programs do it all; FlexiTrain's 20 minutes."""
    human_s: Seconds = 0.0
    """Seconds until a person acts; above 0, a restart by hand is compared as well."""


class RecoveriesSection(Section):
    """Training that goes on with what is left."""

    pause_s: Seconds = 0.368
    """Seconds from a failure until the rest begins its step again: docs/results.md, "How long a loss takes", 10 ranks
    with 20M parameters a stage on 2 CPU cores. No cluster was measured."""
    step_s: Seconds = 10.0
    """Seconds of a training step; half of one is computed again after a failure. An assumption."""
    join_pause_s: Seconds = 0.657
    """Seconds for which a return stops the others: docs/results.md, "How long a join takes", of the same model."""
    save_interval_s: PositiveSeconds = 86_400.0
    """Seconds between two checkpoints, which are needed only if all replicas of a stage are lost; each costs
    restarts.save_s."""
    repair_interval_s: PositiveSeconds = 10_800.0
    """Seconds between two moments at which everything that was lost comes back; FlexiTrain's next checkpoint."""
    replace_s: PositiveSeconds = 1_200.0
    """Seconds until a dropped pipeline is back by itself, as with torchft: an assumption, as long as a restart."""
    rejoin_s: Annotated[list[PositiveSeconds], Field(max_length=8)] = [40.0, 1_200.0]
    """Seconds from a failure until a rerouted replica is back: a spare or a new process, and a new machine.
    Assumptions."""


class Scenario(Section):
    """All of it."""

    name: str = "FlexiTrain's failures on 8,192 devices"
    """A title for tables and charts."""
    cluster: ClusterSection = ClusterSection()
    """How the devices are divided."""
    failures: FailureRate = FailureRate()
    """How often devices fail."""
    restarts: RestartsSection = RestartsSection()
    """Checkpoints, and starts from them."""
    recoveries: RecoveriesSection = RecoveriesSection()
    """Training that goes on with what is left."""
    days: Annotated[PositiveFloat, Field(le=3_660)] = 30.0
    """Simulated days of one run."""
    num_runs: Annotated[PositiveInt, Field(le=10_000)] = 4
    """Simulated runs, which differ by their failures."""
    seed: NonNegativeInt = 0
    """Of all failures."""

    def failures_per_hour(self, num_replicas: int, multiple: float) -> float:
        return self.cluster.num_devices(num_replicas) * self.failures.base_rate * multiple


def load_scenario(path: str | Path | None, overrides: Sequence[str] = ()) -> Scenario:
    """Returns the scenario in a JSON file, or the default one, changed by `section.field=value` overrides.

    Raises one ConfigError with all mistakes.
    """
    raw = read_json(Path(path)) if path is not None else {}
    return parse_scenario(raw, overrides)


def parse_scenario(raw: dict[str, Any], overrides: Sequence[str] = ()) -> Scenario:
    """Returns the scenario of a JSON object. Raises one ConfigError with all mistakes."""
    problems = [problem for override in overrides for problem in apply_override(raw, override)]
    problems += [problem for _, problem in unusable_values(raw)]
    if not problems:
        try:
            scenario = Scenario.model_validate(raw)
        except ValidationError as error:
            known = dict(fields_of(Scenario))
            by_field = {field_name(mistake): explain_mistake(mistake, known) for mistake in error.errors()}
            problems += by_field.values()
        else:
            problems += _broken_rules(scenario)
    if problems:
        raise ConfigError(problems)
    return scenario


def _broken_rules(scenario: Scenario) -> Iterator[Problem]:
    failures, cluster = scenario.failures, scenario.cluster
    if failures.observed and failures.per_device_hour is not None:
        rule = "is given twice: failures.observed is another way to give it"
        yield Problem(
            field="failures.per_device_hour", value=failures.per_device_hour, rule=rule, fix="Remove one of the two"
        )
    for field, numbers in (
        ("cluster.num_replicas", cluster.num_replicas),
        ("failures.multiples", failures.multiples),
        ("recoveries.rejoin_s", scenario.recoveries.rejoin_s),
    ):
        if len(set(numbers)) < len(numbers):
            yield Problem(field=field, value=numbers, rule="has a number twice", fix="Remove it")
    largest = cluster.num_devices(max(cluster.num_replicas))
    if largest > MAX_DEVICES:
        rule = f"makes {largest:,} devices, more than {MAX_DEVICES:,}"
        yield Problem(field="cluster.num_replicas", value=cluster.num_replicas, rule=rule, fix="Lower a size")
        return
    hours = scenario.days * 24 * scenario.num_runs * (3 + len(scenario.recoveries.rejoin_s))
    rates = [scenario.failures_per_hour(count, each) for count in cluster.num_replicas for each in failures.multiples]
    if (expected := hours * sum(rates)) > MAX_FAILURES:
        rule = f"would simulate about {expected:,.0f} failures, more than {MAX_FAILURES:,}"
        yield Problem(field="days", value=scenario.days, rule=rule, fix="Lower days, num_runs or failures.multiples")
