"""The trainer: a small state machine around the step.

    STEP --every evaluate_every--> EVALUATE --> STEP ... --last step--> EVALUATE --> STOP
    STEP --a request to stop--> STOP

It talks through `publish`: records, one a step from the leader, for whoever writes files and draws bars.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from parallel3d.config.derived import flops_per_token, tokens_per_step
from parallel3d.topology.grid import Grid
from parallel3d.trainer.build import RankRuntime
from parallel3d.trainer.entry import TrainState
from parallel3d.trainer.step import StepReport, evaluate, train_step

FINAL_STEPS = 10


class Phase(Enum):
    """What the trainer does next."""

    STEP = "step"
    EVALUATE = "evaluate"
    STOP = "stop"


@dataclass
class Trainer:
    """Runs `rank` from `state` to the last step, or until somebody asks to stop."""

    rank: RankRuntime
    state: TrainState
    publish: Callable[[dict[str, Any]], None]
    stop_requested: Callable[[], bool]
    data_wait_s: Callable[[], float] = lambda: 0.0

    def __post_init__(self) -> None:
        self._losses: list[float] = []
        self._stopping = False
        self._training_s = 0.0
        self._evaluation_loss: float | None = None

    def run(self) -> dict[str, Any]:
        """Trains; returns the summary's figures."""
        actions = {Phase.STEP: self._step, Phase.EVALUATE: self._evaluate}
        phase = Phase.STEP if self.state.iteration < self.rank.config.run.num_steps else Phase.STOP
        while phase is not Phase.STOP:
            phase = actions[phase]()
        self.rank.optimizer.finish_gather()
        return self._summary()

    def _step(self) -> Phase:
        self.publish({"kind": "progress", "step": self.state.iteration + 1})
        waited = self.data_wait_s()
        self.state, report = train_step(self.rank, self.state, stop=self.stop_requested())
        self._training_s += report.step_s
        self._losses.append(report.entry.loss)
        self._tell(report, self.data_wait_s() - waited)
        self._stopping = report.entry.stop
        is_last = self.state.iteration >= self.rank.config.run.num_steps
        every = self.rank.config.run.evaluate_every
        if self._stopping:
            return Phase.STOP
        if is_last or (every is not None and self.state.iteration % every == 0):
            return Phase.EVALUATE
        return Phase.STEP

    def _evaluate(self) -> Phase:
        self._evaluation_loss = evaluate(self.rank, self.state.iteration)
        if self.rank.is_leader and self._evaluation_loss is not None:
            self.publish({"kind": "evaluation", "step": self.state.iteration, "loss": self._evaluation_loss})
        return Phase.STEP if self.state.iteration < self.rank.config.run.num_steps else Phase.STOP

    def _tell(self, report: StepReport, data_wait_s: float) -> None:
        """The leader's record of a step."""
        entry = report.entry
        if not self.rank.is_leader:
            return
        if not entry.finite:
            text = f"step {entry.iteration}: a gradient is not finite, the update is skipped on every rank"
            self.publish({"kind": "notice", "text": text})
        self.publish(
            {
                "kind": "step",
                "step": entry.iteration,
                "tokens": self.state.tokens_trained,
                "loss": _json_number(entry.loss),
                "grad_norm": _json_number(entry.grad_norm) if entry.finite else None,
                "lr": report.learning_rate,
                "tokens_per_s": entry.num_target_tokens / report.step_s,
                "step_s": report.step_s,
                "idle_share": 1.0 - report.busy_s / report.step_s,
                "data_wait_s": data_wait_s,
                "num_updates": self.state.num_updates,
            }
        )

    def _summary(self) -> dict[str, Any]:
        last = [loss for loss in self._losses[-FINAL_STEPS:] if math.isfinite(loss)]
        config = self.rank.config
        steps_s = self._training_s / max(1, len(self._losses))
        tokens_per_s = tokens_per_step(config) / steps_s if self._losses else 0.0
        return {
            "final_loss": sum(last) / len(last) if last else None,
            "evaluation_loss": self._evaluation_loss,
            "steps": self.state.iteration,
            "updates": self.state.num_updates,
            "tokens": self.state.tokens_trained,
            "seconds": self._training_s,
            "tokens_per_s": tokens_per_s,
            "flops_per_s": tokens_per_s * flops_per_token(config.model, config.batch.sequence_length),
            "stopped_early": self._stopping,
        }


def describe_start(rank: RankRuntime) -> str:
    """One paragraph for a person: the layout, the stages' layers, the planned bubble."""
    return (
        f"{len(rank.grid.ranks)} ranks: {describe_layout(rank.grid)}; "
        f"{rank.config.parallel.schedule}, {rank.config.batch.num_micro_batches} micro-batches, "
        f"planned bubble {rank.train_plan.bubble:.1%}; zero stage {rank.config.parallel.zero_stage}"
    )


def describe_layout(grid: Grid) -> str:
    """For example "2 stages x 2 replicas x tp 4", or "2 stages x 2/1 replicas x tp 1"."""
    counts = sorted({len(ids) for ids in grid.replicas})
    replicas = str(counts[0]) if len(counts) == 1 else "/".join(str(len(ids)) for ids in grid.replicas)
    return f"{grid.pp_size} stages x {replicas} replicas x tp {grid.tp_size}"


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
