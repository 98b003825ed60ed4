"""The names that a script uses: the model's wrapper, the sampler, and the steps.

With "redo" the samples of a lost worker are computed again, which needs an inner loop::

    model = elastic.DataParallel(model, optimizer)
    sampler = elastic.Sampler(dataset, batch_size=256, slot_size=64)
    for step in elastic.steps(sampler, epochs=14):
        for x, y in step:  # this worker's slots; more after a loss
            F.cross_entropy(model(x), y).backward()
        optimizer.step()

With "drop" the loop stays as it is in a script for DistributedDataParallel::

    sampler = elastic.Sampler(dataset, slot_size=64, on_failure="drop")
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    for epoch in range(14):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextvars import ContextVar
from typing import Any, Literal, NoReturn

from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.data import default_collate

from parallel3d.elastic.drop_in.gradient_sums import GradientSums
from parallel3d.elastic.drop_in.loop_state import LossKind, Stateful
from parallel3d.elastic.drop_in.progress import Progress
from parallel3d.elastic.drop_in.sample_order import SampleOrder
from parallel3d.elastic.drop_in.session import Session
from parallel3d.errors import UserError

CURRENT: ContextVar[Session] = ContextVar("session")
"""The session of the worker that runs this script."""
EARLY_UPDATE = (
    "optimizer.step() within the inner loop of elastic.steps, where parameters have no gradients yet: call it once a "
    "step, after the inner loop"
)


def current_session() -> Session:
    """Raises UserError outside of a worker."""
    session = CURRENT.get(None)
    if session is None:
        raise UserError("call elastic.init() at the top of the script: it starts the workers, which run it from there")
    return session


class DataParallel(nn.Module):
    """Wraps a model, in place of torch's DistributedDataParallel; `.module` is the model itself.

    stateful: the optimizer, and all else with a state_dict that a worker needs which joins the run, such as a schedule
    of learning rates. loss: whether each backward pass is that of its samples' mean loss, or of their sum; after a step
    the gradients are those of the mean over all its samples either way. sums: "exact" gives the same bits with any
    number of workers.
    """

    def __init__(
        self,
        module: nn.Module,
        *stateful: Stateful,
        loss: LossKind = "mean",
        sums: Literal["float", "exact"] = "float",
    ):
        super().__init__()
        if not stateful:
            raise UserError("elastic.DataParallel(model, optimizer): workers that join need the optimizer's state, too")
        self.module = module
        gradients, session = GradientSums(module.parameters(), exact=sums == "exact"), current_session()
        session.attach_model(gradients, (module, *stateful), loss)

        def before_update(*_: Any) -> None:  # of a closure in a plain loop, the backward pass is yet to come
            if gradients.is_slot_open and session.order.batch_size is not None:
                raise UserError(EARLY_UPDATE)

        for each in stateful:
            if isinstance(each, Optimizer):
                each.register_step_pre_hook(before_update)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> NoReturn:
        """Refuses what DistributedDataParallel offers for the accumulation of gradients."""
        raise UserError(
            "elastic.DataParallel has no no_sync(): gradients are accumulated by elastic.steps, with a batch_size of "
            "several slots for each worker and one backward pass for each slot"
        )


class Sampler:
    """Says which samples a worker computes. `dataset`: with a length, and samples by index.

    on_failure: "redo" for `steps`: `batch_size` samples a step, whatever the number of workers, in slots of at most
    `slot_size`; the slots of a lost worker are computed by the others. "drop": `slot_size` samples a step and worker;
    those of a lost worker return in the next epoch.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        slot_size: int,
        batch_size: int | None = None,
        on_failure: Literal["redo", "drop"] = "redo",
        seed: int = 0,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] = default_collate,
    ):
        if (batch_size is None) != (on_failure == "drop"):
            raise UserError('elastic.Sampler: "redo" needs a batch_size, the samples of a step; "drop" takes none')
        if min(slot_size, batch_size or 1, len(dataset)) < 1:
            raise UserError("elastic.Sampler: slot_size, batch_size and the length of the dataset must be at least 1")
        self.dataset = dataset
        self.collate = collate
        self.order = SampleOrder(
            num_samples=len(dataset), slot_size=slot_size, batch_size=batch_size, seed=seed, shuffle=shuffle
        )
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration is; without a call each is the next one."""
        self._epoch = epoch

    def fetch(self, indices: Sequence[int]) -> Any:
        """Returns the samples at these indices as one batch."""
        fetch_all = getattr(self.dataset, "__getitems__", None)
        dataset: Any = self.dataset
        return self.collate(fetch_all(list(indices)) if fetch_all else [dataset[index] for index in indices])

    def __len__(self) -> int:
        """The samples of an epoch that a worker has if none is lost, as with a DistributedSampler."""
        record = current_session().generations.record
        if record is None:  # the kind of error for which len() has callers such as tqdm go on without
            raise TypeError("elastic.Sampler has no length before the loop begins: the number of workers is not known")
        return -(-self.order.num_samples // len(record.grid.ranks))

    def __iter__(self) -> Iterator[int]:
        """The indices of this worker's samples in an epoch, for a DataLoader."""
        if self.order.batch_size is not None:
            raise UserError('a DataLoader goes with elastic.Sampler(on_failure="drop"); for "redo" use elastic.steps')
        session = current_session()
        session.attach_order(self.order)
        return SlotIndices(self, session)

    def begin_step(self, step: BackwardStep) -> Progress | None:
        """Goes to the coming step of this epoch; None if the epoch is over, or the run."""
        session = step.session
        progress = session.begin_step()
        settled = progress.newest.epoch if session.state.is_settled and progress.newest else None
        epoch = progress.samples.epoch if settled is None else settled
        if epoch > self._epoch or (session.is_over and settled is None):
            session.end_loop()
            self._epoch += 1
            return None
        return progress


class SlotIndices:
    """An epoch's indices one by one: a DataLoader, whose batch_size is the slot_size, makes a batch of each slot.

    The first index of a slot begins its step. Only the last slot of an epoch may be smaller than a batch: the iterator
    ends after it once more than usual, so that the DataLoader takes what it has.
    """

    def __init__(self, sampler: Sampler, session: Session):
        self._sampler = sampler
        self._session = session
        self._step = BackwardStep(session)
        self._left: deque[int] = deque()
        self._is_short = False

    def __iter__(self) -> SlotIndices:
        return self

    def __next__(self) -> int:
        if self._left and not self._session.is_within_step:
            raise UserError(
                "batch_size of the DataLoader is smaller than slot_size of its elastic.Sampler: they must be equal"
            )
        if not self._left:
            self._begin_slot()
        return self._left.popleft()

    def _begin_slot(self) -> None:
        """Begins the next step. Raises StopIteration at the end of the epoch, and of a batch that is not full."""
        if self._is_short:
            self._is_short = False
            raise StopIteration
        progress = self._sampler.begin_step(self._step)
        if progress is None:
            raise StopIteration
        order, (slot, is_ghost) = self._sampler.order, self._step.begin()
        samples = order.samples(progress.samples, slot)
        if is_ghost:  # a full batch: it may be that of a step which is not the last of this epoch
            samples = (samples * order.slot_size)[: order.slot_size]
        self._is_short = len(samples) < order.slot_size
        self._left.extend(samples)


class BackwardStep:
    """The steps of a loop without an inner one: the end of the backward pass commits them."""

    def __init__(self, session: Session):
        self.session = session
        self._is_queued = False
        session.gradients.on_gradient = self._on_gradient

    def begin(self) -> tuple[int, bool]:
        """Begins this worker's only slot, or a ghost if it has none: the loop makes the optimizer's step only where it
        has a batch. Returns the slot, and whether it is a ghost."""
        session = self.session
        own = () if session.state.is_settled else session.progress.samples.slots_of(session.rank)
        slot = own[0] if own else 0
        session.begin_slot(slot, is_last=True, is_ghost=not own)
        return slot, not own

    def _on_gradient(self) -> None:
        self.session.hooks.on_progress()
        if not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._is_queued = False
        self.session.end_slot()
        self.session.commit()


class Step:
    """One step of `steps`: an iterator over this worker's slots."""

    def __init__(self, session: Session, sampler: Sampler):
        self._session = session
        self._sampler = sampler

    @property
    def number(self) -> int:
        """From 1; within the inner loop and after it."""
        progress = self._session.progress
        return progress.samples.step if self._session.is_within_step else progress.position

    def add_loss(self, loss: Tensor | float) -> None:
        """Adds the loss of the current slot to the step's, which metrics.jsonl and `mean_loss` give."""
        self._session.add_loss(loss.item() if isinstance(loss, Tensor) else loss)

    @property
    def mean_loss(self) -> float | None:
        """The mean of the losses over all samples of the step, the same on all workers; after the inner loop."""
        return self._session.mean_loss()

    def __iter__(self) -> Iterator[Any]:
        session, order = self._session, self._sampler.order
        while True:
            while (slot := session.next_slot()) is not None:
                yield self._sampler.fetch(order.samples(session.progress.samples, slot))
                session.end_slot()
            if session.commit():
                return


def steps(sampler: Sampler, *, epochs: int = 1) -> Iterator[Step]:
    """Yields the steps of a run, all epochs. A worker that joins begins with the step in which it joins."""
    session = current_session()
    session.attach_order(sampler.order)
    while True:
        progress = session.begin_step()
        is_last = session.is_over or progress.samples.epoch >= epochs
        if is_last and not session.state.is_settled:
            session.end_loop()
            return
        yield Step(session, sampler)
