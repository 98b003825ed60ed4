"""Prints what torch and the C compiler find on this machine, as JSON: a process of its own, which may fail or hang."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder; installed or not


def find_facts() -> dict[str, Any]:
    """torch's version, its GPUs, NCCL, and the libraries of C loops; `error` where a part fails."""
    import torch

    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "num_gpus": 0, "nccl": None}
    try:
        facts["num_gpus"] = torch.cuda.device_count()
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(facts["num_gpus"])]
        if torch.distributed.is_nccl_available():
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except (RuntimeError, AssertionError) as error:
        facts["error"] = str(error).partition("\n")[0]
    from parallel3d.kernels.c_loops import has_c_loops

    facts["has_c_loops"] = has_c_loops()
    return facts


if __name__ == "__main__":
    print(json.dumps(find_facts()))
