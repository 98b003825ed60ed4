"""The oracle of drop-in loops: `ddp_loop.py RANK FOLDER` trains with torch's DistributedDataParallel, in two processes.

FOLDER/batches.json has each rank's samples of each step. The weights go to FOLDER/weights-RANK.pt.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.loop_threads import Numbers, make_model

WORLD_SIZE = 2
NUM_SAMPLES = 24
TIMEOUT_S = 60


def main(rank: int, folder: Path) -> None:
    store, timeout = f"file://{folder / 'store'}", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    numbers, network = Numbers(NUM_SAMPLES, torch.float64), make_model(torch.float64)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for given in json.loads((folder / "batches.json").read_text())[rank]:
        optimizer.zero_grad()
        (model(numbers.x[given]).squeeze(1) - numbers.y[given]).square().mean().backward()
        optimizer.step()
    torch.save(torch.cat([each.detach().view(-1) for each in network.parameters()]), folder / f"weights-{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # DistributedDataParallel keeps the threads of gloo: one that needs the GIL as Python ends is an abort


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
