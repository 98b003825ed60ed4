"""Injected faults: which rank has which fault, when, and the probe that makes it happen.

A fault is real: the process sends itself SIGKILL, SIGSTOP or SIGTERM. Ranks that are threads are given another `act`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import get_args

from parallel3d.config.schema import ElasticConfig, FaultConfig, FaultPhase

STEP_PHASES = tuple(phase for phase in get_args(FaultPhase) if not phase.startswith("recovery") and phase != "evaluate")


def plan_faults(config: ElasticConfig, *, world_size: int, num_steps: int, attempt: int = 0) -> tuple[FaultConfig, ...]:
    """All faults of one start of a run (`attempt`: how often it has been restarted), the same in every process."""
    lots, drawn = config.random_faults, list[FaultConfig]()
    key = f"{lots.seed} restart {attempt}" if attempt else str(lots.seed)  # else it would fail for ever
    for step in range(1, num_steps + 1 if lots.probability else 1):
        for rank in range(world_size):
            numbers = random.Random(f"{key} {step} {rank}")
            if numbers.random() < lots.probability and len(drawn) < lots.max_faults:
                drawn.append(FaultConfig(rank=rank, step=step, phase=numbers.choice(STEP_PHASES), kind=lots.kind))
    return (*(fault for fault in config.faults if fault.attempt == attempt), *drawn)


class FaultInjector:
    """The probe of one rank. `begin_step` says where it stands, a call that it has entered a phase."""

    def __init__(self, faults: tuple[FaultConfig, ...], rank: int, act: Callable[[str], None]):
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._act = act
        self._step = 0
        self._was_sending = False

    def begin_step(self, step: int) -> None:
        self._step = step
        self._was_sending = False

    def __call__(self, phase: str) -> None:
        if not self._faults:
            return
        in_recovery = phase.startswith("recovery")
        for fault in self._faults:
            is_step = self._step + 1 >= fault.step if in_recovery else self._step == fault.step
            if fault.phase == phase and is_step:
                self._faults.remove(fault)
                if fault.kind == "sleep":
                    time.sleep(fault.seconds)
                else:
                    self._act(fault.kind)
                return

    def enter_instruction(self, op: str) -> None:
        """The executor's instructions by name: "load", "forward", "backward ...", "send ...", "receive ..."."""
        if not self._faults:
            return
        if self._was_sending and op.startswith("receive"):
            self("send")
        self._was_sending = op.startswith("send")
        if op in ("load", "forward"):
            self(op)
        elif op.startswith("backward"):
            self("backward")
