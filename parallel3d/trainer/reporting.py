"""A run's reports of its progress: the records of steps, evaluations, notices and the summary.

Every rank keeps the figures, so that the next leader can continue after a loss; only the leader publishes them. Times
are those that this rank measured itself: a step led by another rank is reported without them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from parallel3d.config.derived import flops_per_token
from parallel3d.data.run_data import describe_begun_stages
from parallel3d.monitor.saved_notice import SavedNotice
from parallel3d.monitor.training_monitor import perplexity
from parallel3d.parallel.grid import Grid
from parallel3d.pipeline.route_map import draw_route_map
from parallel3d.trainer.batching import next_batch
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.entry import Entry
from parallel3d.trainer.resume import data_position_to_json
from parallel3d.trainer.slow_workers import SlowWorkers
from parallel3d.trainer.speed import ThroughputMeter
from parallel3d.trainer.step import StepReport

FINAL_STEPS = 10
"""Steps whose mean loss is the run's final loss."""

MAX_KEPT_STEPS = 4096
"""More than a leader can make before it is noticed that none of its records arrives: 30 s of steps of 10 ms."""

MAX_KEPT_SNAPSHOTS = 16
"""More than are begun before an earlier save is published."""

Publish = Callable[[dict[str, Any]], None]


class StepReporter:
    """Follows the steps and evaluations that `rank` takes part in, and publishes them while it is the leader."""

    def __init__(
        self,
        rank: RankContext,
        publish: Publish,
        *,
        data_wait_s: Callable[[], float],
        describe: Callable[[], dict[str, Any]],
    ):
        """`data_wait_s` returns the seconds spent waiting for data so far; `describe` adds to the summary."""
        self._rank = rank
        self._publish = publish
        self._data_wait_s = data_wait_s
        self._describe = describe
        self._throughput = ThroughputMeter(rank.config)
        self._slow_workers = SlowWorkers(rank)
        self._waited_s = 0.0
        """Seconds of waiting for data before the current step."""
        self._attempts = (0, 0)
        """The step that was begun last, and how often this rank has begun it: a loss interrupts it."""
        self._planned_bubble: float | None = None
        self._kept_steps: deque[dict[str, Any]] = deque(maxlen=MAX_KEPT_STEPS)
        """The newest steps' records: a leader may be lost with those that have not left its host."""
        self._snapshots_s: deque[tuple[int, float]] = deque(maxlen=MAX_KEPT_SNAPSHOTS)
        """(step, seconds) of the newest saves' snapshots."""
        self._bubbles: list[float] = []
        """Bubbles of this generation's steps: another grid has another plan."""

    @property
    def wants_evaluation(self) -> bool:
        """Whether the leader's clock asks for an evaluation after the next step."""
        return self._rank.is_leader and self._throughput.wants_evaluation

    def mean_loss_since(self, step: int) -> float | None:
        """Mean training loss of the steps after `step`; None without any."""
        losses = [loss for number, loss in self._rank.history.losses.items() if number > step]
        return sum(losses) / len(losses) if losses else None

    # --- events -----------------------------------------------------------------------------------------------------

    def begin_generation(self, last_reported_step: int) -> None:
        """Reports the steps after `last_reported_step`: the previous leader may have died before it reported them."""
        self._bubbles = []
        self._publish_as_leader({"kind": "training"})
        if self._rank.is_leader and self._rank.config.run.show_routes:
            self._publish_routes()
        known = max(last_reported_step, self._rank.resumed_from)
        for record in [record for record in self._kept_steps if record["step"] > known]:
            self._publish_as_leader(record)
            known = record["step"]
        for entry in self._rank.state.entries:
            self._rank.history.losses[entry.iteration] = entry.loss
            if entry.iteration > known:
                self._publish_step(entry)
        for record in self._slow_workers.begin_generation(max(last_reported_step, self._rank.resumed_from)):
            self._publish_as_leader(record)
        self._publish_evaluation()

    def begin_step(self) -> None:
        self._waited_s = self._data_wait_s()
        step, attempts = self._rank.state.iteration + 1, self._attempts
        self._attempts = (step, attempts[1] + 1 if attempts[0] == step else 1)

    def end_step(self, report: StepReport, tokens: range) -> None:
        """Records and publishes a step; `tokens` are those that it consumed from the lanes."""
        config, num_tokens = self._rank.config, report.batch.num_tokens
        self._throughput.record_step(report, len(self._rank.grid.ranks))
        history = self._rank.history
        history.training_s += report.step_s
        history.timed_tokens += num_tokens
        history.timed_flops += num_tokens * flops_per_token(config.model, report.batch.sequence_length)
        history.losses[report.entry.iteration] = report.entry.loss
        self._bubbles.append(report.telemetry.bubble)
        self._planned_bubble = report.plan.bubble
        self._publish_warnings(report)
        if self._rank.is_leader and config.data.blend is not None:
            self.notices(describe_begun_stages(config.data.blend, report.entry.iteration, tokens))
        for record in self._slow_workers.end_step(report):
            self._publish_as_leader(record)
        num_attempts = self._attempts[1]
        repeated = {"num_attempts": num_attempts} if num_attempts > 1 else {}
        self._publish_step(report.entry, {**self._times(report), **repeated})

    def begin_evaluation(self) -> None:
        self._publish_as_leader({"kind": "evaluating", "step": self._rank.state.iteration})

    def end_evaluation(self, seconds: float) -> None:
        self._throughput.record_evaluation(seconds)
        self._publish_evaluation(seconds)

    def end_snapshot(self, seconds: float) -> None:
        """Keeps the seconds for which a save has held up training between two steps, until the save is complete."""
        self._snapshots_s.append((self._rank.state.iteration, seconds))

    def diverged(self, reason: str) -> None:
        """Reports the step at which the run diverged, and the position in the data at which a restart may go on."""
        data = data_position_to_json(self._rank.state)
        record = {"kind": "diverged", "step": self._rank.state.iteration, "reason": reason, "data": data}
        self._publish_as_leader(record)

    def end_run(self) -> None:
        """Publishes the summary."""
        state = self._rank.state
        if not self._rank.history.training_s and self._rank.resumed_from == state.iteration > 0:
            self.leader_notice(f"nothing left to train: the checkpoint of step {state.iteration} is the end of the run")
        self._publish_as_leader({"kind": "summary", **self._summary(), **self._describe()})

    def notices(self, texts: Iterable[str]) -> None:
        """Publishes texts that concern this rank, whether it is the leader or not."""
        for text in texts:
            saved = SavedNotice.parse(text)
            snapshot_s = dict(self._snapshots_s).get(saved.step) if saved else None
            cost = {} if snapshot_s is None else {"snapshot_s": snapshot_s}
            self._publish({"kind": "notice", "text": text, **cost})

    def leader_notice(self, text: str) -> None:
        """Publishes a text that concerns all ranks, once."""
        self._publish_as_leader({"kind": "notice", "text": text})

    # --- records ----------------------------------------------------------------------------------------------------

    def _publish_as_leader(self, record: dict[str, Any]) -> None:
        if self._rank.is_leader:
            self._publish(record)

    def _publish_routes(self) -> None:
        rank = self._rank
        routes = rank.plans.next(rank.state).routes
        table = draw_route_map(routes, rank.grid.replicas, rank.first_grid.replicas)
        self.leader_notice(table or "the routes of this grid do not fit on a screen")

    def _publish_warnings(self, report: StepReport) -> None:
        """Findings of the monitors and of the debugging options."""
        monitor, step = self._rank.state.monitor, report.entry.iteration
        if monitor.divergence_reason and not monitor.stop_reason:
            self.leader_notice(f"warning: step {step}: this looks like divergence: {monitor.divergence_reason}")
        if report.warning:
            self.leader_notice(f"warning: {report.warning}")
        if report.dump is not None:
            self.leader_notice(f"step {step}: tensors dumped to {report.dump.parent}")

    def _publish_evaluation(self, seconds: float | None = None) -> None:
        """The record of the newest evaluation, unless the checkpoint had it already."""
        state, since = self._rank.state, self._rank.resumed_from
        is_new = state.is_evaluated and (state.iteration > since or since == 0)
        if not is_new or (loss := state.evaluations[-1].loss) is None:
            return
        figures = {"loss": loss, "tokens": state.tokens_trained, **perplexity(loss)}
        times = {} if seconds is None else {"seconds": seconds}
        self._publish_as_leader({"kind": "evaluation", "step": state.iteration, **figures, **times})

    def _publish_step(self, entry: Entry, times: dict[str, Any] | None = None) -> None:
        state, loss_scale = self._rank.state, self._rank.state.loss_scale
        if not entry.finite and loss_scale.is_dynamic:
            text = f"step {entry.iteration}: a gradient is not finite, the update is skipped on every rank"
            self.leader_notice(f"{text}; loss scale {loss_scale.scale:g}")
        record = {
            "kind": "step",
            "step": entry.iteration,
            "tokens": state.tokens_trained,
            "tokens_read": state.tokens_read,
            "sequence_length": entry.num_target_tokens // len(entry.cursors),
            "num_sequences": len(entry.cursors),
            **({"num_loss_tokens": entry.num_loss_tokens} if entry.num_masked_tokens else {}),
            "loss": _finite_or_none(entry.loss),
            "grad_norm": _finite_or_none(entry.grad_norm) if entry.finite else None,
            "lr": self._rank.learning_rate_now,
            "num_updates": state.num_updates,
            **({"loss_scale": loss_scale.scale} if loss_scale.is_dynamic else {}),
            **(state.monitor.figures() if entry.iteration == state.iteration else {}),
            **(times or {}),
        }
        self._kept_steps.append(record)
        self._publish_as_leader(record)

    def _times(self, report: StepReport) -> dict[str, Any]:
        waited_s, num_ranks = self._data_wait_s() - self._waited_s, len(self._rank.grid.ranks)
        return self._throughput.figures(report, data_wait_s=waited_s, num_ranks=num_ranks, peak=self._rank.peak)

    def _summary(self) -> dict[str, Any]:
        """Figures of the whole run; those of speed are None when this rank has timed no step."""
        state, history = self._rank.state, self._rank.history
        last_steps, training_s = sorted(history.losses)[-FINAL_STEPS:], history.training_s or None
        last = [history.losses[step] for step in last_steps if math.isfinite(history.losses[step])]
        return {
            "final_loss": sum(last) / len(last) if last else None,
            "evaluation_loss": state.evaluations[-1].loss if state.evaluations else None,
            "steps": state.iteration,
            "updates": state.num_updates,
            "tokens": state.tokens_trained,
            "seconds": training_s,
            "tokens_per_s": history.timed_tokens / training_s if training_s else None,
            **(self._bubble() if self._rank.grid.pp_size > 1 else {}),
            "flops_per_s": history.timed_flops / training_s if training_s else None,
            "stopped_early": bool(state.entries and state.entries[-1].stop),
            **state.monitor.summary(),
            **self._throughput.summary(self._rank.peak),
        }

    def _bubble(self) -> dict[str, float | None]:
        """Median measured bubble of the last generation, and the planned one of its last step."""
        measured = median(self._bubbles) if self._bubbles else None
        return {"bubble": measured, "planned_bubble": self._planned_bubble}


def describe_start(rank: RankContext) -> str:
    """One line about the run: its layout, its schedule, the planned bubble."""
    batch = next_batch(rank.config, rank.state)
    return (
        f"{len(rank.grid.ranks)} ranks: {describe_layout(rank.grid)}; "
        f"{rank.config.parallel.schedule}, {batch.num_micro_batches} micro-batches, "
        f"planned bubble {rank.plans.next(rank.state).bubble:.1%}; zero stage {rank.config.parallel.zero_stage}"
    )


def describe_layout(grid: Grid) -> str:
    """For example "2 stages x 2 replicas x tp 4", or "2 stages x 2/1 replicas x tp 1"."""
    counts = sorted({len(ids) for ids in grid.replicas})
    replicas = str(counts[0]) if len(counts) == 1 else "/".join(str(len(ids)) for ids in grid.replicas)
    return f"{grid.pp_size} stages x {replicas} replicas x tp {grid.tp_size}"


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
