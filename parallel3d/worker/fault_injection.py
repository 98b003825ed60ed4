"""Fault injection: which rank fails where, and the hook that makes it fail.

Faults are real: the process sends itself SIGKILL, SIGSTOP or SIGTERM, or changes a weight. Ranks that are threads
inject theirs through another `act`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import get_args

import torch

from parallel3d.config.schema import ElasticConfig, FaultConfig, FaultPhase
from parallel3d.trainer.context import RankContext

STEP_PHASES = tuple(
    phase for phase in get_args(FaultPhase) if not phase.startswith("recovery") and phase not in ("build", "evaluate")
)


def plan_faults(config: ElasticConfig, *, world_size: int, num_steps: int, attempt: int = 0) -> tuple[FaultConfig, ...]:
    """Returns all faults of one start of a run, the same in every process; `attempt` counts its restarts."""
    settings, drawn = config.random_faults, list[FaultConfig]()
    key = f"{settings.seed} restart {attempt}" if attempt else str(settings.seed)  # or it would fail forever
    for step in range(1, num_steps + 1 if settings.probability else 1):
        for rank in range(world_size):
            rng = random.Random(f"{key} {step} {rank}")
            if rng.random() < settings.probability and len(drawn) < settings.max_faults:
                drawn.append(FaultConfig(rank=rank, step=step, phase=rng.choice(STEP_PHASES), kind=settings.kind))
    return (*(fault for fault in config.faults if fault.attempt == attempt), *drawn)


class FaultInjector:
    """The fault hook of one rank: called with each phase that the rank enters, it injects the faults due there.

    `joiner`: its number among those beyond the layout, from 1 on. `coordinates` returns those that it has now.
    """

    def __init__(
        self,
        faults: tuple[FaultConfig, ...],
        rank: int,
        act: Callable[[str], None],
        *,
        joiner: int = 0,
        coordinates: Callable[[], str] = lambda: "",
    ):
        self.sleep: Callable[[float], None] = time.sleep
        mine = [f for f in faults if f.coordinates is not None or f.rank == rank or f.joiner == joiner]
        self._faults = [fault for fault in mine if fault.kind != "slow"]
        self._slow = [fault for fault in mine if fault.kind == "slow"]
        self._act = act
        self._joins = joiner > 0
        self._coordinates = coordinates
        self._step = 0
        self._was_sending = False

    def begin_step(self, step: int) -> None:
        if self._joins and self._step == 0:  # what these coordinates had to suffer before, others have
            self._faults = [fault for fault in self._faults if fault.coordinates is None or fault.step >= step]
        self._step = step
        self._was_sending = False

    def __call__(self, phase: str) -> None:
        if not self._faults:
            return
        in_recovery = phase.startswith("recovery")
        for fault in self._faults:
            is_step = self._step + 1 >= fault.step if in_recovery else self._step == fault.step
            if fault.phase == phase and (is_step or phase == "build") and self._is_here(fault):
                self._faults.remove(fault)
                if fault.kind == "sleep":
                    self.sleep(fault.seconds)
                else:
                    self._act(fault.kind)
                return

    def slow_down(self, seconds: float) -> float:
        """Sleeps as long as a compute of these seconds takes longer while this rank is slow; returns its seconds."""
        factor = self.slowness()
        if factor > 1.0:
            self.sleep((factor - 1.0) * seconds)
        return factor * seconds

    def slowness(self) -> float:
        """How many times as long this rank's computes are to take in this step."""
        factor = 1.0
        for fault in self._slow:
            has_begun = fault.step <= self._step
            is_over = fault.num_steps is not None and self._step >= fault.step + fault.num_steps
            if has_begun and not is_over and self._is_here(fault):
                factor = max(factor, fault.factor)
        return factor

    def _is_here(self, fault: FaultConfig) -> bool:
        """Whether the fault names this rank; one that joins has no coordinates before its first step."""
        if fault.coordinates is None:
            return True
        return not (self._joins and self._step == 0) and fault.coordinates == self._coordinates()

    def enter_instruction(self, op: str) -> None:
        """Maps the executor's instructions to phases: "load", "forward", "backward ...", "send ...", "receive ..."."""
        if not self._faults:
            return
        if self._was_sending and op.startswith("receive"):
            self("send")
        self._was_sending = op.startswith("send")
        if op in ("load", "forward"):
            self(op)
        elif op.startswith("backward"):
            self("backward")


def inject_fault(kind: str) -> None:
    """Sends this process the signal of a fault."""
    print(f"injected fault: {kind} at {time.monotonic():.6f}", flush=True)
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[kind]
    os.kill(os.getpid(), number)


def corrupt_weight(rank: RankContext, kind: str) -> None:
    """Changes a weight of this rank, once all are gathered: flips the lowest bit of the first one (flip), or sets it to
    NaN (nan)."""
    rank.optimizer.finish_gather()
    weights = rank.optimizer.buckets[-1].weights
    if kind == "nan":
        weights[0] = float("nan")
    else:
        weights[:1].view(torch.uint8)[0] ^= 1
    print(f"injected fault: {kind} of a weight of {rank.optimizer.buckets[-1].plan.param_slots[0].name}", flush=True)
