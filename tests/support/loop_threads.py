"""Elastic training loops whose workers are threads: deterministic, with deaths at any communication call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from parallel3d.elastic.drop_in.elastic_loop import CURRENT, DataParallel, Sampler, steps
from parallel3d.elastic.drop_in.generations import LeftRun, LoopGroups
from parallel3d.elastic.drop_in.session import LoopHooks, Session
from parallel3d.elastic.protocol.membership import Address, GenerationRecord
from parallel3d.errors import GenerationEnded
from parallel3d.inprocess.scheduler import RankDied
from parallel3d.inprocess.thread_coordinator import ThreadCoordinator
from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.group import DoneWork, Group, SoloGroup, Work
from tests.support.tiny_runs import make_config

NUM_SAMPLES, NUM_FEATURES = 20, 6
PART = (0, 0)


class DeafGroup(SoloGroup):
    """A group that can keep a result from its worker, as if the connection broke when the others had theirs."""

    def __init__(self, group: Group, is_deaf: Callable[[], bool]):
        super().__init__(name=group.name, rank=group.rank)
        self.size = group.size
        self._group = group
        self._is_deaf = is_deaf

    def all_reduce_async(self, tensor: Tensor) -> Work:
        self._group.all_reduce(tensor)
        if self._is_deaf():
            raise GenerationEnded("a connection broke")
        return DoneWork()


class ThreadLoopNetwork:
    def __init__(self, world: ThreadWorld, rank: int, is_deaf: Callable[[], bool]):
        self._world = world
        self._rank = rank
        self._is_deaf = is_deaf

    def listen(self) -> Address:
        return ("threads", 1)

    def make_host_group(self, name: str, ranks: tuple[int, ...], token: AbortToken) -> Group:
        self._world.begin_generation(self._rank, token)
        return self._world.make_group(self._rank)(name, ranks)

    def make_groups(self, record: GenerationRecord, token: AbortToken) -> LoopGroups:
        group = self.make_host_group(f"generation{record.generation}/gradients", record.grid.ranks, token)
        return LoopGroups(gradients=group, entries=DeafGroup(group, self._is_deaf))


@dataclass(kw_only=True)
class LoopRun:
    """The results of a run."""

    weights: dict[int, Tensor]
    """Of the workers that came to the end."""
    losses: dict[int, float | None]
    """By step."""
    computed: dict[int, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)
    """By worker: what the loop was given, as (step, samples)."""
    steps: dict[int, int] = field(default_factory=dict)
    """By worker: how many steps the run had when its loop ended."""
    lengths: dict[int, list[int | str]] = field(default_factory=dict)
    """By worker: how many batches the loader of a plain loop says that an epoch has, before the loop and after it."""
    published: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """By worker: the records of steps that it has sent to metrics.jsonl."""
    done: dict[int, list[int]] = field(default_factory=dict)
    """By worker: the steps of a plain loop after which code for each step has run."""
    rates: dict[int, float] = field(default_factory=dict)
    """By worker: the learning rate at the end."""
    draws: list[float] = field(default_factory=list)
    """A random number of each slot, with one worker: threads share torch's generator."""
    num_changes: int = 0
    abort_reason: str = ""


class Numbers:
    """A dataset whose samples say who they are."""

    def __init__(self, num_samples: int = NUM_SAMPLES, dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(num_samples, NUM_FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randn(num_samples, generator=generator, dtype=torch.float64).to(dtype)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model


def length_of(loader: DataLoader[Any]) -> int | str:
    try:
        return len(loader)
    except TypeError:  # which callers such as tqdm take for that
        return "unknown"


@dataclass(frozen=True, kw_only=True)
class LoopSpec:
    """What the threads train, and what happens to them."""

    num_workers: int
    deaths: Mapping[int, int] = field(default_factory=dict)
    """The communication call at which a worker dies."""
    joins: Sequence[int] = ()
    """The steps in which new workers are ready, each one."""
    max_workers: int | None = None
    misses: Mapping[int, int] = field(default_factory=dict)
    """The step whose entry a worker does not get, while the others do."""
    drains: Mapping[int, int] = field(default_factory=dict)
    """The step in which a worker asks to leave."""
    stop_at: int | None = None
    break_at: int | None = None
    """The step before which the loop of elastic.steps is left."""
    epochs: int = 2
    max_norm: float = math.inf
    """Of a step's gradients."""
    sums: Any = "exact"
    dtype: torch.dtype = torch.float32
    is_plain_loop: bool = False
    schedule: Literal["none", "steps", "epochs"] = "none"
    """What halves the learning rate: every two steps, known to the wrapper, or an epoch, made later."""
    loader_batch_size: int | None = None
    """Of the plain loop, if it is not the slot_size."""
    num_samples: int = NUM_SAMPLES
    sampler: Mapping[str, Any] = field(default_factory=dict)

    def make_sampler(self) -> Sampler:
        options = {"batch_size": 8, "slot_size": 2, "seed": 5, **self.sampler}
        return Sampler(Numbers(self.num_samples, self.dtype), **options)


class LoopWorld:
    """The threads of one run."""

    def __init__(self, spec: LoopSpec):
        self.spec = spec
        self.world = ThreadWorld(spec.num_workers + len(spec.joins))
        parallel = dict(dp_size=spec.num_workers, zero_stage=0)
        elastic = dict(max_replicas=spec.max_workers or spec.num_workers)
        self.coordinator = ThreadCoordinator(self.world, make_config(parallel=parallel, elastic=elastic))
        for rank, call in spec.deaths.items():
            self.world.die_at(rank, call)
        self.run = LoopRun(weights={}, losses={})
        self.begun: set[int] = set()
        """Steps that a worker has begun."""
        self.let_in: set[int] = set()
        """Those that join and have their part."""

    def work(self, rank: int, world: ThreadWorld) -> None:
        if rank >= self.spec.num_workers and not self.may_join(rank, self.spec.joins[rank - self.spec.num_workers]):
            return
        session = self.open_session(rank)
        CURRENT.set(session)
        try:
            model = self.train(session)
        except LeftRun:
            return
        except RankDied:
            self.coordinator.on_lost(rank, "died")
            raise
        self.run.weights[rank] = torch.cat([each.detach().view(-1) for each in model.parameters()])

    def may_join(self, rank: int, at_step: int) -> bool:
        """Waits for its step; False if the run has ended before."""

        def is_due() -> bool:
            return any(step >= at_step for step in self.begun) or self.coordinator.protocol.over

        self.world.wait(rank, is_due, lambda: "to join", token=AbortToken())
        self.world.run_locked(lambda: (self.coordinator.building.update({rank: PART}), self.let_in.add(rank)))
        return not self.coordinator.protocol.over

    def await_joiners(self, rank: int, step: int) -> None:
        """Waits in a step until those that join in it, or before, have asked to: how fast their threads are decides
        nothing."""
        due = [self.spec.num_workers + index for index, at_step in enumerate(self.spec.joins) if at_step <= step]
        due = [] if rank in due else due

        def have_asked() -> bool:
            return self.coordinator.protocol.over or self.let_in >= set(due) and not self.coordinator.building

        self.world.wait(rank, have_asked, lambda: "for those that join", token=AbortToken())

    def open_session(self, rank: int) -> Session:
        membership, stop_at = self.coordinator.memberships[rank], self.spec.stop_at

        def on_step(step: int) -> None:
            self.world.run_locked(lambda: self.begun.add(step))
            self.world.doing(rank, f"step {step}")
            self.await_joiners(rank, step)
            if self.spec.drains.get(rank) == step:
                self.coordinator.announce_drain(rank)

        def publish(record: dict[str, Any]) -> None:
            if record["kind"] == "step":
                self.run.published.setdefault(rank, []).append(record)

        hooks = LoopHooks(
            publish=publish,
            drain_requested=lambda: rank in self.coordinator.draining or membership.change_requested,
            stop_requested=lambda: stop_at is not None and session.progress.samples.step >= stop_at,
            on_step=on_step,
        )
        misses = dict(self.spec.misses)

        def is_deaf() -> bool:
            is_due = misses.get(rank) == session.progress.samples.step
            return is_due and misses.pop(rank) > 0

        network = ThreadLoopNetwork(self.world, rank, is_deaf)
        session = Session(rank=rank, membership=membership, network=network, hooks=hooks)
        return session

    def train(self, session: Session) -> nn.Module:
        network = make_model(self.spec.dtype)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        by_step = [StepLR(optimizer, 2, 0.5)] if self.spec.schedule == "steps" else []
        model = DataParallel(network, optimizer, *by_step, sums=self.spec.sums)
        by_epoch = [StepLR(optimizer, 1, 0.5)] if self.spec.schedule == "epochs" else []
        sampler = self.spec.make_sampler()

        def backward(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            index, x, y = batch
            given = (session.progress.samples.step, tuple(index.tolist()))
            self.run.computed.setdefault(session.rank, []).append(given)
            if self.world.num_ranks == 1:
                self.run.draws.append(torch.rand(()).item())
            (loss := (model(x).squeeze(1) - y).square().mean()).backward()
            return loss

        def update() -> None:
            nn.utils.clip_grad_norm_(network.parameters(), self.spec.max_norm)
            optimizer.step()
            for schedule in by_step:
                schedule.step()

        if self.spec.is_plain_loop:
            batch_size = self.spec.loader_batch_size or sampler.order.slot_size
            loader: DataLoader[Any] = DataLoader(sampler.dataset, batch_size, sampler=sampler)  # type: ignore[arg-type]
            self.run.lengths[session.rank] = [length_of(loader)]
            for epoch in range(self.spec.epochs):
                sampler.set_epoch(epoch)
                for batch in loader:
                    optimizer.zero_grad()
                    backward(batch)
                    update()
                    if sampler.is_step_done:
                        self.run.done.setdefault(session.rank, []).append(session.progress.position)
                for schedule in by_epoch:
                    schedule.step()
            self.run.lengths[session.rank].append(length_of(loader))
        else:
            for step in steps(sampler, epochs=self.spec.epochs):
                if step.number == self.spec.break_at:
                    break
                for batch in step:
                    step.add_loss(backward(batch))
                self.run.losses[step.number] = step.mean_loss
                update()
        self.run.steps[session.rank] = session.progress.position
        self.run.rates[session.rank] = optimizer.param_groups[0]["lr"]
        session.end()
        return network


def run_loop(num_workers: int, **spec: Any) -> LoopRun:
    """Trains with `num_workers` threads; options as in LoopSpec."""
    loop_world = LoopWorld(LoopSpec(num_workers=num_workers, **spec))
    run_threads(loop_world.world.num_ranks, loop_world.work, world=loop_world.world)
    protocol = loop_world.coordinator.protocol
    loop_world.run.num_changes = protocol.committed.generation if protocol.committed else 0
    loop_world.run.abort_reason = loop_world.coordinator.abort_reason
    return loop_world.run
