"""Hosts full of devices, as `--devices` names them: "8xH100-80GB:16" is 16 hosts of 8. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from parallel3d.errors import UserError
from parallel3d.rehearsal.device_rows import DeviceRow, find_rows

_SPEC = re.compile(r"(?:(\d+)x)?([A-Za-z][\w.+-]*?)(?::(\d+))?")
HOW = "give devices a host, their name and hosts, as in 8xH100-80GB:16"


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Equal hosts with equal devices."""

    device: DeviceRow
    devices_per_host: int
    num_hosts: int

    @property
    def num_devices(self) -> int:
        return self.devices_per_host * self.num_hosts

    @property
    def price_per_hour(self) -> float | None:
        """Dollars for an hour of all of them."""
        price = self.device.price_per_hour
        return None if price is None else price * self.num_devices

    def bandwidth(self, *, size: int, stride: int) -> float:
        """Bytes/s that a rank sends in a ring of `size` ranks, `stride` apart.

        Within a host those of its links. Beyond, every ring of a host crosses the network once in each direction, and
        as many rings share the host's network as ranks of different groups lie between neighbours.
        """
        if size * stride <= self.devices_per_host:
            return self.device.link_bandwidth
        ranks_a_host = max(1, self.devices_per_host // stride)
        return min(self.device.link_bandwidth, self.device.network_bandwidth * ranks_a_host)

    def is_within_host(self, *, size: int, stride: int = 1) -> bool:
        """Whether every group of `size` ranks, `stride` apart, lies on one host."""
        return self.devices_per_host % (size * stride) == 0

    def __str__(self) -> str:
        return f"{self.devices_per_host}x{self.device.name}:{self.num_hosts}"


def parse_machines(text: str, table: Path | None = None, price: float | None = None) -> list[Machines]:
    """The machines of a list like "8xH100:16,8xA100-40GB:32". `price` replaces the dollars for an hour of a device.

    Raises UserError for an unknown device, with the known ones, and for what can't be read.
    """
    return [_parse_one(spec.strip(), table, price) for spec in text.split(",")]


def _parse_one(spec: str, table: Path | None, price: float | None) -> Machines:
    found = _SPEC.fullmatch(spec)
    if found is None:
        raise UserError(f"--devices {spec}: {HOW}")
    per_host, hosts = int(found[1] or 1), int(found[3] or 1)
    if per_host < 1 or hosts < 1:
        raise UserError(f"--devices {spec}: has no device; {HOW}")
    [row] = find_rows(found[2], table)
    if price is not None:
        row = replace(row, price_per_hour=price, price_source="--price", price_date="")
    return Machines(device=row, devices_per_host=per_host, num_hosts=hosts)
