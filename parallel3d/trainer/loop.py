"""The trainer: a small state machine around the step.

    RECOVER --a place in a generation--> STEP --where due--> EVALUATE --where due--> SAVE --> STEP ... --> STOP
    STEP --a request to stop--> SAVE --> STOP    STEP --somebody departs--> RECOVER    any --the generation ends-->
    RECOVER STEP --training has diverged--> DIVERGED: what is being saved is finished, then all end

What comes next follows from the state alone, so that after a loss everybody goes on at the same place. It talks through
`publish`: records, one a step from the leader, for whoever writes files and draws bars.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Any

from parallel3d.config.derived import flops_per_token
from parallel3d.config.schema import RunConfig
from parallel3d.data.build import describe_begun_stages
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.errors import Diverged, GenerationEnded
from parallel3d.monitor.training_monitor import perplexity
from parallel3d.parallel.abort import POLL_S
from parallel3d.parallel.grid import Grid
from parallel3d.pipeline.route_map import draw_route_map
from parallel3d.trainer.build import RankRuntime
from parallel3d.trainer.checkpointing import CheckpointSaver, NoSaver
from parallel3d.trainer.divergence_check import find_divergence
from parallel3d.trainer.entry import Entry, TrainState
from parallel3d.trainer.recovery import RecoveryManager
from parallel3d.trainer.resume import data_position_to_json
from parallel3d.trainer.speed import ThroughputMeter
from parallel3d.trainer.step import StepReport, evaluate, train_step

FINAL_STEPS = 10


class Phase(Enum):
    """What the trainer does next."""

    RECOVER = "recover"
    STEP = "step"
    EVALUATE = "evaluate"
    SAVE = "save"
    STOP = "stop"
    DIVERGED = "diverged"


@dataclass
class Trainer:
    """Takes `rank` from the start to the last step, or to a request to stop, through all changes of membership."""

    rank: RankRuntime
    recovery: RecoveryManager
    publish: Callable[[dict[str, Any]], None]
    stop_requested: Callable[[], bool]
    drain_requested: Callable[[], bool] = lambda: False
    saver: CheckpointSaver = field(default_factory=NoSaver)
    on_generation: Callable[[GenerationRecord], None] = lambda record: None
    """Called on every rank of the grid once a generation is in force; may use its groups."""
    on_phase: Callable[[Phase, int], None] = lambda phase, step: None
    """Called before a step, and before an evaluation with the number of the step that it follows."""
    data_wait_s: Callable[[], float] = lambda: 0.0
    describe: Callable[[], dict[str, Any]] = lambda: {}
    """What the summary says beyond the trainer's own figures."""

    def __post_init__(self) -> None:
        self._throughput = ThroughputMeter(self.rank.config)
        self._losses: dict[int, float] = {}
        self._training_s = 0.0
        self._timed_tokens = 0
        self._timed_flops = 0
        self._join_step = 0
        self._planned_bubble: float | None = None
        self._bubbles: list[float] = []
        """Of the steps of this generation: another grid has another plan."""

    def run(self) -> bool:
        """Trains to the end; False when this rank has left before it, or had no place at it. Raises Diverged."""
        suspicion = ""
        while self.recovery.enter_generation(suspicion):
            suspicion = "a worker departs"
            try:
                self._begin_generation()
                if self._train() is Phase.STOP:
                    return True
            except GenerationEnded as error:
                suspicion = str(error)
            self.recovery.leave_generation(suspicion)
        return False

    def _begin_generation(self) -> None:
        record = self.recovery.record
        assert record is not None
        self._join_step = self.rank.state.iteration
        self._bubbles = []
        self._publish_notices(self.saver.begin_generation())
        self.on_generation(record)
        if self.rank.is_leader:
            self.publish({"kind": "training"})
        if self.rank.is_leader and self.rank.config.run.show_routes:
            self._publish_routes()
        for entry in self.rank.state.entries:
            self._losses[entry.iteration] = entry.loss
            # whoever led before may have died with the news
            if entry.iteration > max(record.last_reported_step, self.rank.resumed_from):
                self._publish_step(entry)
        self._publish_evaluation()

    def _train(self) -> Phase:
        actions = {
            Phase.STEP: self._step,
            Phase.EVALUATE: self._evaluate,
            Phase.SAVE: self._save,
            Phase.DIVERGED: self._end_diverged,
        }
        while (phase := self._next_phase()) in actions:
            actions[phase]()
        if phase is Phase.STOP:
            self.rank.optimizer.finish_gather()
            if self.rank.is_leader:
                self.publish({"kind": "summary", **self._summary(), **self.describe()})
            self.recovery.finish()
        return phase

    def _next_phase(self) -> Phase:
        """A function of the state alone: the same on every rank, before and after a loss."""
        state, run, is_over = self.rank.state, self.rank.config.run, self._is_over
        last = state.entries[-1] if state.entries else None
        if find_divergence(state, since=self.rank.resumed_from):
            return Phase.DIVERGED
        if last is not None and last.stop:
            return Phase.SAVE if self.saver.is_due(state.iteration, is_last=True, is_stopped=True) else Phase.STOP
        if last is not None and last.leave and last.iteration > self._join_step:
            return Phase.RECOVER
        if evaluation_is_due(state, run, is_over=is_over) and not state.is_evaluated:
            return Phase.EVALUATE
        if self.saver.is_due(state.iteration, is_last=is_over):
            return Phase.SAVE
        return Phase.STOP if is_over else Phase.STEP

    @property
    def _is_over(self) -> bool:
        """Whether the steps or the tokens of the run are reached, whichever comes first."""
        state, run = self.rank.state, self.rank.config.run
        is_last = run.num_steps is not None and state.iteration >= run.num_steps
        return is_last or (run.num_tokens is not None and state.tokens_seen >= run.num_tokens)

    def _step(self) -> None:
        step, config = self.rank.state.iteration + 1, self.rank.config
        self.on_phase(Phase.STEP, step)
        waited, since = self.data_wait_s(), self.rank.state.tokens_read
        save_status = self.saver.status()
        report = train_step(
            self.rank,
            stop=self.stop_requested(),
            leave=self.drain_requested(),
            evaluate=self.rank.is_leader and self._throughput.wants_evaluation,
            save_status=save_status,
        )
        self._publish_notices(self.saver.on_entry(report.entry))
        self._throughput.record_step(report, len(self.rank.grid.ranks))
        self._training_s += report.step_s
        self._timed_tokens += report.batch.num_tokens
        self._timed_flops += report.batch.num_tokens * flops_per_token(config.model, report.batch.sequence_length)
        self._losses[step] = report.entry.loss
        self._bubbles.append(report.telemetry.bubble)
        self._planned_bubble = report.planned_bubble
        self._publish_warnings(report)
        self._publish_blend_stages(step, range(since, self.rank.state.tokens_read))
        self._publish_step(report.entry, report, self.data_wait_s() - waited)

    def _publish_warnings(self, report: StepReport) -> None:
        """What the debug aids and the monitors have to say of a step."""
        monitor = self.rank.state.monitor
        if monitor.divergence_reason and not monitor.stop_reason and self.rank.is_leader:
            text = f"warning: step {report.entry.iteration}: this looks like divergence: {monitor.divergence_reason}"
            self.publish({"kind": "notice", "text": text})
        if report.warning and self.rank.is_leader:
            self.publish({"kind": "notice", "text": f"warning: {report.warning}"})
        if report.dump is not None and self.rank.is_leader:
            text = f"step {report.entry.iteration}: the tensors asked for are in {report.dump.parent}"
            self.publish({"kind": "notice", "text": text})

    def _publish_blend_stages(self, step: int, tokens: range) -> None:
        """What begins among the tokens of a step."""
        blend = self.rank.config.data.blend
        if self.rank.is_leader and blend is not None:
            self._publish_notices(describe_begun_stages(blend, step, tokens))

    def _evaluate(self) -> None:
        self.on_phase(Phase.EVALUATE, self.rank.state.iteration)
        if self.rank.is_leader:
            self.publish({"kind": "evaluating", "step": self.rank.state.iteration})
        started = time.perf_counter()
        evaluate(self.rank)
        self._throughput.record_evaluation(time.perf_counter() - started)
        self._publish_evaluation(time.perf_counter() - started)

    def _save(self) -> None:
        """Between two steps a save begins; at the run's end it is finished."""
        state = self.rank.state
        self.on_phase(Phase.SAVE, state.iteration)
        losses = [loss for step, loss in self._losses.items() if step > self.saver.last_step]
        loss = sum(losses) / len(losses) if losses else None
        if state.entries[-1].stop or self._is_over:
            self._save_final(loss)
        else:
            self._publish_notices(self.saver.begin(loss))

    def _save_final(self, training_loss: float | None) -> None:
        """No step follows: what is not on disk now is lost."""
        step = self.rank.state.iteration
        self._publish_notices(self.saver.save_now(training_loss))
        for wait_s in self.rank.config.checkpoint.retry_s:
            if not self.saver.has_failed:
                return
            if self.rank.is_leader:
                self._publish_notices([f"step {step}, the last, is not on disk: trying again in {wait_s:g} s"])
            self._wait_unless_stopped(wait_s)
            self._publish_notices(self.saver.save_now(training_loss))
        if self.saver.has_failed and self.rank.is_leader:
            self._publish_notices([f"warning: there is no checkpoint of step {step}, the last"])

    def _wait_unless_stopped(self, seconds: float) -> None:
        """Ranks hear of a stop at different times: whoever leaves early waits for the others in the next collective."""
        until = time.monotonic() + seconds
        with self.rank.token.waiting():
            while not self.stop_requested() and (left := until - time.monotonic()) > 0:
                self.rank.token.sleep(min(left, POLL_S))

    def _end_diverged(self) -> None:
        """Nothing of this state is saved; a save of an earlier one that is under way is finished first."""
        state = self.rank.state
        reason = find_divergence(state, since=self.rank.resumed_from)
        self.on_phase(Phase.DIVERGED, state.iteration)
        self._publish_notices(self.saver.finish())
        if self.rank.is_leader:
            data = data_position_to_json(state)
            self.publish({"kind": "diverged", "step": state.iteration, "reason": reason, "data": data})
        raise Diverged(f"training has diverged in step {state.iteration}: {reason}")

    def _publish_notices(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.publish({"kind": "notice", "text": text})

    def _publish_routes(self) -> None:
        rank = self.rank
        table = draw_route_map(rank.train_plan.routes, rank.grid.replicas, rank.first_grid.replicas)
        self.publish({"kind": "notice", "text": table or "the routes of this grid do not fit on a screen"})

    def _publish_evaluation(self, seconds: float | None = None) -> None:
        """The leader's record of an evaluation; without its time where another rank led it."""
        state, since = self.rank.state, self.rank.resumed_from
        is_new = state.is_evaluated and (state.iteration > since or since == 0)
        if self.rank.is_leader and is_new and (loss := state.evaluations[-1].loss) is not None:
            figures = {"loss": loss, "tokens": state.tokens_trained, **perplexity(loss)}
            times = {} if seconds is None else {"seconds": seconds}
            self.publish({"kind": "evaluation", "step": state.iteration, **figures, **times})

    def _publish_step(self, entry: Entry, report: StepReport | None = None, data_wait_s: float = 0.0) -> None:
        """The leader's record of a step; without figures of time for one that it did not time itself."""
        if not self.rank.is_leader:
            return
        loss_scale = self.rank.state.loss_scale
        if not entry.finite and loss_scale.is_dynamic:
            text = f"step {entry.iteration}: a gradient is not finite, the update is skipped on every rank"
            self.publish({"kind": "notice", "text": f"{text}; loss scale {loss_scale.scale:g}"})
        self.publish(
            {
                "kind": "step",
                "step": entry.iteration,
                "tokens": self.rank.state.tokens_trained,
                "tokens_read": self.rank.state.tokens_read,
                "sequence_length": entry.num_target_tokens // len(entry.cursors),
                "num_sequences": len(entry.cursors),
                "loss": _json_number(entry.loss),
                "grad_norm": _json_number(entry.grad_norm) if entry.finite else None,
                "lr": self.rank.learning_rate_now,
                "num_updates": self.rank.state.num_updates,
                **({"loss_scale": loss_scale.scale} if loss_scale.is_dynamic else {}),
                **(self.rank.state.monitor.figures() if entry.iteration == self.rank.state.iteration else {}),
                **(self._times(report, data_wait_s) if report is not None else {}),
            }
        )

    def _times(self, report: StepReport, data_wait_s: float) -> dict[str, Any]:
        num_ranks = len(self.rank.grid.ranks)
        return self._throughput.figures(report, data_wait_s=data_wait_s, num_ranks=num_ranks, peak=self.rank.peak)

    def _summary(self) -> dict[str, Any]:
        last_steps = sorted(self._losses)[-FINAL_STEPS:]
        last = [self._losses[step] for step in last_steps if math.isfinite(self._losses[step])]
        state, training_s = self.rank.state, self._training_s or math.inf
        return {
            "final_loss": sum(last) / len(last) if last else None,
            "evaluation_loss": state.evaluations[-1].loss if state.evaluations else None,
            "steps": state.iteration,
            "updates": state.num_updates,
            "tokens": state.tokens_trained,
            "seconds": self._training_s,
            "tokens_per_s": self._timed_tokens / training_s,
            **(self._bubble() if self.rank.grid.pp_size > 1 else {}),
            "flops_per_s": self._timed_flops / training_s,
            "stopped_early": bool(state.entries and state.entries[-1].stop),
            **state.monitor.summary(),
            **self._throughput.summary(self.rank.peak),
        }

    def _bubble(self) -> dict[str, float | None]:
        """Measured, of the grid that is there at the end, and planned, of its last step."""
        measured = median(self._bubbles) if self._bubbles else None
        return {"bubble": measured, "planned_bubble": self._planned_bubble}


def describe_start(rank: RankRuntime) -> str:
    """One paragraph for a person: the layout, the stages' layers, the planned bubble."""
    batch = rank.train_batch(rank.state.iteration + 1)
    return (
        f"{len(rank.grid.ranks)} ranks: {describe_layout(rank.grid)}; "
        f"{rank.config.parallel.schedule}, {batch.num_micro_batches} micro-batches, "
        f"planned bubble {rank.train_plan.bubble:.1%}; zero stage {rank.config.parallel.zero_stage}"
    )


def describe_layout(grid: Grid) -> str:
    """For example "2 stages x 2 replicas x tp 4", or "2 stages x 2/1 replicas x tp 1"."""
    counts = sorted({len(ids) for ids in grid.replicas})
    replicas = str(counts[0]) if len(counts) == 1 else "/".join(str(len(ids)) for ids in grid.replicas)
    return f"{grid.pp_size} stages x {replicas} replicas x tp {grid.tp_size}"


def evaluation_is_due(state: TrainState, run: RunConfig, *, is_over: bool) -> bool:
    """Whether an evaluation belongs between the newest step and the next."""
    if state.iteration == 0:
        return run.evaluate_at_start
    by_steps = run.evaluate_every is not None and state.iteration % run.evaluate_every == 0
    return by_steps or state.entries[-1].evaluate or (is_over and run.evaluate_at_end)


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
