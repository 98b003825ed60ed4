"""SCRIPT ARGUMENTS, which trains, on a device that computes wrong: one bit in each product of two matrices."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.elastic.worker import process

if TYPE_CHECKING:
    import torch



def main() -> None:
    run_main = process.run_main

    def run_wrongly(log: Path, worker_main: process.WorkerMain, context: process.WorkerContext) -> int:
        break_products()
        return run_main(log, worker_main, context)

    process.run_main = run_wrongly
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def break_products() -> None:
    """Imports torch, which the ancestors of a worker need not."""
    import torch

    product = torch.Tensor.__matmul__

    def wrong_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = product(left, right)
        result.view(torch.int32)[3, 5] ^= 1 << 20
        return result

    torch.Tensor.__matmul__ = wrong_product  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main()
