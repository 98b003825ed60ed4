"""Point-to-point messages: a header that the receiver verifies, and one tensor.

Pipeline stages send each other activations and gradients, replicas of a stage send reduced gradients and optimizer
state. `Links` is the transport's interface: each ordered pair of ranks has a fixed number of slots, a send takes one
and does not wait for the receiver, and messages arrive in the order of the sends. Implementations: sockets
(p2p_sockets.py) and threads of one process (inprocess/thread_links.py).
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from math import prod

import torch
from torch import Tensor

from parallel3d.errors import ProtocolError
from parallel3d.number_formats import NUMBER_FORMATS


class Kind(IntEnum):
    """The content of a message."""

    ACTIVATION = 1
    GRADIENT = 2
    TARGETS = 3
    REDUCED = 4  # a bucket's reduced gradients, for its backup
    STATE = 5  # a part of optimizer state that moves to another rank
    TRAIN_STATE = 6  # the train state, for a rank that joins
    TOKENS = 7  # the tokens that the last stage has chosen, and the logarithms of their probabilities


_FLOATS: list[torch.dtype] = [getattr(torch, each.torch_name) for each in NUMBER_FORMATS]
_DTYPES = (*_FLOATS, torch.int64, torch.int32)
_FORMAT = struct.Struct("<4sIQIIIII4Q")
_MAGIC = b"p3d2"
HEADER_BYTES = _FORMAT.size


@dataclass(frozen=True, kw_only=True)
class Header:
    """The identity of a message; the receiver states the one it expects."""

    generation: int
    iteration: int
    kind: Kind
    micro_batch: int
    stage: int = 0
    """The virtual stage that reads it: with model chunks a micro-batch passes the same pair of ranks several times."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        reader = f" for stage {self.stage}" if self.stage else ""
        what = f"{self.kind.name.lower()} of micro-batch {self.micro_batch}{reader}"
        return f"{what}, iteration {self.iteration}, generation {self.generation}, {tuple(self.shape)} {self.dtype}"

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def pack(self) -> bytes:
        dims = tuple(self.shape) + (0,) * (4 - len(self.shape))
        code = _DTYPES.index(self.dtype)
        whose = (self.generation, self.iteration, self.kind, self.micro_batch, self.stage)
        return _FORMAT.pack(_MAGIC, *whose, code, len(self.shape), *dims)

    @staticmethod
    def unpack(data: bytes) -> Header:
        magic, generation, iteration, kind, micro_batch, stage, code, ndim, *dims = _FORMAT.unpack(data)
        if magic != _MAGIC:
            raise ProtocolError(f"a message begins with {magic!r}, not with {_MAGIC!r}")
        if kind not in set(Kind) or code >= len(_DTYPES) or ndim > len(dims):
            raise ProtocolError(f"a message of kind {kind}, dtype {code} and {ndim} dimensions")
        return Header(
            generation=generation,
            iteration=iteration,
            kind=Kind(kind),
            micro_batch=micro_batch,
            stage=stage,
            shape=tuple(dims[:ndim]),
            dtype=_DTYPES[code],
        )


class Links(ABC):
    """Point-to-point messages of one rank in one membership generation."""

    @abstractmethod
    def send(self, destination: int, header: Header, tensor: Tensor, *, bounded: bool = True) -> None:
        """Sends a tensor, which must not change afterwards; waits only while all slots to `destination` are taken.

        `bounded=False` never waits, for messages whose number both sides have agreed on.
        """

    @abstractmethod
    def receive(self, source: int, expected: Header) -> Tensor:
        """Returns the next message from `source`; raises ProtocolError if it is not the expected one."""

    @abstractmethod
    def close(self) -> None:
        """Sends what is still in the slots, then releases all resources."""


def verify_header(source: int, header: Header, expected: Header) -> None:
    """Raises ProtocolError if a message is not the one that the schedule promised."""
    if header != expected:
        raise ProtocolError(f"from rank {source}: expected {expected}; got {header}")
