"""Warnings for settings that are valid but probably unintended, one sentence each.

Each function takes a resolved configuration and yields the warnings of its subject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parallel3d.config.derived import family_of, stage_replicas
from parallel3d.config.schema import Config, LossScaleConfig
from parallel3d.config.sections.batch import batch_sizes
from parallel3d.config.sections.warmup import FIELDS_BY_KIND
from parallel3d.config.specs.policies import POLICY_SPECS
from parallel3d.config.warmup_builder import run_length
from parallel3d.pipeline.schedules import find_schedule, schedule_code

MAX_BUBBLE = 0.5
"""Idle share of an iteration."""
EARLIEST_DECAY_END = 0.8
"""Share of the run before which the learning rate should not have reached its lowest value."""
SAFE_NARROW_BETA2 = 0.99
"""With moments in 16 bits HLAT was unstable at 0.99, not at 0.95."""
RARE_SHARE = 0.1
"""Share of a blend below which a source gives few sequences of a step."""


def warnings(config: Config) -> list[str]:
    """All warnings for a resolved configuration."""
    return [warning for check in CHECKS for warning in check(config)]


def warn_idle_stages(config: Config) -> Iterator[str]:
    parallel, replicas = config.parallel, stage_replicas(config)
    num_micro_batches, schedule = batch_sizes(config.batch)[2], find_schedule(parallel.schedule)
    per_replica = num_micro_batches / max(replicas)
    with schedule_code(parallel.schedule):
        bubble = schedule.bubble(parallel.pp_size, parallel.virtual_stages, per_replica)
        is_suitable = schedule.suits(parallel.pp_size, per_replica)
    uneven = sorted({count for count in replicas if num_micro_batches % count})
    if bubble > MAX_BUBBLE:
        yield (
            f"pipeline stages idle for {bubble:.0%} of a step, at {per_replica:g} micro-batches a replica: raise"
            " batch.num_micro_batches or lower parallel.pp_size"
        )
    if uneven:
        yield f"{num_micro_batches} micro-batches do not divide evenly over {uneven} replicas: some wait for the others"
    if not is_suitable:
        yield (
            f"stages idle a little longer than they need with parallel.schedule {schedule.name}: it is made for"
            f" {schedule.suitable_micro_batches}, and parallel.pp_size = {parallel.pp_size} stages get {per_replica:g}"
        )


def warn_ineffective_settings(config: Config) -> Iterator[str]:
    parallel, precision, model = config.parallel, config.precision, config.model
    if parallel.sequence_parallel and parallel.tp_size == 1:
        yield "parallel.sequence_parallel has no effect at parallel.tp_size 1"
    if config.run.compile == "elementwise" and not any(block.is_compiled for block in family_of(model).blocks):
        yield (
            f'run.compile "elementwise" has no effect on {model.architecture}, whose norms and activations are kernels'
            " already"
        )
    if config.elastic.balance and config.run.device == "cuda_shared":
        yield (
            "elastic.balance has no effect on run.device cuda_shared: a compute's time is also that of the ranks with"
            " which the GPU is shared"
        )
    if not POLICY_SPECS[precision.policy].scales_loss and precision.loss_scale != LossScaleConfig():
        yield f"precision.loss_scale has no effect on policy {precision.policy}"
    if config.data.slice is not None and config.data.num_processes > 0:
        yield "data.num_processes has no effect on data.slice: its tokens are ready"


def warn_learning_rate(config: Config) -> Iterator[str]:
    lr_schedule, whole = config.lr_schedule, run_length(config)
    if lr_schedule.decay_tokens is None:
        unit, decay_end, run_end = "steps", lr_schedule.decay_steps or whole.num_steps, whole.num_steps
    else:
        unit, decay_end, run_end = "tokens", lr_schedule.decay_tokens, whole.num_tokens
    if lr_schedule.kind != "constant" and decay_end < EARLIEST_DECAY_END * run_end:
        yield (
            f"the learning rate stays at its lowest from {decay_end:,} {unit} of {run_end:,} on"
            f" (lr_schedule.decay_{unit})"
        )
    if lr_schedule.warmup_steps >= whole.num_steps:
        yield f"the run ends within its warmup of {lr_schedule.warmup_steps:,} updates (lr_schedule.warmup_steps)"
    if (tokens := lr_schedule.warmup_tokens) is not None and tokens >= whole.num_tokens:
        yield f"the run ends within its warmup of {tokens:,} tokens (lr_schedule.warmup_tokens)"


def warn_fatal_losses(config: Config) -> Iterator[str]:
    """Workers whose death ends an elastic run."""
    if not config.elastic.enabled or max(replicas := stage_replicas(config)) == 1:
        return
    if not config.elastic.zero_backups and config.parallel.zero_stage:
        yield (
            "without backups (elastic.zero_backups 0) the loss of any worker loses its part of the optimizer's state"
            " and ends the run"
        )
    if single := [stage for stage, count in enumerate(replicas) if count == 1]:
        yield f"stages {single} have one replica each: the loss of one of their workers ends the run"


def warn_other_tokenizer(config: Config) -> Iterator[str]:
    tokenizer = config.data.tokenizer
    if config.run.initialize_from is not None and tokenizer.path is None and tokenizer.kind != "bytes":
        yield (
            "run.initialize_from brings weights that know the tokens of another tokenizer, and the corpus has one of"
            " its own: set data.tokenizer.path to the Hugging Face folder or tokenizer.model that belongs to them"
        )


def warn_slow_second_moment(config: Config) -> Iterator[str]:
    optimizer, policy = config.optimizer, POLICY_SPECS[config.precision.policy]
    if policy.has_narrow_moments and (optimizer.exp_avg_sq_decay or 0.0) >= SAFE_NARROW_BETA2:
        yield (
            f"optimizer.beta2 {optimizer.exp_avg_sq_decay} with moments in 16 bits: the second moment follows a spike"
            " of the gradient too slowly (HLAT was unstable at 0.99, not at 0.95)"
        )


def warn_warmup_sizes(config: Config) -> Iterator[str]:
    warmup, full = config.warmup.sequence_length, config.batch.sequence_length
    if warmup.kind == "none":
        return
    longest = max(warmup.lengths) if "lengths" in FIELDS_BY_KIND[warmup.kind] else warmup.end or full
    if config.warmup.batch_size.start is not None:
        yield "warmup.sequence_length and warmup.batch_size both reduce the tokens of a step: use one of them"
    if warmup.multiple % 8:
        yield (
            "sequence lengths that aren't multiples of 8 are slow on GPUs"
            f" (warmup.sequence_length.multiple = {warmup.multiple})"
        )
    if warmup.kind != "custom" and longest < full:
        yield f"no step is as long as batch.sequence_length ({full}): the warmup ends at {longest}"


def warn_warmup_durations(config: Config) -> Iterator[str]:
    warmup, size = config.warmup.sequence_length, config.warmup.batch_size
    for name, duration, unit in (
        ("sequence_length", warmup.duration if warmup.kind in ("linear", "root") else None, warmup.unit),
        ("batch_size", size.duration if size.start is not None else None, size.unit),
    ):
        limit = config.run.num_steps if unit == "steps" else config.run.num_tokens
        if duration is not None and limit is not None and duration > limit:
            yield f"the run ends after {limit} {unit}, before warmup.{name}.duration ({duration})"


def warn_rare_sources(config: Config) -> Iterator[str]:
    """Sources of a blend from which few sequences of a step come, or in most steps none."""
    for number, stage in enumerate(config.data.blend.stages if config.data.blend else ()):
        for name, weight in stage.weights.items():
            share = weight / sum(stage.weights.values())
            if 0 < share < RARE_SHARE:
                sequences = share * batch_sizes(config.batch)[0]
                yield f"stage {number} of data.blend has {share:.3g} of {name!r}: {sequences:.2g} sequences a step"


CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    warn_idle_stages,
    warn_ineffective_settings,
    warn_learning_rate,
    warn_fatal_losses,
    warn_other_tokenizer,
    warn_slow_second_moment,
    warn_warmup_sizes,
    warn_warmup_durations,
    warn_rare_sources,
)
