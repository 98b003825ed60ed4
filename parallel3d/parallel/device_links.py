"""Links that move activations and gradients between neighbouring stages from device to device.

A message is two: an announcement over the host's links, which is the header of an empty tensor, and the tensor over the
pair's own communicator. The host verifies the header as for any other message, and only then posts the receive. So a
message that the schedule did not promise is an error and not a hang, and waits for a peer stay on the host, where the
end of a generation ends them; what the devices have begun ends with the communicator's abort.

Every ordered pair of neighbours has a communicator of its own: a send that waits for its receiver delays no other one.
Only a replica's own neighbours have them (`groups.neighbour_pairs`). Messages that are rerouted after a loss, other
kinds of messages and messages whose content the host reads use the host's links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from parallel3d.parallel.group import Closable, Work
from parallel3d.parallel.p2p_messages import Header, Kind, Links

Pair = tuple[int, int]
"""(sender, receiver), as ranks."""
_BETWEEN_STAGES = (Kind.ACTIVATION, Kind.GRADIENT)


class SendWork(Work, Protocol):
    """A send under way."""

    def is_done(self) -> bool:
        """Whether the tensor may be changed or freed; does not wait."""
        ...


class PairGroup(Closable, Protocol):
    """A communicator of two ranks, of which the first sends and the second receives."""

    def send_async(self, tensor: Tensor) -> SendWork:
        """Sends `tensor`, after the device's earlier work."""
        ...

    def receive_async(self, tensor: Tensor) -> Work:
        """Receives into `tensor`; `wait` orders the device's later work after it."""
        ...


class DeviceLinks(Links):
    """The links of `rank`: between neighbours over `pairs`, everything else over `host`."""

    def __init__(self, host: Links, pairs: Mapping[Pair, PairGroup], *, rank: int, device: torch.device):
        self._host = host
        self._pairs = pairs
        self._rank = rank
        self._device = device
        self._in_flight: dict[int, deque[tuple[SendWork, Tensor]]] = {}
        """Tensors that the device has not sent yet, by destination: their memory must not be used again."""

    def send(self, destination: int, header: Header, tensor: Tensor, *, bounded: bool = True) -> None:
        pair = self._pair_of((self._rank, destination), header)
        if pair is None:
            self._host.send(destination, header, tensor, bounded=bounded)
            return
        announcement = announcement_of(header)
        self._host.send(destination, announcement, torch.empty(announcement.shape, dtype=header.dtype), bounded=bounded)
        tensor = tensor.detach().contiguous()
        in_flight = self._in_flight.setdefault(destination, deque())
        while in_flight and in_flight[0][0].is_done():
            in_flight.popleft()
        in_flight.append((pair.send_async(tensor), tensor))

    def receive(self, source: int, expected: Header) -> Tensor:
        pair = self._pair_of((source, self._rank), expected)
        if pair is None:
            return self._host.receive(source, expected)
        self._host.receive(source, announcement_of(expected))
        tensor = torch.empty(expected.shape, dtype=expected.dtype, device=self._device)
        pair.receive_async(tensor).wait()  # bounded: only orders the device's work
        return tensor

    def close(self) -> None:
        self._host.close()

    def _pair_of(self, pair: Pair, header: Header) -> PairGroup | None:
        return self._pairs.get(pair) if header.kind in _BETWEEN_STAGES else None


def announcement_of(header: Header) -> Header:
    """The header that announces a message which travels elsewhere: that of as many dimensions and one more, empty."""
    return replace(header, shape=(0, *header.shape))
