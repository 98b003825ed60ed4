"""Admission: a worker that joins a run must show, before it gets a place, that it computes what the others compute.

The same code and configuration, a small computation whose result every machine must have to the last bit, and a
connection that is not too slow for the state that will follow. One that fails says which, and stays out.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from parallel3d.config.load import dump_config
from parallel3d.config.schema import Config
from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.errors import UserError

SIZE, NUM_PRODUCTS, LARGEST = 128, 16, 63
ARITHMETIC = "d2f8e062011636e1"
"""The digest of `compute`: of sums of integers, which fp32 holds exactly in whatever order (128 x 63 x 63 < 2^24)."""
SAMPLE_BYTES = 2**20
MIN_BYTES_PER_S = 2**20
"""Of both ways together. A worker behind a slower connection would keep all others waiting for minutes."""


class AdmissionError(UserError):
    """A worker that may not join the run."""


def admit(control: ControlChannel, device: torch.device, own: Mapping[str, str], run: Mapping[str, str]) -> None:
    """Raises AdmissionError unless this worker may join the run; `own` and `run` are as `describe` returns them."""
    check_equal(own, run)
    check_arithmetic(device)
    check_transfer(control)


def describe(config: Config, sources: Iterable[Path], data_fingerprint: Mapping[str, object]) -> dict[str, str]:
    """Returns what must be equal on all workers: digests of the code in the folders and files `sources`, of the
    configuration and of the data."""
    code = hashlib.sha256()
    for source in sources:
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            code.update(str(file.relative_to(source)).encode() + file.read_bytes())
    return {
        "code": code.hexdigest()[:16],
        "torch": torch.__version__,
        "configuration": _digest(dump_config(config)),
        "data": _digest(json.dumps(data_fingerprint, sort_keys=True, default=str)),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_equal(own: Mapping[str, str], run: Mapping[str, str]) -> None:
    """Raises AdmissionError unless this worker is the run's in all that `describe` says."""
    if other := [f"{name} {own[name]}, the run has {run[name]}" for name in own if own[name] != run.get(name)]:
        raise AdmissionError(f"not admitted: {'; '.join(other)}")


def check_arithmetic(device: torch.device) -> None:
    """Raises AdmissionError unless `device` computes with the bits that every device must have."""
    if (found := compute(device)) != ARITHMETIC:
        raise AdmissionError(f"not admitted: {device} computes {found} in place of {ARITHMETIC}")


def compute(device: torch.device) -> str:
    """Returns a digest of a chain of products of matrices of small integers."""
    numbers = torch.arange(SIZE * SIZE, device=device).reshape(SIZE, SIZE)
    left = (numbers * 37 % (2 * LARGEST + 1) - LARGEST).float()
    right = left
    for _ in range(NUM_PRODUCTS):
        right = torch.remainder(left @ right + numbers, 2 * LARGEST + 1) - LARGEST
    return hashlib.sha256(right.to("cpu", torch.int64).numpy().tobytes()).hexdigest()[:16]


def check_transfer(control: ControlChannel) -> None:
    """Raises AdmissionError if the connection to the coordinator is too slow."""
    key, begin_s = f"admission/{control.rank}", time.monotonic()  # of no generation: one that begins would drop it
    control.set(key, bytes(SAMPLE_BYTES))
    while not control.check([key], control.token):  # another coordinator has taken over, which never got it
        control.set(key, bytes(SAMPLE_BYTES))
    control.get(key, control.token)
    rate = 2 * SAMPLE_BYTES / max(time.monotonic() - begin_s, 1e-6)
    control.set(key, b"")  # the store keeps no sample
    if rate < MIN_BYTES_PER_S:
        raise AdmissionError(
            f"not admitted: the connection to the coordinator carries {rate / 2**20:.2f} MiB/s, "
            f"less than {MIN_BYTES_PER_S / 2**20:g}"
        )
