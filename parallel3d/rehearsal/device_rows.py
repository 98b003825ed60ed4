"""Devices as data, for estimates: memory, bandwidth, peaks. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from parallel3d.errors import UserError
from parallel3d.monitor.flops import TERA

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """One device, by its data sheet."""

    name: str
    memory_gib: float
    """Memory that torch can allocate from."""
    bandwidth: float
    """Bytes/s of its memory."""
    link_bandwidth: float
    """Bytes/s that it sends to the other devices of its host."""
    bf16_tflops: float
    """TFLOP/s of dense bf16 products."""
    fp32_tflops: float


DEVICE_ROWS = (
    DeviceRow(
        name="H100", memory_gib=79.1, bandwidth=3.35e12, link_bandwidth=450e9, bf16_tflops=989.4, fp32_tflops=66.9
    ),
    DeviceRow(
        name="H200", memory_gib=139.8, bandwidth=4.8e12, link_bandwidth=450e9, bf16_tflops=989.4, fp32_tflops=66.9
    ),
)


def find_rows(names: str, path: Path | None) -> list[DeviceRow]:
    """The rows named in a list like "H100,H200", among DEVICE_ROWS and those of a JSON file with a list of rows.

    Raises UserError for an unknown name and a file that can't be read.
    """
    rows = {row.name: row for row in (*DEVICE_ROWS, *(_read_rows(path) if path else ()))}
    if unknown := [name for name in names.split(",") if name not in rows]:
        raise UserError(f"unknown device {', '.join(unknown)}: there are {', '.join(rows)}")
    return [rows[name] for name in names.split(",")]


def peak_flops(row: DeviceRow, itemsize: int) -> float:
    """FLOP/s of dense products of elements of `itemsize` bytes."""
    return (row.bf16_tflops if itemsize <= 2 else row.fp32_tflops) * TERA


def _read_rows(path: Path) -> list[DeviceRow]:
    try:
        return [DeviceRow(**row) for row in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: no list of devices: {error}") from error
