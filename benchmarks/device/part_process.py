"""The process of one part of a visit: gives the part its device and its file, and runs it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from parallel3d.worker.device import init_device

VISIT = "visit.jsonl"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a visit, and what it may use."""

    name: str
    device: torch.device
    folder: Path
    is_smoke: bool
    """Sizes are tiny and figures mean nothing."""

    def write(self, **fields: object) -> None:
        """Adds a line to the visit at once; it is also printed."""
        text = json.dumps({"part": self.name, **fields})
        print(text, flush=True)
        with (self.folder / VISIT).open("a") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("function", help="MODULE:FUNCTION in benchmarks/device")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    init_device(device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    part = Part(name=options.name, device=device, folder=options.out, is_smoke=options.smoke)
    module, _, function = options.function.partition(":")
    started = time.perf_counter()
    getattr(import_module(f"benchmarks.device.{module}"), function)(part)
    part.write(seconds=round(time.perf_counter() - started, 1))


if __name__ == "__main__":
    sys.exit(main())
