"""The names that a script uses: the model's wrapper, the sampler, and the steps.

The loop stays as it is in a script for DistributedDataParallel::

    model = elastic.DataParallel(model, optimizer)
    sampler = elastic.Sampler(dataset, batch_size=256, slot_size=64)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    for epoch in range(14):
        for x, y in loader:  # this worker's slots; more after a loss
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()  # of a step that is done; until then it does nothing

With `on_failure="drop"` in place of the batch_size the samples of a lost worker return an epoch later. With an inner
loop over the slots of a step there is a place for what is to run once a step::

    for step in elastic.steps(sampler, epochs=14):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextvars import ContextVar
from functools import wraps
from types import MethodType
from typing import Any, Literal, NoReturn

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import default_collate

from parallel3d.elastic.drop_in.gradient_sums import GradientSums
from parallel3d.elastic.drop_in.loop_state import LossKind, Stateful
from parallel3d.elastic.drop_in.sample_order import SampleOrder
from parallel3d.elastic.drop_in.session import Session
from parallel3d.errors import UserError

CURRENT: ContextVar[Session] = ContextVar("session")
"""The session of the worker that runs this script."""
EARLY_UPDATE = (
    "step() of an optimizer or a schedule before the backward pass of an elastic slot, when parameters have no "
    "gradients yet: in a loop over a DataLoader call it after backward(), and without a closure; with elastic.steps "
    "once a step, after the inner loop"
)

UPDATES: dict[type, tuple[str, ...]] = {
    GradScaler: ("step", "update", "unscale_"),
    AveragedModel: ("update_parameters",),
    nn.Module: (),
    object: ("step",),
}
"""What moves an object on by a step, by its type: of several the first."""


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
        session.has_optimizer = any(isinstance(each, Optimizer) for each in stateful)
        for each in stateful:
            make_updates_wait(each, session)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> NoReturn:
        """Refuses what DistributedDataParallel offers for the accumulation of gradients."""
        raise UserError(
            "elastic.DataParallel has no no_sync(): gradients are accumulated over the slots of a step; give "
            "elastic.Sampler a batch_size of several slots for each worker"
        )


def make_updates_wait(each: Any, session: Session) -> None:
    """Makes what moves `each` on by a step do nothing as long as a plain loop's step has slots left.

    An optimizer gets an attribute, since a schedule may have given it one before, and may give it one later; all else a
    subclass, since the state_dict of a schedule is all its attributes.
    """
    if isinstance(each, Optimizer):
        update = each.step

        def update_once(self: Any, *args: Any, **kwargs: Any) -> Any:
            session.is_updated = True
            return update(*args, **kwargs)

        each.step = MethodType(wraps(update)(_when_done(update_once, session)), each)  # type: ignore[method-assign]
        return
    cls = type(each)
    names = next(names for kind, names in UPDATES.items() if isinstance(each, kind))
    methods = {name: getattr(cls, name) for name in names if callable(getattr(cls, name, None))}
    waiting = {name: wraps(method)(_when_done(method, session)) for name, method in methods.items()}
    if waiting:
        each.__class__ = type(cls.__name__, (cls,), {**waiting, "__module__": cls.__module__})


def _when_done(method: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def when_done(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs) if may_update(session) else None

    return when_done


def may_update(session: Session) -> bool:
    """Whether the loop is between two steps, as far as it can see. Raises UserError before a slot's backward pass."""
    if not session.gradients.is_slot_open:
        return session.has_inner_loop or not session.is_within_step
    if session.order.batch_size is None:  # of a closure the backward pass is yet to come
        return True
    raise UserError(EARLY_UPDATE)


class Sampler:
    """Says which samples a worker computes. `dataset`: with a length, and samples by index.

    on_failure: "redo": `batch_size` samples a step, whatever the number of workers, in slots of at most `slot_size`;
    the slots of a lost worker are computed by the others. "drop": `slot_size` samples a step and worker; those of a
    lost worker return in the next epoch.
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

    @property
    def is_step_done(self) -> bool:
        """Whether the last backward pass has completed a step: for what a plain loop is to do once a step, since it
        computes several slots of one after a loss, and where a worker has more than one."""
        return not current_session().is_within_step

    def __iter__(self) -> Iterator[int]:
        """The indices of this worker's samples in an epoch, for a DataLoader."""
        session = current_session()
        session.attach_order(self.order, has_inner_loop=False)
        return SlotIndices(self, session)

    def begin_step(self, step: BackwardStep) -> bool:
        """Goes to the coming step of this epoch; False if the epoch is over, or the run."""
        session = step.session
        progress = session.begin_step()
        settled = progress.newest.epoch if session.state.is_settled and progress.newest else None
        epoch = progress.samples.epoch if settled is None else settled
        if epoch > self._epoch or (session.is_over and settled is None):
            session.end_loop()
            self._epoch += 1
            return False
        return True


class SlotIndices:
    """An epoch's indices one by one: a DataLoader, whose batch_size is the slot_size, makes a batch of each slot.

    The first index of a slot begins it, and its step if it is the first. After a slot that is smaller than a batch the
    iterator ends once more than usual, so that the DataLoader takes what it has.
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
        if self._left and not self._session.gradients.is_slot_open:
            raise UserError(
                "batch_size of the DataLoader is smaller than slot_size of its elastic.Sampler: they must be equal"
            )
        if not self._left:
            self._begin_slot()
        return self._left.popleft()

    def _begin_slot(self) -> None:
        """Begins the next slot. Raises StopIteration at the end of the epoch, and of a batch that is not full."""
        if self._is_short:
            self._is_short = False
            raise StopIteration
        is_between_slots = self._session.is_within_step and not self._session.gradients.is_slot_open
        if not is_between_slots and not self._sampler.begin_step(self._step):
            raise StopIteration
        order, (slot, is_ghost) = self._sampler.order, self._step.begin_slot()
        samples = order.samples(self._session.progress.samples, slot)
        if is_ghost:  # a full batch: it may be that of a step which is not the last of this epoch
            samples = (samples * order.slot_size)[: order.slot_size]
        self._is_short = len(samples) < order.slot_size
        self._left.extend(samples)


class BackwardStep:
    """The steps of a loop without an inner one: the end of the backward pass of their last slot commits them."""

    def __init__(self, session: Session):
        self.session = session
        self._is_queued = False
        session.gradients.on_gradient = self._on_gradient

    def begin_slot(self) -> tuple[int, bool]:
        """Begins this worker's next slot, or a ghost if it has none: the loop makes the optimizer's step only where it
        has a batch. Returns the slot, and whether it is a ghost."""
        slot = self.session.next_slot()
        if slot is not None:
            return slot, False
        self.session.begin_slot(0, is_last=True, is_ghost=True)
        return 0, True

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
    session.attach_order(sampler.order, has_inner_loop=True)
    while True:
        progress = session.begin_step()
        is_last = session.is_over or progress.samples.epoch >= epochs
        if is_last and not session.state.is_settled:
            session.end_loop()
            return
        yield Step(session, sampler)
