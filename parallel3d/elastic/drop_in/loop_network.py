"""The groups of a worker process that runs a training loop: gloo, or NCCL for the gradients of a model on a GPU."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch

from parallel3d.accelerator import is_accelerator
from parallel3d.elastic.drop_in.generations import LoopGroups
from parallel3d.elastic.protocol.membership import Address, GenerationRecord
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.elastic.worker.torch_store import ControlStore
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.gloo_group import GlooGroup
from parallel3d.parallel.group import Group, SoloGroup
from parallel3d.parallel.nccl_group import NcclGroup


class SocketLoopNetwork:
    """Groups that meet through the key-value store."""

    def __init__(self, context: WorkerContext, *, device: Callable[[], torch.device], timeout_s: float):
        self._context = context
        self._device = device
        self._timeout_s = timeout_s
        self._listener: socket.socket | None = None

    def listen(self) -> Address:
        if self._listener is None:  # the system answers for it: others only want to know whether they reach this host
            self._listener = socket.create_server((self._context.address, 0))
        host, port = self._listener.getsockname()
        return host, port

    def make_host_group(self, name: str, ranks: tuple[int, ...], token: AbortToken) -> Group:
        if len(ranks) == 1:
            return SoloGroup(name=name, rank=self._context.rank)
        number = ranks.index(self._context.rank)
        return GlooGroup(
            name=name,
            rank=number,
            ranks=ranks,
            store=ControlStore(self._context.control, token, size=len(ranks)),
            token=token,
            timeout_s=self._timeout_s,
            address=self._context.address,
        )

    def make_groups(self, record: GenerationRecord, token: AbortToken) -> LoopGroups:
        ranks, prefix, device = record.grid.ranks, f"generation{record.generation}", self._device()
        entries = self.make_host_group(f"{prefix}/entries", ranks, token)
        if not is_accelerator(device) or len(ranks) == 1:
            return LoopGroups(gradients=entries, entries=entries)
        gradients = NcclGroup(
            name=f"{prefix}/gradients",
            rank=ranks.index(self._context.rank),
            ranks=ranks,
            store=ControlStore(self._context.control, token),
            token=token,
            timeout_s=self._timeout_s,
            device=device,
        )
        return LoopGroups(gradients=gradients, entries=entries)
