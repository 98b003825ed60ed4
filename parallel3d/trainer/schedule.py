"""From the configuration to the learning rate as a function of the run's progress. Pure."""

from __future__ import annotations

from parallel3d.config.derived import tokens_per_step
from parallel3d.config.paces import num_steps
from parallel3d.config.schema import Config
from parallel3d.ramps import Ramp


def build_learning_rate(config: Config) -> Ramp:
    """The learning rate by updates or tokens trained, each of warmup and decay as the configuration counts it.

    The decay begins where the warmup ends. Where they are counted in different units, that is where the warmup would
    end at full batches of full sequences: a number of the configuration alone, not of what a run has met on the way, so
    that a run with sequence-length warmup has its baseline's learning rate after as many tokens. `plateau_ratio` of the
    rest is spent at the peak.
    """
    schedule, step_tokens = config.schedule, tokens_per_step(config)
    by_tokens = schedule.decay_tokens is not None
    if schedule.warmup_tokens is None:
        warmup, begin = schedule.warmup_steps, schedule.warmup_steps * (step_tokens if by_tokens else 1)
    else:
        warmup = schedule.warmup_tokens
        begin = warmup if by_tokens else -(-warmup // step_tokens)
    end = schedule.decay_tokens or schedule.decay_steps or num_steps(config)
    return Ramp(
        peak=config.optimizer.learning_rate,
        kind=schedule.kind,
        warmup=warmup,
        warmup_unit="updates" if schedule.warmup_tokens is None else "tokens",
        decay_begin=begin + round(schedule.plateau_ratio * max(0, end - begin)),
        decay_end=end,
        decay_unit="tokens" if by_tokens else "updates",
        min_ratio=schedule.min_ratio,
        form=schedule.decay_form,
    )
