"""The configuration's section `elastic`, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from parallel3d.config.rule import WORLD_SIZE, Rule, rule, too_large
from parallel3d.config.sections.batch import BATCH_SIZES, BatchConfig, batch_sizes, has_batch_sizes
from parallel3d.config.sections.parallel import LAYOUT, ParallelConfig, num_ranks
from parallel3d.config.sections.section import Fraction, Section
from parallel3d.errors import Problem

FaultPhase = Literal[
    "build",
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
    """A timeout of min_s seconds; on slower networks and busier machines longer, up to max_s: multiplier x the round
    trip measured at the start (FlexiTrain's code: 2,500 x the mean time of a small all-reduce)."""

    multiplier: PositiveFloat
    """Factor on the measured round trip of a small all-reduce."""
    min_s: PositiveFloat
    """Lower limit, in seconds."""
    max_s: PositiveFloat
    """Upper limit, in seconds; at least min_s."""


class HeartbeatTimeoutConfig(TimeoutConfig):
    """How long a worker may go without a heartbeat. By default 1 s; more from a round trip of 0.4 ms on."""

    multiplier: PositiveFloat = 2_500.0
    """Factor on the measured round trip of a small all-reduce."""
    min_s: PositiveFloat = 1.0
    """Lower limit, in seconds."""
    max_s: PositiveFloat = 5.0
    """Upper limit, in seconds; at least min_s."""


class WatchdogTimeoutConfig(TimeoutConfig):
    """How long a worker may send heartbeats without making progress. By default 300 s; more from a round trip of 3 ms
    on."""

    multiplier: PositiveFloat = 100_000.0
    """Factor on the measured round trip of a small all-reduce."""
    min_s: PositiveFloat = 300.0
    """Lower limit, in seconds."""
    max_s: PositiveFloat = 600.0
    """Upper limit, in seconds; at least min_s."""


class FaultConfig(Section):
    """One fault to inject, for tests and demonstrations. It is real: the worker dies, hangs, ... One of rank, joiner
    and coordinates says which."""

    rank: NonNegativeInt | None = None
    """The number of the worker at fault."""
    joiner: PositiveInt | None = None
    """The worker at fault is the n-th beyond those of the layout: first the spares, then those that come during the
    run."""
    coordinates: Annotated[str, Field(pattern=r"^pp\d+ dp\d+ tp\d+$")] | None = None
    """The worker at fault is the one that has these coordinates then, such as "pp1 dp0 tp0"."""
    step: PositiveInt = 1
    """The step of the fault; for phase evaluate, the step after which the evaluation runs."""
    phase: FaultPhase = "forward"
    """Phase of the step. send: between a send to the next stage and the receive that follows. recovery_*: in that phase
    of the first recovery from step - 1 on; for a joiner that enters with it, of its first one if step is 1. build: once
    it has built its part of the model, before it is admitted."""
    kind: Literal["kill", "stop", "term", "sleep", "slow", "flip", "nan"] = "kill"
    """kill: SIGKILL. stop: SIGSTOP, a hang. term: SIGTERM, an announced departure. sleep: pauses for `seconds`. slow:
    computes at 1 / `factor` of its speed for `num_steps`, a GPU not in its first step. flip: flips one bit of the
    worker's first weight, as faulty memory would. nan: makes its first weight NaN, and the run diverges."""
    attempt: NonNegativeInt = 0
    """The attempt with the fault: 0 is the first start of the run, n the n-th restart."""
    seconds: NonNegativeFloat = 1.0
    """Duration of a sleep."""
    factor: Annotated[float, Field(ge=1.0)] = 2.0
    """How much longer the computes of a slow worker take."""
    num_steps: PositiveInt | None = None
    """Steps for which a worker is slow; null: to the end."""


class RandomFaults(Section):
    """Faults drawn for every (step, rank), the same in every process."""

    probability: Fraction = 0.0
    """Probability of a fault for a rank in a step."""
    seed: NonNegativeInt = 0
    """Seed of the draw."""
    max_faults: PositiveInt = 1
    """Faults per attempt at most; after a restart others are drawn."""
    kind: Literal["kill", "stop", "term"] = "kill"
    """kill: SIGKILL. stop: SIGSTOP, a hang. term: SIGTERM, an announced departure."""


class NoticeConfig(Section):
    """How a host learns that it will be taken away soon (spot and preemptible machines, a job's time limit). Its
    workers leave at the next step boundary; if the run can't go on without them, it saves and ends with exit code 7."""

    signal: Literal["USR1", "USR2"] | None = None
    """A signal to the process that the launcher started, such as SLURM's --signal=USR1@120. With USR1, USR2 asks for
    the status of all workers in its place."""
    file: str | None = None
    """A file whose existence is the notice."""
    command: str | None = None
    """A shell command whose exit code 0 is the notice; its first line of output says what it is."""
    cloud: Literal["aws", "gcp", "azure"] | None = None
    """Whose metadata server to ask. aws: spot interruptions. gcp: preemption, maintenance. azure: scheduled events."""
    url: str | None = None
    """The metadata server's address, if not the cloud's usual one."""
    every_s: Annotated[float, Field(ge=0.1)] = 5.0
    """Seconds between two looks at file, command and cloud."""
    deadline_s: PositiveFloat | None = None
    """Seconds from the notice until the host is gone. Workers that are still there two seconds before are killed, so
    that their loss is noticed at once. Null: what a cloud says, or else 120 on aws and 30 elsewhere."""


class ElasticConfig(Section):
    """What happens when workers die."""

    enabled: bool = True
    """Continue without lost workers, with the same mathematics. false: the first loss ends the run."""
    zero_backups: Literal[0, 1] = 1
    """Copies of every shard of optimizer state on another replica of its stage, which updates it too: twice the
    optimizer memory and update work. 0: under zero_stage 1 the loss of any worker loses its shard and ends the run. No
    effect at zero_stage 0."""
    max_rejoins: NonNegativeInt = 3
    """How often in an hour a worker is started in the place of a lost one: 0.25 s later, or 1, 4, 16 ... s where
    several are lost within a minute. It builds its part of the model beside the run and enters between two steps. 0:
    lost workers do not come back."""
    join_threshold: PositiveInt = 1
    """How many workers wait until they join together, in one pause; fewer if no more are missing. A loss lets those in
    that wait."""
    join_wait_s: PositiveFloat = 60.0
    """How long, in seconds, workers wait for others to join with them."""
    return_s: NonNegativeFloat = 300.0
    """How long, in seconds, a host looks for the run that goes on without it (it was cut off, and its processes have
    ended), to join it again; at most max_rejoins times in an hour. 0: it ends at once."""
    spares: NonNegativeInt = 0
    """Workers beyond those of the layout: start that many more. They wait, and take the places of lost ones at once."""
    max_replicas: PositiveInt | None = None
    """Replicas up to which new workers widen each stage, one replica at a time; each needs a micro-batch, also in the
    first steps of a warmup of batch sizes. Null: no stage gets wider than it was at the start."""
    balance: bool = False
    """Give slow replicas less work: every step's times choose the routes of the next ones. With precision.sums float,
    two runs then differ by the order of sums, as after a loss. No effect with run.device cuda_shared."""
    drain_slow: bool = True
    """With balance: a replica that is so slow that steps take no longer without it leaves, if its stage has at least
    three."""
    probation_s: PositiveFloat = 300.0
    """Seconds until a worker is started in the place of one that left since it was slow, if max_rejoins allows. Each
    time that such a one leaves within an hour of its start, it is twice as long."""
    heartbeat_timeout: HeartbeatTimeoutConfig = HeartbeatTimeoutConfig()
    """How long a worker may go without a heartbeat before its guardian kills it."""
    watchdog_timeout: WatchdogTimeoutConfig = WatchdogTimeoutConfig()
    """How long a worker that waits for no other may send heartbeats without making progress before its guardian kills
    it."""
    control_timeout_s: Annotated[float, Field(ge=3.0)] = 30.0
    """Longest silence, in seconds, of the coordinator or of a worker's guardian before it counts as lost: a stopped
    process, or a host that is cut off."""
    relay_from: PositiveInt = 256
    """Workers from which on, under a launcher that starts a process a rank, the ranks of a host share one connection to
    the coordinator: through a relay, whose loss costs that host's workers."""
    change_timeout_s: Annotated[float, Field(ge=3.0)] = 120.0
    """Longest wait, in seconds, of a change of membership for its workers' reports, and then for their confirmations,
    before it goes on without those that hang. Before they confirm, workers send each other optimizer state and weights:
    a slow network may need more."""
    witness: str | None = None
    """A file in a folder that all hosts share. If the hosts split into two groups that can't reach each other, the
    group that locks this file continues. Null: a group that has lost the coordinator's host stops."""
    coordinator_host: str | None = None
    """The name of the host to which the coordinator moves after the first step, such as one that is not preemptible.
    Null: it stays on rank 0's host."""
    notice: NoticeConfig = NoticeConfig()
    """How a host learns that it will be taken away."""
    faults: list[FaultConfig] = []
    """Faults to inject, each {"rank" | "joiner" | "coordinates", "step", "phase", "kind"}."""
    random_faults: RandomFaults = RandomFaults()
    """Faults to draw and inject in addition."""


def timeout_rule(name: str) -> Rule:
    """The rule that a timeout's lower limit is below its upper one."""

    @rule(f"elastic.{name}")
    def check_timeout(timeout: TimeoutConfig) -> Iterator[Problem]:
        if timeout.min_s > timeout.max_s:
            yield too_large(f"elastic.{name}.min_s", timeout.min_s, f"elastic.{name}.max_s", timeout.max_s)

    return check_timeout


heartbeat_limits = timeout_rule("heartbeat_timeout")
watchdog_limits = timeout_rule("watchdog_timeout")


@rule("elastic.notice")
def check_notice(notice: NoticeConfig) -> Iterator[Problem]:
    """It is known which cloud's server an address is."""
    return notice_problems(notice, "elastic.notice")


def notice_problems(notice: NoticeConfig, section: str) -> Iterator[Problem]:
    """Yields what is wrong with a notice whose fields are named after `section`."""
    if notice.url is not None and notice.cloud is None:
        fix = f"Set {section}.cloud to aws, gcp or azure, or remove the url"
        yield Problem(field=f"{section}.url", value=notice.url, rule="needs to know whose server it is", fix=fix)


@rule("elastic.max_replicas", BATCH_SIZES, "warmup.batch_size.start")
def check_max_replicas(most: int | None, batch: BatchConfig, start: int | None) -> Iterator[Problem]:
    """Every replica has a micro-batch, in every step."""
    if most is None or not has_batch_sizes(batch):
        return
    total, micro, _ = batch_sizes(batch)
    name, least = ("batch.global_batch_size", total) if start is None else ("warmup.batch_size.start", start)
    if most > least // micro:
        rule_text = f"is too many: each replica needs a micro-batch, and {name} makes {least // micro}"
        fix = f"Use at most {least // micro}, or raise {name} to {most * micro} or more"
        yield Problem(field="elastic.max_replicas", value=most, rule=rule_text, fix=fix)


@rule("elastic.faults", "run.num_steps", LAYOUT, WORLD_SIZE)
def check_faults(
    faults: list[FaultConfig], num_steps: int | None, parallel: ParallelConfig, world_size: int | None
) -> Iterator[Problem]:
    """Faults name ranks and steps that exist, and one worker each."""
    last_rank = (num_ranks(parallel, None) if world_size is None else world_size) - 1
    for number, fault in enumerate(faults):
        named = [name for name in ("rank", "joiner", "coordinates") if getattr(fault, name) is not None]
        if len(named) != 1:
            yield Problem(
                field=f"elastic.faults.{number}",
                value=" and ".join(named) or "no worker",
                rule="must name the worker at fault once",
                fix="Give one of rank, joiner and coordinates",
            )
        for name, value, last in (("rank", fault.rank, last_rank), ("step", fault.step, num_steps)):
            if value is not None and last is not None and value > last:  # a run by tokens names no last step
                rule_text, fix = (
                    f"doesn't exist: the last {name} is {last}",
                    f"Use an existing {name}, or remove the fault",
                )
                yield Problem(field=f"elastic.faults.{number}.{name}", value=value, rule=rule_text, fix=fix)
