"""The hooks of a worker's training loop: heartbeats, status, fault injection, traces."""

from __future__ import annotations

from collections.abc import Callable

from parallel3d.config.schema import Config
from parallel3d.config.sections.parallel import num_ranks
from parallel3d.config.warmup_builder import num_steps
from parallel3d.debug.trace import NoTrace
from parallel3d.elastic.guardian.heartbeat import Mode
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.pipeline.instructions import Instruction
from parallel3d.trainer.context import RankHooks
from parallel3d.trainer.loop import Phase
from parallel3d.worker.fault_injection import FaultInjector, inject_fault, plan_faults

WARMUP_STEPS = 2


class WorkerHooks:
    """Hooks of one rank: a heartbeat with every instruction, its status, its injected faults, traces."""

    def __init__(self, config: Config, context: WorkerContext, trace: NoTrace | None = None, *, attempt: int = 0):
        size, last_step = context.world_size, num_steps(config)
        faults = plan_faults(config.elastic, world_size=size, num_steps=last_step, attempt=attempt)
        self.coordinates: Callable[[], str] = lambda: ""
        """Returns this rank's newest coordinates."""
        self._injector = FaultInjector(
            faults,
            context.rank,
            self._fail,
            joiner=context.rank - num_ranks(config.parallel, None) + 1,
            coordinates=lambda: self.coordinates(),
        )
        self.corrupt_weight: Callable[[str], None] = lambda kind: None
        """Changes a weight, for faults of kind flip and nan."""
        self._heartbeat = context.heartbeat
        self._worker_status = context.worker_status
        self._trace = trace or NoTrace()
        self._num_steps = 0

    def for_rank(self) -> RankHooks:
        """The hooks that a rank calls while it trains."""
        return RankHooks(
            on_instruction=self.on_instruction,
            compute_hook=self._injector.slow_down,
            slowness=self._injector.slowness,
            phase_hook=self.enter_phase,
            label=self._trace.label,
        )

    def close(self) -> None:
        """Ends the trace."""
        self._trace.close()

    def on_instruction(self, instruction: Instruction) -> None:
        self._heartbeat.tick()
        self._worker_status.enter(instruction)
        self._injector.enter_instruction(instruction.op.value)

    def enter_phase(self, phase: str) -> None:
        self._heartbeat.tick()
        self._worker_status.enter(phase)
        self._injector(phase)

    def _fail(self, kind: str) -> None:
        if kind in ("flip", "nan"):
            self.corrupt_weight(kind)
        else:
            inject_fault(kind)

    def begin(self, phase: Phase, step: int) -> None:
        """Begins a phase of the training loop.

        The heartbeat is suspended in evaluations, which count few instructions, and in the first steps, which touch
        memory for the first time and compile kernels.
        """
        self._worker_status.begin(phase.value, step)
        if phase is Phase.STEP:
            self._heartbeat.mode = Mode.SUSPENDED  # a profiler that starts or writes holds Python's lock
            self._trace.begin_step(step)
            self._num_steps += 1
        is_usual = phase is Phase.STEP and self._num_steps > WARMUP_STEPS
        self._heartbeat.step = step
        self._heartbeat.mode = Mode.RUNNING if is_usual else Mode.SUSPENDED
        self._injector.begin_step(step)
