"""Devices as data, for estimates: memory, bandwidth, peaks, prices. Pure.

Sizes and peaks are from data sheets. Prices are those that a source has paid, with its date where it has one: yours to
replace, by a file of rows (`--device-table`). A row there that has the name of a known one changes only what it gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from parallel3d.errors import UserError, shorten
from parallel3d.monitor.flops import TERA

GIB = 2**30
_RULES = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Pydantic's, for rows of files."""

Positive = Annotated[float, Field(gt=0, strict=True)]
Seconds = Annotated[float, Field(ge=0, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ReachedRates:
    """What kernels reach of a device's peaks, and times that do not depend on sizes. The defaults are an H200's: its
    shares were measured with a sketch of this program; those of narrow products and of collectives are guesses."""

    __pydantic_config__ = _RULES

    wide_product: Positive = 0.70
    """Share of the peak that products reach whose smallest size is at least `wide_from`."""
    narrow_product: Positive = 0.565
    wide_from: Annotated[int, Field(ge=1, strict=True)] = 2048
    misaligned_factor: Positive = 3.3
    """How many times as long products take whose rows are misaligned."""
    attention: Positive = 0.50
    attention_backward: Positive = 0.43
    elementwise: Positive = 0.79
    """Share of the memory's bandwidth."""
    update: Positive = 0.58
    """The same for the update: random bits and roundings are some 120 instructions an element, 27 ms at 7B where the
    bytes take 24, and the two overlap in part."""
    collective: Positive = 0.75
    """Share of the links' bandwidth."""
    collective_start_s: Seconds = 20e-6
    """Time of a collective without bytes, for each doubling of its ranks. A guess."""
    kernel_s: Seconds = 4e-6
    """What a kernel takes at least."""
    dispatch_s: Seconds = 0.0
    """What the start of a kernel adds to it where nothing hides it: a CPU starts and computes in turn."""
    launch_s: Seconds = 8e-6
    """Host time of a kernel's start, eager: a step that starts more than it can hide takes as long as its starts."""
    wait_s: Seconds = 50e-6
    """Idle time of the device after the host has waited for it."""
    step_idle_s: Seconds = 4e-3
    """Idle time of a step: its beginning and its end, with the host's part of the entry."""


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """One device, by its data sheet."""

    __pydantic_config__ = _RULES

    name: Annotated[str, Field(min_length=1)]
    memory_gib: Positive
    """Memory that torch can allocate from."""
    bandwidth: Positive
    """Bytes/s of its memory."""
    link_bandwidth: Positive
    """Bytes/s that it sends to the other devices of its host."""
    bf16_tflops: Positive
    """TFLOP/s of dense bf16 products."""
    fp32_tflops: Positive
    network_bandwidth: Positive = 50e9
    """Bytes/s that it sends to other hosts: its share of the host's network. 400 Gbit/s unless a row says otherwise."""
    price_per_hour: Positive | None = None
    """Dollars for an hour of one device; None: unknown."""
    price_source: str = ""
    """Where the price is from, and for which machine."""
    price_date: str = ""
    rates: ReachedRates = ReachedRates()
    """What kernels reach of the peaks above."""
    is_cpu: Annotated[bool, Field(strict=True)] = False
    """Whether it is a share of a host's cores: no context, no fragments, blocks of logits in CPU sizes."""


_ROW = TypeAdapter(DeviceRow)
_H100: dict[str, Any] = dict(bf16_tflops=989.4, fp32_tflops=66.9, link_bandwidth=450e9)
_A100: dict[str, Any] = dict(bf16_tflops=312.0, fp32_tflops=19.5, link_bandwidth=300e9, network_bandwidth=25e9)
_BLOG: dict[str, Any] = dict(
    price_source="on demand, a host of 8, as the blog on GPT-2 163M paid (docs/paper_notes.md)"
)

DEVICE_ROWS = (
    DeviceRow(name="H100-80GB", memory_gib=79.1, bandwidth=3.35e12, price_per_hour=23.92 / 8, **_H100, **_BLOG),
    DeviceRow(
        name="H200-141GB",
        memory_gib=139.8,
        bandwidth=4.8e12,
        price_per_hour=3.99,
        price_source="on demand, H200 SXM on Hyperstack's public list",
        price_date="2026-08-26",
        **_H100,
    ),
    DeviceRow(
        name="B200-180GB",
        memory_gib=178.3,
        bandwidth=7.7e12,
        link_bandwidth=900e9,
        bf16_tflops=2250.0,
        fp32_tflops=75.0,
        price_per_hour=39.92 / 8,
        **_BLOG,
    ),
    DeviceRow(name="A100-40GB", memory_gib=39.4, bandwidth=1.555e12, price_per_hour=10.32 / 8, **_A100, **_BLOG),
    DeviceRow(name="A100-80GB", memory_gib=79.2, bandwidth=2.039e12, price_per_hour=14.32 / 8, **_A100, **_BLOG),
    DeviceRow(
        name="Trn1-16GB",
        memory_gib=16.0,
        bandwidth=410e9,
        link_bandwidth=96e9,
        network_bandwidth=3.1e9,
        bf16_tflops=95.0,
        fp32_tflops=23.8,
        price_per_hour=21.50 / 32,
        price_source="on demand, trn1.32xlarge with 32 cores, as HLAT gives it",
    ),
)


def find_rows(names: str, path: Path | None) -> list[DeviceRow]:
    """The rows named in a list like "H100,H200", among DEVICE_ROWS and those of a JSON file with a list of rows.

    A name without its memory is enough where only one row begins with it. Raises UserError for an unknown name, a file
    that can't be read, and rows with mistakes: one line for each row, with all of its mistakes.
    """
    rows = {row.name: row for row in DEVICE_ROWS}
    mistakes: list[str] = []
    for number, raw in enumerate(_read_rows(path) if path else (), start=1):
        try:
            row = _merge(rows, raw)
        except ValidationError as error:
            mistakes.append(f"{path}: row {number}{_name_of(raw)}: {'; '.join(_explain(error))}")
        else:
            rows[row.name] = row
    if mistakes:
        raise UserError("\n".join(mistakes))
    return [_find(name, rows) for name in names.split(",")]


def peak_flops(row: DeviceRow, itemsize: int) -> float:
    """FLOP/s of dense products of elements of `itemsize` bytes."""
    return (row.bf16_tflops if itemsize <= 2 else row.fp32_tflops) * TERA


def _find(name: str, rows: Mapping[str, DeviceRow]) -> DeviceRow:
    wanted = name.strip().lower()
    fitting = [row for row in rows.values() if row.name.lower() == wanted]
    fitting = fitting or [row for row in rows.values() if row.name.lower().startswith(f"{wanted}-")]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UserError(f"device {name} is one of {', '.join(row.name for row in fitting)}: name one of them")
    raise UserError(f"unknown device {name}: there are {', '.join(rows)}; --device-table FILE adds your own")


def _read_rows(path: Path) -> Sequence[Any]:
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: no list of devices: {error}") from error
    if not isinstance(raw, list):
        raise UserError(f"{path}: no list of devices: it holds a {type(raw).__name__}")
    return raw


def _merge(rows: Mapping[str, DeviceRow], raw: Any) -> DeviceRow:
    """The row of a file, on top of the known one of this name. Raises ValidationError."""
    if not isinstance(raw, dict):
        return _ROW.validate_python(raw)
    name, rates = raw.get("name"), raw.get("rates", {})
    known = asdict(rows[name]) if isinstance(name, str) and name in rows else {}
    if isinstance(rates, dict):
        rates = {**known.get("rates", {}), **rates}
    return _ROW.validate_python({**known, **raw, "rates": rates})


def _name_of(raw: Any) -> str:
    return f" ({shorten(str(raw['name']))})" if isinstance(raw, dict) and "name" in raw else ""


def _explain(error: ValidationError) -> Iterator[str]:
    """Yields, for each mistake, the field, its value and what is expected there; missing fields together."""
    mistakes = error.errors()
    if missing := [str(mistake["loc"][-1]) for mistake in mistakes if mistake["type"] == "missing"]:
        yield f"lacks {', '.join(missing)}, which every name needs that is not in the table"
    for mistake in mistakes:
        field, value, kind = ".".join(map(str, mistake["loc"])), shorten(repr(mistake["input"])), mistake["type"]
        if kind == "unexpected_keyword_argument":
            group = ReachedRates if field.startswith("rates.") else DeviceRow
            yield f"{field} = {value}: no such field; there are {', '.join(each.name for each in fields(group))}"
        elif kind.startswith("dataclass"):
            yield f"{field or 'the row'} = {value}: must be an object in {{}}"
        elif kind in ("float_type", "int_type") and isinstance(mistake["input"], str):
            yield f"{field} = {value}: must be a number, without quotes"
        elif kind != "missing":
            yield f"{field} = {value}: {mistake['msg'].removeprefix('Input ')}"
