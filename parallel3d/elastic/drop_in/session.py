"""One worker's part in an elastic training loop: steps, slots, commits, and what a loss does to them.

    begin_step    the boundary between two steps: a change of membership that waits is made here
    next_slot     a slot to compute; after a loss with `redo` also those of the lost
    end_slot
    commit        reduce the gradients, then the entry; False: a loss has left more slots to compute

A step is committed on a worker when it holds the step's entry. Then the gradients are those of the whole step, and the
loop makes the optimizer's step. Losses show in these calls only, never within the loop's own code.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from parallel3d.elastic.drop_in.generations import Generations, LoopNetwork
from parallel3d.elastic.drop_in.gradient_sums import GradientSums
from parallel3d.elastic.drop_in.loop_state import LoopState, LossKind, Stateful
from parallel3d.elastic.drop_in.progress import Progress, StepEntry
from parallel3d.elastic.drop_in.sample_order import SampleOrder
from parallel3d.elastic.worker.membership_client import MembershipClient
from parallel3d.errors import GenerationEnded, ProtocolError, UserError
from parallel3d.precision.fixed_point import ExactSum, plan_fixed_point

NUM_KEPT_RECORDS = 4096
"""Steps that a new leader publishes if the old one may not have: more than pass until a silent host is given up."""
NO_UPDATE = (
    "no optimizer.step() between two elastic steps: the gradients of the first one are gone. They are accumulated "
    "within a step, over its slots: give elastic.Sampler a batch_size of several slots for each worker"
)
LEFT_WITHIN_STEP = (
    "the loop was left within a step, for whose other slots the others wait: leave it after the same step on all "
    "workers (batches are not the same on all after a loss: count steps, behind `if sampler.is_step_done:`)"
)
AFTER_STEP = -1
"""In place of a slot's number: the random numbers between two steps."""


@dataclass(frozen=True, kw_only=True)
class LoopHooks:
    """How a worker hears of the world outside, and reports to it."""

    publish: Callable[[dict[str, Any]], None] = lambda record: None
    stop_requested: Callable[[], bool] = lambda: False
    drain_requested: Callable[[], bool] = lambda: False
    on_step: Callable[[int], None] = lambda step: None
    """Called as a step begins."""
    on_progress: Callable[[], None] = lambda: None
    """Called often, as a sign of life."""
    on_ready: Callable[[], None] = lambda: None
    """Called in the worker's first generation, before its first step."""


class Session:
    """The elastic part of one worker."""

    def __init__(
        self,
        *,
        rank: int,
        membership: MembershipClient,
        network: LoopNetwork,
        host: str = "",
        hooks: LoopHooks | None = None,
        seed: int = 0,
    ):
        self.rank = rank
        self.state = LoopState()
        self.hooks = hooks or LoopHooks()
        self._seed = seed
        self._membership = membership
        self._computed: set[int] = set()
        """Slots of this step whose gradients are in the own sums."""
        self._slot: int | None = None
        """The slot that is being computed."""
        self.is_within_step = False
        self.has_inner_loop = False
        """Whether the loop is one of `elastic.steps`."""
        self.has_optimizer = False
        self.is_updated = True
        """Whether an optimizer has made its step for the newest committed one, as far as that can be seen."""
        self._awaits_update = False
        """This worker has joined with gradients that wait for the optimizer, and the loop has not come to them yet."""
        self._loss_sum = ExactSum()
        self._records: deque[dict[str, Any]] = deque(maxlen=NUM_KEPT_RECORDS)
        self._started_s = 0.0
        self._join_position = 0
        self.generations = Generations(
            rank=rank,
            membership=membership,
            network=network,
            state=self.state,
            host=host,
            publish=self.hooks.publish,
        )

    # --- what the loop trains -------------------------------------------------------------------------------------

    def attach_model(self, gradients: GradientSums, stateful: Sequence[Stateful], loss: LossKind) -> None:
        if self.state.gradients is not None:
            raise UserError("a script can have one elastic model: put all parameters into one module")
        self.state.gradients, self.state.stateful, self.state.loss = gradients, stateful, loss

    def attach_order(self, order: SampleOrder, *, has_inner_loop: bool) -> None:
        if self.state.gradients is None:
            raise UserError("wrap the model in elastic.DataParallel before the loop begins")
        if self.state.order not in (None, order):
            raise UserError("a script can have one elastic sampler")
        self.state.order, self.has_inner_loop = order, has_inner_loop

    @property
    def order(self) -> SampleOrder:
        assert self.state.order is not None
        return self.state.order

    @property
    def gradients(self) -> GradientSums:
        assert self.state.gradients is not None
        return self.state.gradients

    @property
    def progress(self) -> Progress:
        assert self.state.progress is not None, "the loop has not begun"
        return self.state.progress

    @property
    def device(self) -> torch.device:
        return self.state.gradients.device if self.state.gradients else torch.device("cpu")

    # --- steps ----------------------------------------------------------------------------------------------------

    def begin_step(self) -> Progress:
        """Goes to the boundary before the coming step: the loop has updated the weights. If the state is settled
        then, this worker has just joined: it only makes the optimizer's step."""
        if self.is_within_step:
            raise UserError(
                "the loop asks for the next batch before the last one is done: let the inner loop run to its end, or "
                "call backward() once for each batch of a DataLoader, which takes num_workers=0, drop_last=False and "
                "the slot_size as batch_size"
            )
        if not self.is_updated:
            warnings.warn(NO_UPDATE, stacklevel=2)
        if self.state.progress is None:
            self._enter("")
        elif self._awaits_update:
            self._check_generation()
        else:
            self._pass_boundary()
        self._awaits_update = False
        if not self.state.is_settled:
            self._begin_sums()
        self.is_within_step = True
        return self.progress

    def end_loop(self) -> None:
        """The loop ends at this boundary; the step that has begun is not made, here."""
        self.is_within_step, self._awaits_update = False, self.state.is_settled

    def next_slot(self) -> int | None:
        """Begins the next slot that this worker has to compute, and returns it; None if there is none."""
        self._check_generation()
        left = self._slots_left()
        if not left:
            return None
        self.begin_slot(left[0], is_last=len(left) == 1)
        return left[0]

    def _slots_left(self) -> list[int]:
        """What this worker has to compute of the step."""
        own = () if self.state.is_settled else self.progress.samples.slots_of(self.rank)
        return [slot for slot in own if slot not in self._computed]

    def begin_slot(self, slot: int, *, is_last: bool, is_ghost: bool = False) -> None:
        """Takes the gradients of what follows. Those of a ghost, a copy of another worker's slot, are left out."""
        size, groups = self.order.num_samples_of(self.progress.samples, slot), self.generations.groups
        weight = float(size) if self.state.loss == "mean" else 1.0
        may_reduce = is_last and groups is not None and not self.state.is_settled
        self.gradients.begin_slot(0.0 if is_ghost else weight, groups.gradients if groups and may_reduce else None)
        self._slot = None if is_ghost else slot
        self._seed_random(self.progress.samples.step, slot)
        self.hooks.on_progress()

    def end_slot(self) -> None:
        self.gradients.end_slot()
        if self._slot is not None:
            self._computed.add(self._slot)
        self._slot = None
        self.hooks.on_progress()

    def add_loss(self, loss: float) -> None:
        """Counts the loss of the slot that is being computed."""
        if self._slot is not None:
            size = self.order.num_samples_of(self.progress.samples, self._slot)
            self._loss_sum += ExactSum.of([loss * (size if self.state.loss == "mean" else 1)])

    def commit(self) -> bool:
        """Ends the step; False if this worker has slots left to compute, as it may have after a loss."""
        while not self.state.is_settled:
            if self._slots_left():
                return False
            try:
                self._check_token()
                self._reduce()
            except GenerationEnded as error:
                self._change(str(error))
        self.gradients.hand_out()
        self.is_within_step, self.is_updated = False, not self.has_optimizer
        self._seed_random(self.progress.position, AFTER_STEP)
        return True

    def mean_loss(self) -> float | None:
        """The mean loss of the newest committed step over all its samples."""
        newest = self.progress.newest
        return newest.loss.value / newest.num_samples if newest and newest.num_samples else None

    @property
    def is_over(self) -> bool:
        """Whether the loop ends here: a stop was requested, or the others are behind their loops."""
        newest = self.progress.newest
        return self.progress.is_over or bool(newest and newest.stop)

    def end(self) -> None:
        """Waits until all workers have come to the end of their scripts. Raises UserError within a step, since others
        would wait for the rest of it."""
        if self.is_within_step and self._computed:
            raise UserError(LEFT_WITHIN_STEP)
        if self.state.progress is None:
            self._enter("")
        if self.state.is_settled:
            self.state.weights_step = self.state.position
        self.state.progress = replace(self.progress, is_over=True)
        while True:  # bounded: by the coordinator, which ends the run
            try:
                self._membership.finish()
                return
            except GenerationEnded as error:
                self._change(str(error))

    # --- within a step --------------------------------------------------------------------------------------------

    def _begin_sums(self) -> None:
        samples = self.progress.samples
        self._computed, self._slot, self._loss_sum = set(), None, ExactSum()
        fixed = plan_fixed_point(num_tokens=max(2, samples.size), num_terms=len(samples.owners))
        self.gradients.begin_step(self.order.num_used(samples), fixed)
        self._started_s = time.perf_counter()
        self.hooks.on_step(samples.step)

    def _reduce(self) -> None:
        """Reduces gradients and entry. Raises GenerationEnded."""
        groups, samples = self.generations.groups, self.progress.samples
        assert groups is not None
        self.gradients.reduce(groups.gradients)
        used = [self.order.num_samples_of(samples, slot) for slot in self._computed]
        own = StepEntry(
            step=samples.step,
            num_samples=sum(used),
            leave=self.hooks.drain_requested(),
            stop=self.hooks.stop_requested(),
            loss=self._loss_sum,
        )
        floats = groups.entries.all_reduce(torch.tensor(own.to_floats(), dtype=torch.float64)).tolist()
        entry = StepEntry.from_floats(samples.step, samples.epoch, floats)
        if entry.num_workers != groups.entries.size:
            size = groups.entries.size
            raise ProtocolError(f"step {entry.step}: {entry.num_workers} contributions of {size} workers")
        self.state.apply(entry)
        self._record(entry)

    def _record(self, entry: StepEntry) -> None:
        """Publishes a step, or keeps it for the case that this worker becomes the leader."""
        record: dict[str, Any] = {"kind": "step", "step": entry.step, "num_samples": entry.num_samples}
        record |= {"step_s": time.perf_counter() - self._started_s, "epoch": entry.epoch}
        if entry.loss != ExactSum():
            record["loss"] = self.mean_loss()
        self._records.append(record)
        if self.generations.is_leader:
            self.hooks.publish(record)

    def _seed_random(self, step: int, slot: int) -> None:
        """Seeds torch's generators, so that dropout does not depend on which worker computes a slot."""
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{self._seed}/{step}/{slot}".encode()).digest()[:8], "big"))

    # --- changes of membership ------------------------------------------------------------------------------------

    def _pass_boundary(self) -> None:
        """Goes over to the next step, and first to another generation if the last entry asks for it."""
        self.state.weights_step = self.state.position
        newest = self.progress.newest
        if newest and newest.leave and newest.step > self._join_position:
            self._change("a worker leaves or joins")
        self._check_generation()

    def _check_token(self) -> None:
        self.generations.token.check()

    def _check_generation(self) -> None:
        """Goes into the next generation if this one is over."""
        if self.generations.token.aborted:
            self._change(self.generations.token.reason)

    def _change(self, reason: str) -> None:
        """Goes into the next generation. What this worker has computed of its step stays."""
        self.generations.leave(reason)
        self._enter(reason)
        if self.state.gradients is not None and not self.state.is_settled:
            self.gradients.forget_reduction(is_aborted=True)
            self.gradients.set_num_samples(self.order.num_used(self.progress.samples))

    def _enter(self, suspicion: str) -> None:
        """Enters a generation in which all connect."""
        is_first = self.generations.record is None
        position = self.state.position
        self.generations.enter(suspicion)
        self._join_position = self.state.position
        if is_first:
            self.hooks.on_ready()
        elif self.state.position > position and self.progress.newest:
            self._record(self.progress.newest)
        record = self.generations.record
        for each in self._records if self.generations.is_leader and record else ():
            if record and each["step"] > record.last_reported_step:
                self.hooks.publish(each)
