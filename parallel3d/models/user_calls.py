"""The forward pass of a user's part: dropout, the documents of the micro-batch, modules that are computed again, and
the refusal of torch's random numbers.

torch.nn.Dropout draws from a generator that all threads of a process share, in the order of calls: other layouts, and a
step that is done again, would drop other elements. `KeyedDropout` takes its place. Its mask is a function of (seed,
iteration, slot, layer, site, index in the sequence), as that of our own layers (layers/dropout.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parallel3d.layers.dropout import dropout
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.staged_group import to_device
from parallel3d.random_keys import Key, keep_mask, key_of


@dataclass(eq=False)
class PartCall:
    """One forward pass of a part; its modules share this object."""

    context: LayerContext
    micro_batch: MicroBatch | None = None
    num_calls: Counter[str] = field(default_factory=Counter)
    """Of each dropout, by its site: a module may be called several times, with a mask each time."""

    def begin(self, micro_batch: MicroBatch) -> None:
        self.micro_batch, self.num_calls = micro_batch, Counter()

    def next_call(self, site: str) -> int:
        self.num_calls[site] += 1
        return self.num_calls[site] - 1


class KeyedDropout(nn.Module):
    """x (sequences, ...) -> the same, in place of a torch.nn.Dropout.

    divided_dim: the dimension of x of which this rank has a part of equal size; None: it has all of x.
    """

    def __init__(self, probability: float, call: PartCall, *, part: str, path: str, divided_dim: int | None):
        super().__init__()
        self.p, self.call, self.divided_dim = probability, call, divided_dim
        self.layer = int(part.partition(".")[2]) if part.startswith("layers.") else -1
        self.path = f"{part}.{path}" if self.layer < 0 else path

    def forward(self, x: Tensor) -> Tensor:
        call, micro_batch = self.call, self.call.micro_batch
        assert micro_batch is not None
        site = f"{self.path}:{call.next_call(self.path)}"
        if not micro_batch.training:
            return x
        if x.dim() < 2 or x.shape[0] != micro_batch.batch_size:
            shape = tuple(x.shape)
            raise ValueError(f"dropout of {shape}, whose first dimension is not the {micro_batch.batch_size} sequences")
        tp = call.context.tp
        if self.divided_dim is not None and tp.group.size > 1:
            return self._drop_share(x, micro_batch, site)
        rows = replace(micro_batch, sequence_length=prod(x.shape[1:-1]))  # of the sequence's part of x
        drop: Any = dict(micro_batch=rows, layer=self.layer, site=site, tp=tp, kernels=call.context.kernels.dropout)
        return dropout(x.reshape(-1, x.shape[-1]), self.p, **drop).view(x.shape)

    def _drop_share(self, x: Tensor, micro_batch: MicroBatch, site: str) -> Tensor:
        """Drops the elements of this rank's share that would be dropped in the whole tensor."""
        assert self.divided_dim is not None
        shard, dim = self.call.context.tp.shard, range(x.dim())[self.divided_dim]
        if dim == 0:
            raise ValueError("Divided(0): the first dimension is the sequences, of which each rank has all")
        index = _index_in_sequence(x.shape[1:], dim - 1, shard.rank, shard.size, x.device)
        keys = (_key(micro_batch, slot, self.layer, site) for slot in micro_batch.slots)
        keep = torch.stack([keep_mask(key, index, self.p) for key in keys])
        return (x * keep) * (1.0 / (1.0 - self.p))


def _key(micro_batch: MicroBatch, slot: int, layer: int, site: str) -> Key:
    return key_of("dropout", micro_batch.seed, micro_batch.iteration, slot, layer, site)


def _index_in_sequence(shape: torch.Size, dim: int, rank: int, size: int, device: torch.device) -> Tensor:
    """The indices, in the whole tensor of one sequence, of a rank's share of its dimension `dim`."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for number, length in enumerate(shape):
        own = torch.arange(length, device=device) + (rank * length if number == dim else 0)
        index = index[..., None] * (length * size if number == dim else length) + own
    return index


def recompute_module(module: nn.Module, call: PartCall) -> None:
    """Has a module computed again in the backward pass, from its inputs (`parallel.recompute` selective)."""
    forward = module.forward

    def run_again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        micro_batch, num_calls = call.micro_batch, call.num_calls.copy()

        def run(*args: Any, **kwargs: Any) -> Any:  # the second time maybe after other micro-batches
            call.micro_batch, call.num_calls = micro_batch, num_calls.copy()
            return forward(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    module.forward = run_again  # its name, and those of its weights, stay


def document_arguments(micro_batch: MicroBatch, device: torch.device) -> dict[str, Tensor | None]:
    """The arguments that a forward may name, (sequences, length) int64, shared and not to be written to.

    `positions`: in the document. `documents`: its number in the sequence; None where no documents are kept apart.
    """
    positions, documents = _document_tables(micro_batch.documents, micro_batch.sequence_length, device)
    positions = positions.expand(micro_batch.batch_size, -1)
    return {"positions": positions, "documents": documents}


@lru_cache(maxsize=8)
def _document_tables(
    lengths: tuple[int, ...] | None, sequence_length: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """All parts of a stage share one copy to the device."""
    if lengths is None:
        return torch.arange(sequence_length, device=device)[None], None
    sizes = torch.tensor(lengths)
    numbers = torch.arange(len(lengths)).repeat_interleave(sizes).view(-1, sequence_length)
    starts = (sizes.cumsum(0) - sizes)[numbers]
    positions = torch.arange(sum(lengths)).view(numbers.shape) - starts
    return to_device(positions, device), to_device(numbers - numbers[:, :1], device)


def replace_dropouts(part: nn.Module, make: Callable[[str, float], KeyedDropout]) -> nn.Module:
    """Puts `make(path, p)` in the place of each torch.nn.Dropout that drops; returns the part, or what replaces it."""
    made: dict[int, KeyedDropout] = {}
    for path, module in list(part.named_modules(remove_duplicate=False)):
        if type(module) is not nn.Dropout or module.p == 0:
            continue
        new = made.setdefault(id(module), make(path, module.p))
        if not path:
            return new
        parent, _, child = path.rpartition(".")
        setattr(part.get_submodule(parent), child, new)
    return part


class RandomNumbersRefused(TorchDispatchMode):
    """Raises ValueError where the user's code draws from torch's generator, whose numbers no two layouts have alike."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            raise ValueError(
                f"{func.overloadpacket.__name__} draws torch's random numbers, which differ between layouts and when a"
                " step is done again: drop with a torch.nn.Dropout of the module, which is replaced; draw nothing else"
            )
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator that can draw does: one with a probability of 0 does not."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p"):
            value = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(value)
    return True
