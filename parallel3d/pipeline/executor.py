"""Runs a replica's instruction list.

Between instructions the executor holds the tokens that were loaded or received, inputs and outputs of the micro-batches
between forward and backward, gradients in transit, and products that a split backward has deferred. All of it is
scratch memory: an iteration that ends early leaves only main gradients, which the next one clears.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from parallel3d.accelerator import Accelerator
from parallel3d.errors import GenerationEnded
from parallel3d.layers.document_marks import append_document_marks, num_rows, split_document_marks
from parallel3d.layers.gradient_sink import WeightGradStore, WeightGradTask, run_deferred
from parallel3d.layers.micro_batch import BatchPlan, GradPass, MicroBatch
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Coordinates, Grid
from parallel3d.parallel.p2p_messages import Header, Kind, Links
from parallel3d.parallel.staged_group import to_device
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.pipeline.chunk_layout import ChunkLayout
from parallel3d.pipeline.compute_clock import ComputeClock, HostClock, ListTimes
from parallel3d.pipeline.instructions import Instruction, Op, ReplicaId


class InstructionHook(Protocol):
    """A hook called before every instruction: heartbeats, injected faults, hang reports."""

    def __call__(self, instruction: Instruction) -> None: ...


Label = Callable[[Instruction], AbstractContextManager[object]]
"""A context manager that names an instruction in a profiler's trace."""

NO_LABEL: AbstractContextManager[object] = nullcontext()


class LoadedMicroBatch(NamedTuple):
    """The tokens of a micro-batch, as the first virtual stage reads them."""

    inputs: Tensor
    """(tokens,) int64."""
    targets: Tensor
    """(tokens,) int64."""
    documents: tuple[int, ...] | None = None
    """Lengths of the documents, where attention keeps them apart."""


Loader = Callable[[MicroBatch], LoadedMicroBatch]

VirtualMicroBatch = tuple[int, int]
"""(micro-batch, chunk)"""


@dataclass
class StageResult:
    """One replica's part of the loss, the passes that it ran, and their times."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    """Sum of the token losses, in nats, of each micro-batch that ended here: numbers on the device."""
    num_target_tokens: int = 0
    forwarded: Counter[VirtualMicroBatch] = field(default_factory=Counter)
    backwarded: Counter[VirtualMicroBatch] = field(default_factory=Counter)
    times: Callable[[], ListTimes] = ListTimes
    """Returns the list's times; to be asked once the host has waited for the device, and before the next list."""
    tp_wait_s: float = 0.0
    """Seconds of computing in which the host has waited for the tensor-parallel group."""


@dataclass(kw_only=True)
class Executor:
    """Runs instruction lists for the rank `rank` of `grid`, in one membership generation.

    `chunks[c](x, micro_batch, targets)` is chunk c of this rank's part of the model; `layout` maps it to a virtual
    stage; `hidden_size` and `dtype` are those of the messages between stages.
    """

    chunks: Sequence[nn.Module]
    layout: ChunkLayout
    grid: Grid
    rank: int
    generation: int
    links: Links
    tp: TensorParallel
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    token: AbortToken
    accelerator: Accelerator | None = None
    """Copies what was received; by default the device's own."""
    weight_grads: WeightGradStore
    """The store of the chunks' gradient sinks, in which a split backward pass keeps the products for weights."""
    on_instruction: InstructionHook = lambda instruction: None
    clock: ComputeClock = field(default_factory=HostClock)
    label: Label = lambda instruction: NO_LABEL
    after_compute: Callable[[MicroBatch, GradPass], None] = lambda micro_batch, grad_pass: None
    """Called after each instruction that may have added a micro-batch's gradients to the main gradients."""

    def run(self, instructions: Sequence[Instruction], batch: BatchPlan, load: Loader) -> StageResult:
        """Runs the list; a device may still be at it afterwards. Each use of a parameter adds one gradient to its sink
        per backward pass of a micro-batch.

        Raises GenerationEnded, which names the current instruction, when a peer is lost.
        """
        scratch = _Scratch(batch, load)
        self.clock.begin()
        for instruction in instructions:
            self.token.check()
            self.on_instruction(instruction)
            try:
                with self.label(instruction):
                    _ACTIONS[instruction.op](self, scratch, instruction)
            except GenerationEnded as error:
                raise GenerationEnded(f"{error} (at: {instruction})") from None
        self.token.check()
        self.clock.end()
        scratch.result.times = self.clock.read
        return scratch.result

    # --- one method for each op -----------------------------------------------------------------------------------

    def _load(self, scratch: _Scratch, step: Instruction) -> None:
        loaded = scratch.load(scratch.batch.micro_batch(step.micro_batch))
        scratch.inputs[_key(step)] = loaded.inputs
        scratch.targets[step.micro_batch] = loaded.targets
        scratch.documents[step.micro_batch] = loaded.documents

    def _forward(self, scratch: _Scratch, step: Instruction) -> None:
        key = _key(step)
        micro_batch = replace(
            scratch.batch.micro_batch(step.micro_batch), documents=scratch.documents.get(step.micro_batch)
        )
        is_last = self._virtual_stage(step) == self.layout.last
        with self.clock.compute(step.op):
            inputs = scratch.inputs.pop(key)
            targets = scratch.targets.pop(step.micro_batch) if is_last else None
            output = self.chunks[step.chunk](inputs, micro_batch, targets)
            if is_last:
                scratch.result.losses[step.micro_batch] = output.detach()
                scratch.result.num_target_tokens += micro_batch.num_tokens
            else:
                scratch.outgoing[key] = output.detach()
            if scratch.batch.training:
                scratch.saved_for_backward[key] = (inputs, output)
            scratch.result.forwarded[key] += 1
        if is_last and scratch.batch.training:  # the head's gradients
            self.after_compute(micro_batch, "forward")

    def _backward(self, scratch: _Scratch, step: Instruction) -> None:
        with self.clock.compute(step.op):
            self._differentiate(scratch, _key(step))
            scratch.result.backwarded[_key(step)] += 1
        self.after_compute(scratch.batch.micro_batch(step.micro_batch), "backward")

    def _backward_input(self, scratch: _Scratch, step: Instruction) -> None:
        with self.clock.compute(step.op):
            with self.weight_grads.deferred() as work:
                self._differentiate(scratch, _key(step))
            scratch.weight_work[_key(step)] = work
        self.after_compute(scratch.batch.micro_batch(step.micro_batch), "backward")

    def _backward_weight(self, scratch: _Scratch, step: Instruction) -> None:
        with self.clock.compute(step.op):
            run_deferred(scratch.weight_work.pop(_key(step)))
            scratch.result.backwarded[_key(step)] += 1
        self.after_compute(scratch.batch.micro_batch(step.micro_batch), "backward")

    @staticmethod
    def _differentiate(scratch: _Scratch, key: VirtualMicroBatch) -> None:
        """Runs the autograd graph of a virtual micro-batch; the gradient of its input is to be sent next."""
        inputs, output = scratch.saved_for_backward.pop(key)
        gradient = scratch.gradients.pop(key, None)
        root = output if gradient is None else _GivenGradient.apply(output, gradient)
        with torch.autograd.set_multithreading_enabled(False):  # on this thread, on a GPU too: hang reports know it
            torch.autograd.backward(root)
        if inputs.grad is not None:
            scratch.outgoing[key], inputs.grad = inputs.grad, None

    def _send_targets(self, scratch: _Scratch, step: Instruction) -> None:
        self._send(scratch, step, Kind.TARGETS, scratch.targets.pop(step.micro_batch))

    def _send_activation(self, scratch: _Scratch, step: Instruction) -> None:
        activation, documents = scratch.outgoing.pop(_key(step)), scratch.documents.get(step.micro_batch)
        tensor = activation if documents is None else append_document_marks(activation, documents)
        self._send(scratch, step, Kind.ACTIVATION, tensor)

    def _send_gradient(self, scratch: _Scratch, step: Instruction) -> None:
        self._send(scratch, step, Kind.GRADIENT, scratch.outgoing.pop(_key(step)))

    def _keep_activation(self, scratch: _Scratch, step: Instruction) -> None:
        chunk = self.layout.chunks[self._virtual_stage(step) + 1]
        activation = scratch.outgoing.pop(_key(step))
        scratch.inputs[step.micro_batch, chunk] = activation.requires_grad_(scratch.batch.training)

    def _keep_gradient(self, scratch: _Scratch, step: Instruction) -> None:
        chunk = self.layout.chunks[self._virtual_stage(step) - 1]
        scratch.gradients[step.micro_batch, chunk] = scratch.outgoing.pop(_key(step))

    def _receive_targets(self, scratch: _Scratch, step: Instruction) -> None:
        num_tokens = scratch.batch.micro_batch(step.micro_batch).num_tokens
        targets = self._receive(scratch, step, Kind.TARGETS, (num_tokens,), torch.int64)
        scratch.targets[step.micro_batch] = self._to_device(targets)

    def _receive_activation(self, scratch: _Scratch, step: Instruction) -> None:
        num_tokens = scratch.batch.micro_batch(step.micro_batch).num_tokens
        num_local, hidden_size = self._hidden_shape(scratch, step)
        has_documents = scratch.batch.masks_documents
        num_mark_rows = num_rows(num_tokens, hidden_size) if has_documents else 0
        shape = (num_local + num_mark_rows, hidden_size)
        received = self._receive(scratch, step, Kind.ACTIVATION, shape, self.dtype)
        if has_documents:
            received, scratch.documents[step.micro_batch] = split_document_marks(received, num_tokens)
        scratch.inputs[_key(step)] = self._to_device(received).requires_grad_(scratch.batch.training)

    def _receive_gradient(self, scratch: _Scratch, step: Instruction) -> None:
        received = self._receive(scratch, step, Kind.GRADIENT, self._hidden_shape(scratch, step), self.dtype)
        scratch.gradients[_key(step)] = self._to_device(received)

    # --- messages -------------------------------------------------------------------------------------------------

    def _send(self, scratch: _Scratch, step: Instruction, kind: Kind, tensor: Tensor) -> None:
        header = self._header(scratch, step, kind, tuple(tensor.shape), tensor.dtype)
        self.links.send(self._peer(step), header, tensor)

    def _receive(
        self, scratch: _Scratch, step: Instruction, kind: Kind, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Receives a tensor into host memory."""
        header = self._header(scratch, step, kind, shape, dtype)
        return self.links.receive(self._peer(step), header)

    def _to_device(self, received: Tensor) -> Tensor:
        return to_device(received, self.device, self.accelerator)

    def _header(
        self, scratch: _Scratch, step: Instruction, kind: Kind, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Header:
        return Header(
            generation=self.generation,
            iteration=scratch.batch.iteration,
            kind=kind,
            micro_batch=step.micro_batch,
            stage=step.reader_stage(self._coordinates.pp, self.layout),
            shape=shape,
            dtype=dtype,
        )

    def _peer(self, step: Instruction) -> int:
        """The rank of the peer replica at this rank's tensor-parallel position."""
        replica: ReplicaId | None = step.peer
        assert replica is not None, step
        return self.grid.tp_ranks(replica)[self._coordinates.tp]

    def _hidden_shape(self, scratch: _Scratch, step: Instruction) -> tuple[int, int]:
        num_tokens = scratch.batch.micro_batch(step.micro_batch).num_tokens
        return (self.tp.num_local_tokens(num_tokens), self.hidden_size)

    def _virtual_stage(self, step: Instruction) -> int:
        return self.layout.virtual_stages[self._coordinates.pp][step.chunk]

    @property
    def _coordinates(self) -> Coordinates:
        return self.grid.coordinates(self.rank)


@dataclass
class _Scratch:
    """State between the instructions of a list, by virtual micro-batch; targets, documents by micro-batch."""

    batch: BatchPlan
    load: Loader
    inputs: dict[VirtualMicroBatch, Tensor] = field(default_factory=dict)
    targets: dict[int, Tensor] = field(default_factory=dict)
    documents: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    saved_for_backward: dict[VirtualMicroBatch, tuple[Tensor, Tensor]] = field(default_factory=dict)
    outgoing: dict[VirtualMicroBatch, Tensor] = field(default_factory=dict)
    gradients: dict[VirtualMicroBatch, Tensor] = field(default_factory=dict)
    weight_work: dict[VirtualMicroBatch, deque[WeightGradTask]] = field(default_factory=dict)
    result: StageResult = field(default_factory=StageResult)


class _GivenGradient(torch.autograd.Function):
    """A scalar whose backward pass gives `output` the gradient that came from the next virtual stage.

    torch.autograd.backward(output, gradient) would do the same, but it imports sympy to compare two shapes (torch 2.11
    to 2.13): 0.6 s of CPU time in each worker's first step.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def _key(step: Instruction) -> VirtualMicroBatch:
    return step.micro_batch, step.chunk


_ACTIONS = {
    Op.LOAD: Executor._load,
    Op.FORWARD: Executor._forward,
    Op.BACKWARD: Executor._backward,
    Op.BACKWARD_INPUT: Executor._backward_input,
    Op.BACKWARD_WEIGHT: Executor._backward_weight,
    Op.SEND_TARGETS: Executor._send_targets,
    Op.RECV_TARGETS: Executor._receive_targets,
    Op.SEND_ACTIVATION: Executor._send_activation,
    Op.RECV_ACTIVATION: Executor._receive_activation,
    Op.KEEP_ACTIVATION: Executor._keep_activation,
    Op.SEND_GRADIENT: Executor._send_gradient,
    Op.RECV_GRADIENT: Executor._receive_gradient,
    Op.KEEP_GRADIENT: Executor._keep_gradient,
}
