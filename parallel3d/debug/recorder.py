"""Records the activations of one step and their gradients, by hooks that exist for this step only.

Every module has a name that does not depend on the layout: its path with the layer's number in the model, such as
"layers.3.attention.qkv". NAME.input and NAME.output are recorded for every micro-batch, and in the backward pass
NAME.input.grad and NAME.output.grad. For the head, head.logits are recomputed and recorded too; training never has them
in full. The output of the head is the loss of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.debug.slab import Slab, full_dimension
from parallel3d.layers.cross_entropy import LinearCrossEntropy
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.micro_batch import BatchPlan, MicroBatch
from parallel3d.parallel.sharding import IndexRun, ParamSharding
from parallel3d.parallel.tensor_parallel import TensorParallel

BEFORE_LAYERS, AFTER_LAYERS = -1, 1 << 30
"""Depths of modules before the first layer (embedding) and after the last (final norm, head)."""


@dataclass(frozen=True)
class NamedModule:
    """A module with its logical name; `depth` is the number of its layer."""

    name: str
    depth: int
    module: nn.Module


def name_modules(root: nn.Module) -> Iterator[NamedModule]:
    """All modules of a stage, except containers: chunks and lists of layers."""
    for chunk in root if isinstance(root, nn.ModuleList) else [root]:
        yield from _name_children(chunk, prefix="", depth=None)


def _name_children(root: nn.Module, *, prefix: str, depth: int | None) -> Iterator[NamedModule]:
    around = BEFORE_LAYERS
    for name, child in root.named_children():
        if isinstance(child, nn.ModuleList):
            around = AFTER_LAYERS
            for part in child:
                index = getattr(part, "index", None)
                if index is None:  # a chunk of layers: not part of the name
                    yield from _name_children(part, prefix=prefix, depth=None)
                else:
                    yield NamedModule(f"{prefix}{name}.{index}", index, part)
                    yield from _name_children(part, prefix=f"{prefix}{name}.{index}.", depth=index)
            continue
        at = around if depth is None else depth
        yield NamedModule(prefix + name, at, child)
        yield from _name_children(child, prefix=f"{prefix}{name}.", depth=at)


Columns = tuple[tuple[IndexRun, ...], int]
"""A rank's runs of features, and the total number of features."""


@dataclass
class Recorder:
    """Recordings of one rank in one step: CPU tensors with their slabs, and the losses by micro-batch."""

    batch: BatchPlan
    tp: TensorParallel
    names: Sequence[str]
    """Glob patterns of the names to record."""
    tensors: list[tuple[Slab, Tensor]] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    """Sum of the token losses of each micro-batch, by its first slot."""
    _micro_batch: MicroBatch | None = None
    _seen: set[tuple[str, int]] = field(default_factory=set)
    _orders: dict[str, int] = field(default_factory=dict)

    def wants(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names)

    def on_micro_batch(self, arguments: tuple[object, ...]) -> None:
        """Notes the micro-batch if the arguments of a called module hold one: a stage's, or a recomputed layer's."""
        self._micro_batch = next((each for each in arguments if isinstance(each, MicroBatch)), self._micro_batch)

    def on_forward(self, named: NamedModule, inputs: tuple[Any, ...], output: object) -> None:
        """Records a module's call; a recomputed call in the backward pass is ignored."""
        assert self._micro_batch is not None, "a module was called outside of a stage's forward pass"
        key = (named.name, self._micro_batch.slots[0])
        if key in self._seen:
            return
        self._seen.add(key)
        module = named.module
        is_row, is_column = isinstance(module, RowParallelLinear), isinstance(module, ColumnParallelLinear)
        value = inputs[0]
        if isinstance(output, tuple):  # a norm's input is the sum that it returns, whose gradient is a summand's
            value, output = output
        elif isinstance(module, RowParallelLinear):
            with torch.no_grad():  # a graph here would save tensors that a recomputed layer does not
                value = module.activation.forward(value)
        columns = self._feature_runs(module, dim=1) if is_row else None
        self._record(named, "input", value, columns, grad_of=inputs[0])
        if isinstance(module, LinearCrossEntropy):
            self._record_head(named, module, inputs[0], output)
        else:
            self._record(named, "output", output, self._feature_runs(module, dim=0) if is_column else None)

    def _feature_runs(self, module: nn.Module, *, dim: int) -> Columns:
        """This rank's features along one dimension of a sharded weight (out, in)."""
        sharding: ParamSharding = module.weight.sharding  # type: ignore[union-attr, assignment]
        return sharding.runs(self.tp.shard), sharding.shape[dim]

    def _record_head(self, named: NamedModule, head: LinearCrossEntropy, hidden: Tensor, loss: object) -> None:
        assert self._micro_batch is not None and isinstance(loss, Tensor)
        self.losses[self._micro_batch.slots[0]] = loss.item()
        if self.wants("head.logits"):
            with torch.no_grad():
                valid = head.weight.detach()[: head.num_valid]
                logits = head.weight.gemm.forward(self.tp.gather(hidden.detach()), valid)
            runs = (IndexRun(global_start=head.first, local_start=0, length=head.num_valid),)
            self._record(named, "logits", logits, (runs, head.weight.sharding.shape[0]))

    def _record(
        self, named: NamedModule, which: str, value: object, columns: Columns | None, *, grad_of: object = None
    ) -> None:
        """Records a tensor now, and its gradient, which is that of `grad_of`, in the backward pass.

        The input of a product behind an activation has no gradient that could be recorded.
        """
        grad_of = value if grad_of is None else grad_of
        if not isinstance(value, Tensor):
            return
        name = f"{named.name}.{which}"
        slab = self._slab(name, named.depth, value, columns)
        if self.wants(name):
            self._store(slab, value)
        assert isinstance(grad_of, Tensor)
        if grad_of.requires_grad and grad_of.shape == value.shape and self.wants(f"{name}.grad"):
            is_partial_sum = any(
                run.copies > 1 for run in slab.columns
            )  # key-value heads that neighbouring ranks share
            of_grad = replace(slab, name=f"{name}.grad", is_partial_sum=is_partial_sum)
            grad_of.register_hook(lambda grad: self._store(of_grad, grad))

    def _slab(self, name: str, depth: int, value: Tensor, columns: Columns | None) -> Slab:
        """The slab of activations (rows, ...): all tokens of the micro-batch, or this rank's share of them."""
        micro_batch = self._micro_batch
        assert micro_batch is not None
        num_rows, seq = len(value), micro_batch.sequence_length
        width = value.numel() // num_rows
        begin = self.tp.group.rank * num_rows if num_rows < micro_batch.num_tokens else 0
        runs, num_columns = columns or (full_dimension(width), width)
        return Slab(
            name=name,
            shape=(self.batch.num_slots * seq, num_columns),
            local_shape=(num_rows, width),
            rows=tuple(
                IndexRun(
                    global_start=token_span.slot * seq + token_span.positions.start,
                    local_start=token_span.rows.start,
                    length=len(token_span.positions),
                )
                for token_span in micro_batch.token_spans(begin, num_rows)
            ),
            columns=runs,
            depth=depth,
            order=self._orders.setdefault(name, len(self._orders)),
        )

    def _store(self, slab: Slab, value: Tensor) -> None:
        self.tensors.append((slab, value.detach().reshape(slab.local_shape).to("cpu", copy=True)))


@contextmanager
def recording_hooks(root: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Installs the hooks on all modules of the stage `root`, and always removes them at the end."""
    handles = [
        module.register_forward_pre_hook(lambda module, arguments: recorder.on_micro_batch(arguments))
        for module in root.modules()
    ]
    handles += [each.module.register_forward_hook(_on_call(recorder, each)) for each in name_modules(root)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _on_call(recorder: Recorder, named: NamedModule) -> Callable[[nn.Module, tuple[Any, ...], object], None]:
    return lambda module, inputs, output: recorder.on_forward(named, inputs, output)
