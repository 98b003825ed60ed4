"""Measures a run's speed: the timing figures of each step, and when the leader's clock asks for an evaluation.

Every rank measures, so that the next leader has the figures. Those of a step:

    tokens_per_s, step_s                 this step
    mean_tokens_per_s, sequences_per_s   the last 10 steps, without evaluations and saves
    mfu                                  at mean_tokens_per_s, if the device's peak is known (monitor/flops.py)
    bubble, planned_bubble               idle share of the pipeline's busiest rank
    data_wait_s                          seconds that this rank waited for data
    memory_bytes                         of the rank with the most: resident, or torch's peak on a GPU
"""

from __future__ import annotations

from typing import Any

from parallel3d.config.derived import flops_per_token
from parallel3d.config.schema import Config
from parallel3d.monitor.evaluation_interval import EvaluationInterval, MovingThroughput
from parallel3d.monitor.flops import Peak, mfu
from parallel3d.trainer.step import StepReport


class ThroughputMeter:
    """Follows the steps and evaluations of this rank."""

    def __init__(self, config: Config):
        self._config = config
        self._throughput = MovingThroughput()
        self._evaluation_interval = EvaluationInterval(
            share=config.run.evaluate_share, num_batches=config.run.evaluate_batches
        )
        self._flops = 0.0
        self._device_s = 0.0
        self._peak_tokens_per_s = 0.0
        self.evaluation_s = 0.0
        """Seconds of all evaluations."""

    @property
    def wants_evaluation(self) -> bool:
        """Whether an evaluation should follow the next step, by this rank's clock."""
        return self._evaluation_interval.is_due

    def record_step(self, report: StepReport, num_ranks: int) -> None:
        """Records a step of a grid of `num_ranks`."""
        num_tokens, step_s = report.entry.num_target_tokens, report.step_s
        self._evaluation_interval.record_step(step_s)
        self._throughput.record(num_tokens=num_tokens, num_sequences=report.batch.num_slots, step_s=step_s)
        self._peak_tokens_per_s = max(self._peak_tokens_per_s, self._throughput.full_tokens_per_s)
        self._flops += num_tokens * self._flops_per_token(report)
        self._device_s += num_ranks * step_s

    def record_evaluation(self, seconds: float) -> None:
        self._evaluation_interval.record_evaluation(seconds)
        self.evaluation_s += seconds

    def figures(self, report: StepReport, *, data_wait_s: float, num_ranks: int, peak: Peak | None) -> dict[str, Any]:
        """The figures of the newest step; to be called after `record_step`."""
        speed, work = self._throughput.tokens_per_s, self._flops_per_token(report)
        used = mfu(flops_per_s=speed * work, num_devices=num_ranks, peak=peak) if peak else None
        return {
            "tokens_per_s": report.entry.num_target_tokens / report.step_s,
            "mean_tokens_per_s": speed,
            "sequences_per_s": self._throughput.sequences_per_s,
            **({"mfu": used} if used is not None else {}),
            "step_s": report.step_s,
            "bubble": report.telemetry.bubble,
            "planned_bubble": report.plan.bubble,
            "data_wait_s": data_wait_s,
            "memory_bytes": report.telemetry.memory_bytes,
        }

    def summary(self, peak: Peak | None) -> dict[str, Any]:
        """The figures of all steps that this rank has timed."""
        return {
            "peak_tokens_per_s": self._peak_tokens_per_s or None,
            "evaluation_seconds": self.evaluation_s or None,
            "mfu": self._flops / (self._device_s * peak.flops_per_s) if peak and self._device_s else None,
            "peak_flops_per_s": peak.flops_per_s if peak else None,
            "peak_source": peak.source if peak else None,
        }

    def _flops_per_token(self, report: StepReport) -> int:
        return flops_per_token(self._config.model, report.batch.sequence_length)
