"""One rank of a run on meta tensors: built by the trainer's own lines, it runs a whole training step.

Collectives and messages are counted and leave their tensors as they are; tokens are zeros; so are the numbers that the
host reads. One rank of a replica is rehearsed; no other exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from parallel3d.config.derived import stage_replicas
from parallel3d.config.schema import Config
from parallel3d.config.sections.curriculum import CurriculumLearning
from parallel3d.config.sections.warmup import WarmupConfig
from parallel3d.data.reader import LaneCursor, Reader, ReadResult
from parallel3d.errors import ProtocolError, UserError
from parallel3d.inprocess.live_bytes import LiveBytes
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.group import DoneWork, Group, Work
from parallel3d.parallel.p2p_messages import Header, Links
from parallel3d.parallel.sharding import ParamSharding, TpShard
from parallel3d.pipeline.instructions import Instruction, Op
from parallel3d.rehearsal.kernel_counter import KernelCounter
from parallel3d.rehearsal.kernel_counts import KernelCounts, KernelWork
from parallel3d.trainer.build import MakeStage, RunLanes, prepare_rank
from parallel3d.trainer.context import RankHooks, Transports
from parallel3d.trainer.generation import start_rank
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.step import train_step

META = torch.device("meta")
CLEAR, BACKWARD, NORMS, UPDATE = "clear", "backward", "norms", "update"
PHASES = {"reduce_scatter": NORMS, "all_reduce": UPDATE}
"""The part of a step that begins at a phase hook's name."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """One rank's step: its kernels by part, and the most memory that its tensors took."""

    phases: Mapping[str, KernelCounts]
    """clear; the modules of the stage, as they compute forward; backward; norms; update."""
    state_bytes: int
    """Of weights, gradients and optimizer state, between steps."""
    peak_bytes: int
    num_elements: int
    """Elements of parameters that this rank holds."""
    num_buckets: int

    @property
    def total(self) -> KernelCounts:
        return sum(self.phases.values(), start=KernelCounts())


def rehearse(config: Config, make_stage: MakeStage, *, rank: int = 0) -> Rehearsal:
    """Rehearses the second step of `rank`, with sequences and a batch of full size; `config` is resolved.

    Raises UserError for other grids than one replica on one stage: ranks check what the others report of a step.
    """
    if config.parallel.pp_size != 1 or stage_replicas(config) != (1,):
        raise UserError("only one replica, on one stage, can be rehearsed: set parallel.pp_size and dp_size to 1")
    config = config.model_copy(update={"warmup": WarmupConfig(), "curriculum_learning": CurriculumLearning()})
    counter, grid = KernelCounter(), build_grid(config)
    labels = _Labels(counter)
    hooks = RankHooks(on_instruction=labels.on_instruction, phase_hook=labels.on_phase)
    with LiveBytes() as memory:
        context = prepare_rank(
            config,
            rank,
            grid,
            make_stage=make_stage,
            lanes=RunLanes(train=ZeroReader()),
            device=META,
            initial=_uninitialized,
            hooks=hooks,
        )
        start_rank(context, grid, _transports(rank, grid, counter))
        labels.watch(context.chunks)
        state_bytes, memory.peak = memory.live, memory.live
        for _ in range(2):  # the first step alone measures its state; later ones have the norms from updates
            counter.counts, counter.label = {}, CLEAR
            with counter.counting():
                train_step(context)
    counts = {name: each for name, each in counter.counts.items() if each.num_kernels or each.num_waits}
    return Rehearsal(
        phases=counts,
        state_bytes=state_bytes,
        peak_bytes=memory.peak,
        num_elements=sum(bucket.plan.num_elements for bucket in context.optimizer.buckets),
        num_buckets=len(context.optimizer.buckets),
    )


@dataclass(frozen=True, kw_only=True)
class LayeredRehearsal:
    """The step of a model whose layers are all alike, from those of models of one layer and of two: all that a layer
    adds, to kernels and bytes, is added once for each further layer."""

    one: Rehearsal
    two: Rehearsal
    num_layers: int

    @staticmethod
    def of(config: Config, make_stage: MakeStage) -> LayeredRehearsal:
        """Rehearses a model on one stage."""
        one, two = (rehearse(_with_layers(config, number), make_stage) for number in (1, 2))
        return LayeredRehearsal(one=one, two=two, num_layers=config.model.num_hidden_layers)

    def layer(self, phase: str) -> KernelCounts:
        """A layer's share of one part of the step."""
        empty = KernelCounts()
        return self.two.phases.get(phase, empty) - self.one.phases.get(phase, empty)

    @property
    def whole(self) -> Rehearsal:
        """The step of the whole model."""
        more = self.num_layers - 1
        names = {**self.one.phases, **self.two.phases}
        state_bytes, peak_bytes, num_elements, num_buckets = (
            getattr(self.one, name) + more * (getattr(self.two, name) - getattr(self.one, name))
            for name in ("state_bytes", "peak_bytes", "num_elements", "num_buckets")
        )
        return Rehearsal(
            phases={n: self.one.phases.get(n, KernelCounts()) + self.layer(n).times(more) for n in names},
            state_bytes=state_bytes,
            peak_bytes=peak_bytes,
            num_elements=num_elements,
            num_buckets=num_buckets,
        )


def _with_layers(config: Config, number: int) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"num_hidden_layers": number})})


class ZeroReader(Reader):
    """Lanes of zeros."""

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> ReadResult:
        return np.zeros(num_tokens + 1, np.int32), cursor


class MetaGroup(Group):
    """A group whose other ranks do not exist."""

    def __init__(self, counter: KernelCounter, *, name: str, rank: int, ranks: tuple[int, ...]):
        super().__init__(name=name, rank=rank, ranks=ranks)
        self._counter = counter

    def all_reduce_async(self, tensor: Tensor) -> Work:
        return self._count("all_reduce", tensor, 2)

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._count("reduce_scatter", tensor, 1)

    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._count("all_gather", output, 1)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        self._count("all_reduce_max", tensor, 2)
        return tensor

    def _count(self, name: str, tensor: Tensor, passes: int) -> Work:
        """A ring sends (size - 1) / size of the tensor in each of its passes."""
        if self.size > 1 and tensor.is_meta:
            num_bytes = passes * tensor.nbytes * (self.size - 1) // self.size
            self._counter.add(KernelWork(name=name, kind="collective", num_bytes=num_bytes))
        return DoneWork()


class MetaLinks(Links):
    """Links with ranks that do not exist; a replica on one stage has nothing to send."""

    def send(self, destination: int, header: Header, tensor: Tensor, *, bounded: bool = True) -> None:
        raise ProtocolError(f"a rehearsal sends {header} to rank {destination}")

    def receive(self, source: int, expected: Header) -> Tensor:
        raise ProtocolError(f"a rehearsal waits for {expected} from rank {source}")

    def close(self) -> None:
        pass


class _Labels:
    """Gives each kernel the part of the step in which it runs."""

    def __init__(self, counter: KernelCounter):
        self._counter = counter
        self._counter.label = CLEAR
        self._op = Op.LOAD

    def watch(self, chunks: nn.ModuleList) -> None:
        """Names the modules of the chunks as they compute forward."""
        for chunk in chunks:
            for name, child in chunk.named_children():
                for module in child if isinstance(child, nn.ModuleList) else [child]:
                    module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))

    def on_instruction(self, instruction: Instruction) -> None:
        self._op = instruction.op
        if instruction.op in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
            self._counter.label = BACKWARD

    def on_phase(self, phase: str) -> None:
        self._counter.label = PHASES.get(phase, self._counter.label)

    def _enter(self, name: str) -> None:
        if self._op is Op.FORWARD:  # not in a recomputation
            self._counter.label = name


def _transports(rank: int, grid: Grid, counter: KernelCounter) -> Transports:
    def make_group(name: str, ranks: tuple[int, ...]) -> Group:
        return MetaGroup(counter, name=name, rank=ranks.index(rank), ranks=ranks)

    return Transports(make_group=make_group, links=MetaLinks(), token=AbortToken())


def _uninitialized(sharding: ParamSharding, *, tp: TpShard) -> Tensor:
    return torch.empty(sharding.local_shape(tp.size), device=META)
