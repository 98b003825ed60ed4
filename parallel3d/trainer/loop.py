"""The training loop: a small state machine around the step.

    RECOVER --in a generation--> STEP --when due--> EVALUATE --when due--> SAVE --> STEP ... --> STOP
    STEP --a stop was requested--> SAVE --> STOP      STEP --a worker leaves or joins--> RECOVER
    any --the generation ends--> RECOVER              STEP --training has diverged--> DIVERGED: pending saves are
                                                      finished, then all ranks end

The next phase follows from the train state alone, so that all ranks agree on it, before and after a loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from parallel3d.config.schema import RunConfig
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.errors import Diverged, GenerationEnded
from parallel3d.parallel.abort import POLL_S
from parallel3d.trainer.checkpointing import CheckpointSaver, NoSaver
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.divergence_check import find_divergence
from parallel3d.trainer.recovery import RecoveryManager
from parallel3d.trainer.reporting import StepReporter
from parallel3d.trainer.state import TrainState
from parallel3d.trainer.step import evaluate, train_step


class Phase(Enum):
    """The next action of the trainer."""

    RECOVER = "recover"
    STEP = "step"
    EVALUATE = "evaluate"
    SAVE = "save"
    STOP = "stop"
    DIVERGED = "diverged"


@dataclass
class Trainer:
    """Trains `rank` from its first step to the last, or to a requested stop, through all changes of membership."""

    rank: RankContext
    recovery: RecoveryManager
    publish: Callable[[dict[str, Any]], None]
    """Takes records of progress for the run folder and the terminal (monitor/sinks.py)."""
    stop_requested: Callable[[], bool]
    drain_requested: Callable[[], bool] = lambda: False
    change_requested: Callable[[], bool] = lambda: False
    """Returns True while the membership should change at a step boundary, such as when workers wait to join."""
    saver: CheckpointSaver = field(default_factory=NoSaver)
    on_generation: Callable[[GenerationRecord], None] = lambda record: None
    """Called on every rank of the grid when a generation begins; may use its groups."""
    on_phase: Callable[[Phase, int], None] = lambda phase, step: None
    """Called before each phase: with the number of the coming step, otherwise of the last one."""
    data_wait_s: Callable[[], float] = lambda: 0.0
    """Returns the seconds that this rank has spent waiting for data."""
    describe: Callable[[], dict[str, Any]] = lambda: {}
    """Returns further figures for the summary."""

    def __post_init__(self) -> None:
        self._reporter = StepReporter(self.rank, self.publish, data_wait_s=self.data_wait_s, describe=self.describe)
        self._join_step = 0
        self._awaited_save: int | None = None
        """Step of the save for whose end a change of membership waits."""

    def run(self) -> bool:
        """Trains to the end; False when this rank left earlier or was a spare at the end. Raises Diverged."""
        suspicion = ""
        while self.recovery.enter_generation(suspicion):
            suspicion = "a worker leaves or joins"
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
        self._awaited_save = None
        self._reporter.notices(self.saver.begin_generation())
        self.on_generation(record)
        self._reporter.begin_generation(record.last_reported_step)

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
            self._reporter.end_run()
            self.recovery.finish()
        return phase

    def _next_phase(self) -> Phase:
        """The next phase, from the state alone: the same on every rank, before and after a loss."""
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
        """Whether `run.num_steps` or `run.num_tokens` is reached."""
        state, run = self.rank.state, self.rank.config.run
        is_last = run.num_steps is not None and state.iteration >= run.num_steps
        return is_last or (run.num_tokens is not None and state.tokens_seen >= run.num_tokens)

    def _step(self) -> None:
        state = self.rank.state
        self.on_phase(Phase.STEP, state.iteration + 1)
        self._reporter.begin_step()
        report = train_step(
            self.rank,
            stop=self.stop_requested(),
            leave=self.drain_requested() or self._is_time_to_change(),
            evaluate=self._reporter.wants_evaluation,
            save_status=self.saver.status(),
        )
        self._reporter.notices(self.saver.on_entry(report.entry))
        self._reporter.end_step(report, range(state.tokens_read, self.rank.state.tokens_read))

    def _is_time_to_change(self) -> bool:
        """Whether this rank asks for a change in the coming step. A change ends a save under way, so it waits for one;
        but not for the one after it: saves that follow each other closely would keep workers out for ever."""
        if not self.change_requested():
            self._awaited_save = None
            return False
        if self.saver.is_saving and self._awaited_save is None:
            self._awaited_save = self.saver.last_step
        return not self.saver.is_saving or self.saver.last_step != self._awaited_save

    def _evaluate(self) -> None:
        self.on_phase(Phase.EVALUATE, self.rank.state.iteration)
        self._reporter.begin_evaluation()
        started = time.perf_counter()
        evaluate(self.rank)
        self._reporter.end_evaluation(time.perf_counter() - started)

    def _save(self) -> None:
        """Begins a save between two steps; at the end of the run, completes it."""
        state = self.rank.state
        self.on_phase(Phase.SAVE, state.iteration)
        loss = self._reporter.mean_loss_since(self.saver.last_step)
        if state.entries[-1].stop or self._is_over:
            self._save_final(loss)
        else:
            started = time.perf_counter()
            texts = self.saver.begin(loss)
            self._reporter.end_snapshot(time.perf_counter() - started)
            self._reporter.notices(texts)

    def _save_final(self, training_loss: float | None) -> None:
        """Saves the last step, with retries: no step follows, so what is not on disk now is lost."""
        step = self.rank.state.iteration
        self._reporter.notices(self.saver.save_now(training_loss))
        for wait_s in self.rank.config.checkpoint.retry_s:
            if not self.saver.has_failed:
                return
            self._reporter.leader_notice(f"step {step}, the last, is not on disk: trying again in {wait_s:g} s")
            self._wait_unless_stopped(wait_s)
            self._reporter.notices(self.saver.save_now(training_loss))
        if self.saver.has_failed:
            self._reporter.leader_notice(f"warning: the last step, {step}, has no checkpoint")

    def _wait_unless_stopped(self, seconds: float) -> None:
        """Waits until the time is over or a stop is requested.

        Ranks see a stop at different times; the early ones wait for the others in the next collective.
        """
        until = time.monotonic() + seconds
        with self.rank.token.waiting():
            while not self.stop_requested() and (left := until - time.monotonic()) > 0:
                self.rank.token.sleep(min(left, POLL_S))

    def _end_diverged(self) -> None:
        """Completes a pending save of an earlier step, saves nothing of this state, and raises Diverged."""
        step = self.rank.state.iteration
        reason = find_divergence(self.rank.state, since=self.rank.resumed_from)
        self.on_phase(Phase.DIVERGED, step)
        self._reporter.notices(self.saver.finish())
        self._reporter.diverged(reason)
        self.rank.groups.world.all_reduce(torch.zeros(1))  # the leader has published: the first error ends the run
        raise Diverged(f"training has diverged in step {step}: {reason}")


def evaluation_is_due(state: TrainState, run: RunConfig, *, is_over: bool) -> bool:
    """Whether an evaluation belongs between the newest step and the next."""
    if state.iteration == 0:
        return run.evaluate_at_start
    by_steps = run.evaluate_every is not None and state.iteration % run.evaluate_every == 0
    return by_steps or state.entries[-1].evaluate or (is_over and run.evaluate_at_end)
