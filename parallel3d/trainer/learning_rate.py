"""Builds the learning-rate schedule from the configuration. Pure."""

from __future__ import annotations

from parallel3d.config.derived import tokens_per_step
from parallel3d.config.schema import Config
from parallel3d.config.warmup_builder import num_steps
from parallel3d.ramps import LrSchedule


def build_lr_schedule(config: Config) -> LrSchedule:
    """The learning rate by updates or by tokens trained; warmup and decay each have their own unit.

    The decay begins where the warmup ends. If their units differ, that point is computed for full batches of full
    sequences: it depends on the configuration alone and not on the run's history, so a run with sequence-length warmup
    has its baseline's learning rate after as many tokens. `plateau_ratio` of the rest is spent at the peak.
    """
    lr_schedule, step_tokens = config.lr_schedule, tokens_per_step(config)
    by_tokens = lr_schedule.decay_tokens is not None
    if lr_schedule.warmup_tokens is None:
        warmup, begin = lr_schedule.warmup_steps, lr_schedule.warmup_steps * (step_tokens if by_tokens else 1)
    else:
        warmup = lr_schedule.warmup_tokens
        begin = warmup if by_tokens else -(-warmup // step_tokens)
    end = lr_schedule.decay_tokens or lr_schedule.decay_steps or num_steps(config)
    return LrSchedule(
        peak=config.optimizer.learning_rate,
        kind=lr_schedule.kind,
        warmup=warmup,
        warmup_unit="updates" if lr_schedule.warmup_tokens is None else "tokens",
        decay_begin=begin + round(lr_schedule.plateau_ratio * max(0, end - begin)),
        decay_end=end,
        decay_unit="tokens" if by_tokens else "updates",
        min_ratio=lr_schedule.min_ratio,
        decay_form=lr_schedule.decay_form,
    )
