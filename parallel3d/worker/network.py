"""The transports of a worker process: groups over NCCL or gloo, and sockets between pairs of ranks."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from parallel3d.accelerator import accelerator_of, is_accelerator
from parallel3d.config.schema import Config
from parallel3d.elastic.protocol.membership import Address, GenerationRecord
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.elastic.worker.torch_store import ControlStore
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.device_links import Pair
from parallel3d.parallel.gloo_group import GlooGroup
from parallel3d.parallel.group import Group, SoloGroup
from parallel3d.parallel.groups import is_world, may_stand_still
from parallel3d.parallel.nccl_group import NcclGroup
from parallel3d.parallel.p2p_sockets import SocketLinks, open_listener
from parallel3d.parallel.shared_memory import share_memory
from parallel3d.parallel.shared_memory_group import SharedMemoryGroup
from parallel3d.parallel.staged_group import StagedGroup
from parallel3d.parallel.tree_group import TreeGroup
from parallel3d.trainer.context import Transports
from parallel3d.trainer.recovery import Network
from parallel3d.worker.kept_groups import KeptGroups


class SocketNetwork(Network):
    """Builds each generation's transports. Groups rendezvous through the key-value store: over NCCL if each rank has a
    GPU of its own, else over gloo."""

    def __init__(self, config: Config, context: WorkerContext, device: torch.device | str = "cpu"):
        self._config = config
        self._context = context
        self._device = torch.device(device)
        self._listener: socket.socket | None = None
        self._port = 0
        """The last one: if all ranks keep theirs, a record has no new addresses."""

    def listen(self, generation: int) -> Address:
        if self._listener is not None:
            self._listener.close()
        try:
            self._listener = open_listener(self._context.address, self._port)
        except OSError:  # taken meanwhile
            self._listener = open_listener(self._context.address)
        host, self._port = self._listener.getsockname()
        return host, self._port

    def transports(self, record: GenerationRecord, token: AbortToken, former: Sequence[Group] = ()) -> Transports:
        assert self._listener is not None, "transports without listen()"
        listener, self._listener = self._listener, None
        links = self._open_links(listener, record, token)
        kept = KeptGroups(former, record, self._context.control, token)
        own_rank, control = self._context.rank, self._context.control

        def settings_of(name: str, ranks: tuple[int, ...]) -> dict[str, Any]:
            return dict(
                name=name, rank=ranks.index(own_rank), ranks=ranks, token=token, timeout_s=self._config.run.timeout_s
            )

        def make_group(name: str, ranks: tuple[int, ...]) -> Group:
            if not self._has_own_device and (group := kept.take(name, ranks)):  # NCCL's groups have no state
                return group
            if len(ranks) == 1:
                return SoloGroup(name=name, rank=own_rank)
            number = ranks.index(own_rank)
            if is_world(name):
                return TreeGroup(name=name, rank=number, ranks=ranks, streams=links.streams, token=token)
            if self._has_own_device:
                return NcclGroup(**settings_of(name, ranks), store=ControlStore(control, token), device=self._device)
            if may_stand_still(name) and self._may_share_memory(ranks, record):
                meeting = ControlStore(control, token, size=len(ranks))
                timeout = timedelta(seconds=self._config.run.timeout_s)
                if memory := share_memory(meeting, name, rank=number, size=len(ranks), timeout=timeout):
                    return SharedMemoryGroup(**settings_of(name, ranks), memory=memory)
                print(f"{name}: its ranks can't share memory, so they exchange by gloo", flush=True)
            store = ControlStore(control, token, size=len(ranks))
            group = GlooGroup(**settings_of(name, ranks), store=store, address=self._context.address)
            return StagedGroup(group) if is_accelerator(self._device) else group

        def make_pair(name: str, pair: Pair) -> NcclGroup:
            return NcclGroup(**settings_of(name, pair), store=ControlStore(control, token), device=self._device)

        return Transports(
            make_group=make_group,
            links=links,
            token=token,
            make_pair=make_pair if self._has_device_p2p else None,
        )

    def _open_links(self, listener: socket.socket, record: GenerationRecord, token: AbortToken) -> SocketLinks:
        return SocketLinks(
            rank=self._context.rank,
            generation=record.generation,
            secret=self._context.secret,
            listener=listener,
            address_of=lambda rank: record.addresses[rank],
            slots=self._config.parallel.p2p_slots,
            token=token,
            timeout_s=self._config.run.timeout_s,
            accelerator=accelerator_of(self._device),
        )

    def _may_share_memory(self, ranks: tuple[int, ...], record: GenerationRecord) -> bool:
        is_on_one_host = len({record.hosts[rank] for rank in ranks}) == 1
        return is_on_one_host and self._config.run.exchange == "auto" and not is_accelerator(self._device)

    @property
    def _has_own_device(self) -> bool:
        return is_accelerator(self._device) and self._config.run.device != "cuda_shared"

    @property
    def _has_device_p2p(self) -> bool:
        """Whether neighbouring stages talk from device to device; where documents begin is read on the host."""
        return self._has_own_device and self._config.run.p2p != "host" and not self._config.data.document_mask
