"""What elastic.DataParallel costs beside torch's DistributedDataParallel while nothing fails.

    python benchmarks/drop_in.py --pairs 8 --block 4 [--sums exact] [--loop steps]

Two workers on this host train a transformer of 23M parameters. In the same processes each block of elastic steps is
followed by one of DistributedDataParallel (gloo, its defaults) with equal samples, optimizer and number of threads:
runs of their own would differ by more than the effect. Both are loops over batches, or ours is one of elastic.steps.
The heartbeat thread, which wakes four times a second, is there in both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel3d import elastic

NUM_WORKERS, VOCABULARY, LENGTH, WIDTH, NUM_LAYERS = 2, 4096, 128, 512, 6
SLOT_SIZE = 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=8, help="blocks of each kind")
    parser.add_argument("--block", type=int, default=4, help="steps of a block")
    parser.add_argument("--sums", choices=("float", "exact"), default="float")
    parser.add_argument("--loop", choices=("plain", "steps"), default="plain")
    parser.add_argument("--directory", default=tempfile.mkdtemp(prefix="drop-in-"))
    return parser.parse_args()


OPTIONS = parse_arguments()
sys.argv[1:] = [f"--{name}={value}" for name, value in vars(OPTIONS).items()]  # the workers read the same folder
elastic.init(NUM_WORKERS, directory=OPTIONS.directory, max_rejoins=0)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from parallel3d.elastic.drop_in.elastic_loop import current_session


class Transformer(nn.Module):
    """A plain decoder of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 8, dim_feedforward=4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.layers(self.embedding(ids), mask=mask, is_causal=True))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    rank, block = current_session().rank, OPTIONS.block
    store = dist.FileStore(f"{OPTIONS.directory}/store", NUM_WORKERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_WORKERS)
    num_steps = block * (OPTIONS.pairs + 1)
    ids = torch.randint(VOCABULARY, (num_steps * SLOT_SIZE * NUM_WORKERS, LENGTH + 1))
    ours, theirs = Transformer(), Transformer()
    theirs.load_state_dict(ours.state_dict())
    our_optimizer, their_optimizer = (torch.optim.AdamW(each.parameters(), lr=1e-4) for each in (ours, theirs))
    model = elastic.DataParallel(ours, our_optimizer, sums=OPTIONS.sums)
    peer = DistributedDataParallel(theirs)
    sampler = elastic.Sampler(TensorDataset(ids), slot_size=SLOT_SIZE, batch_size=SLOT_SIZE * NUM_WORKERS)
    given: list[Tensor] = []
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    started = time.perf_counter()

    def compare(number: int) -> None:
        """After our step of this number: does the same again, with the peer, at the end of a block."""
        nonlocal started
        if number % block:
            return
        times["ours"].append(time.perf_counter() - started)
        dist.barrier()
        started = time.perf_counter()
        for batch in given:
            their_optimizer.zero_grad()
            loss_of(peer, batch).backward()
            their_optimizer.step()
        times["theirs"].append(time.perf_counter() - started)
        given.clear()
        dist.barrier()
        started = time.perf_counter()

    if OPTIONS.loop == "plain":
        loader = DataLoader(sampler.dataset, SLOT_SIZE, sampler=sampler)
        for number, (batch,) in enumerate(loader, 1):
            given.append(batch)
            our_optimizer.zero_grad()
            loss_of(model, batch).backward()
            our_optimizer.step()
            compare(number)
    else:
        for step in elastic.steps(sampler):
            for (batch,) in step:
                given.append(batch)
                loss_of(model, batch).backward()
            our_optimizer.step()
            compare(step.number)
    report(times, ours, theirs)
    dist.destroy_process_group()


def report(times: dict[str, list[float]], ours: nn.Module, theirs: nn.Module) -> None:
    """Prints the ratio of each pair of blocks but the first, which warms up."""
    ratios = [mine / other for mine, other in zip(times["ours"][1:], times["theirs"][1:])]
    step_s = {name: statistics.median(each[1:]) / OPTIONS.block for name, each in times.items()}
    largest = max(float((a - b).abs().max()) for a, b in zip(ours.parameters(), theirs.parameters()))
    print(f"{sum(p.numel() for p in ours.parameters()):,} parameters, {len(ratios)} pairs of {OPTIONS.block} steps")
    print(f"step: ours {step_s['ours']:.3f} s, DistributedDataParallel {step_s['theirs']:.3f} s")
    print(f"ratio: median {statistics.median(ratios):.3f}, mean {statistics.mean(ratios):.3f}, of {min(ratios):.3f} ")
    print(f"to {max(ratios):.3f}; largest difference of weights {largest:.1e}")


main()
