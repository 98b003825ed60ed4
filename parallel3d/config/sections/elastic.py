"""The configuration's section `elastic`, and its rules."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from parallel3d.config.sections.base import Fraction, Section

FaultPhase = Literal[
    "load",
    "forward",
    "send",
    "backward",
    "reduce_scatter",
    "backup",
    "all_reduce",
    "update",
    "all_gather",
    "evaluate",
    "recovery_report",
    "recovery_moves",
    "recovery_confirm",
    "recovery_groups",
]
"""Where a fault can be injected."""


class TimeoutConfig(Section):
    """A timeout that follows the network: multiplier x measured round trip, held between two bounds
    (FlexiTrain: 25,000 x the mean time of a small all-reduce)."""

    multiplier: PositiveFloat
    """Times the measured round trip of a small all-reduce."""
    min_s: PositiveFloat
    """Never shorter, in seconds."""
    max_s: PositiveFloat
    """Never longer, in seconds; at least min_s."""


class HeartbeatTimeoutConfig(TimeoutConfig):
    """How long a worker may be without a sign of life."""

    multiplier: PositiveFloat = 100.0
    """Times the measured round trip of a small all-reduce."""
    min_s: PositiveFloat = 0.5
    """Never shorter, in seconds."""
    max_s: PositiveFloat = 5.0
    """Never longer, in seconds; at least min_s."""


class WatchdogTimeoutConfig(TimeoutConfig):
    """How long a worker may be alive without getting on."""

    multiplier: PositiveFloat = 100_000.0
    """Times the measured round trip of a small all-reduce."""
    min_s: PositiveFloat = 60.0
    """Never shorter, in seconds."""
    max_s: PositiveFloat = 600.0
    """Never longer, in seconds; at least min_s."""


class FaultConfig(Section):
    """One fault to inject, for tests and demonstrations: it really happens."""

    rank: NonNegativeInt
    """The worker that it happens to."""
    step: PositiveInt
    """The step in which it happens; for evaluation: the step after which it is held."""
    phase: FaultPhase = "forward"
    """Where in the step. send: between a send to the next stage and the receive that follows; recovery_*: at that
    point of the first recovery from step - 1 on."""
    kind: Literal["kill", "stop", "term", "sleep", "flip", "nan"] = "kill"
    """kill: SIGKILL; stop: SIGSTOP, a hang; term: SIGTERM, an announced departure; sleep: goes on `seconds` later;
    flip: one bit of its first weight is the other way, as by a broken memory; nan: its first weight is no number, and
    the run diverges."""
    attempt: NonNegativeInt = 0
    """In which start of the run it happens: 0 is the first, n the one after the n-th restart."""
    seconds: NonNegativeFloat = 1.0
    """How long a sleep lasts."""


class RandomFaults(Section):
    """Faults drawn for every (step, rank): the same in every process."""

    probability: Fraction = 0.0
    """That a rank has a fault in a step."""
    seed: NonNegativeInt = 0
    """Keys the draw."""
    max_faults: PositiveInt = 1
    """At most so many in a start of the run; after a restart others are drawn."""
    kind: Literal["kill", "stop", "term"] = "kill"
    """kill: SIGKILL; stop: SIGSTOP, a hang; term: SIGTERM, an announced departure."""


class ElasticConfig(Section):
    """What happens when workers die."""

    enabled: bool = True
    """Go on without lost workers, with the same mathematics. false: the first loss ends the run."""
    zero_backups: Literal[0, 1] = 1
    """Copies of every range of optimizer state on another replica of its stage, kept up by updating it there too:
    optimizer memory and update work x 2. 0: under zero_stage 1 the loss of any worker loses its range and ends the run.
    Without effect at zero_stage 0."""
    heartbeat_timeout: HeartbeatTimeoutConfig = HeartbeatTimeoutConfig()
    """How long a worker may be without a sign of life before its guardian kills it."""
    watchdog_timeout: WatchdogTimeoutConfig = WatchdogTimeoutConfig()
    """How long a worker may be alive without getting on, while it waits for nobody, before its guardian kills it."""
    witness: str | None = None
    """A file on a folder that all hosts share: of two halves of the hosts that can't reach each other, the one that
    locks it goes on. Null: a half that has lost the coordinator's host stops."""
    faults: list[FaultConfig] = []
    """Faults to inject, each {"rank", "step", "phase", "kind"}."""
    random_faults: RandomFaults = RandomFaults()
    """Faults to draw and inject beside them."""
