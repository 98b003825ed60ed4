"""The training script of llm_faults.py: a small GPT-2 on four elastic workers."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel3d import elastic

NUM_WORKERS, SLOT_SIZE, WARMUP = 4, 4, 20
NUM_VALIDATED, PROMPT = 512, b"ROMEO:\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", required=True, help="a file to train on")
    parser.add_argument("--directory", required=True)
    parser.add_argument("--mode", choices=("redo", "drop"), default="redo")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


OPTIONS = parse_arguments()
elastic.init(NUM_WORKERS, directory=OPTIONS.directory, seed=OPTIONS.seed, max_rejoins=0)

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.small_gpt import SmallGpt, generate, loss_of, perplexity, split_text, validation_loss


def learning_rate(step: int) -> float:
    """The share of the highest rate: a linear warmup, then half a cosine to a tenth."""
    share = max(0.0, step - WARMUP) / max(1, OPTIONS.steps - WARMUP)
    return min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, share)))


def main() -> None:
    training, validation = split_text(Path(OPTIONS.text).read_bytes())
    network = SmallGpt()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    train = train_and_redo if OPTIONS.mode == "redo" else train_and_drop
    train(network, optimizer, schedule, TensorDataset(training))
    loss = validation_loss(network, validation[:NUM_VALIDATED])
    text, logs = generate(network, PROMPT, length=200, top_k=40, seed=0)
    bits = torch.cat([each.detach().reshape(-1).view(torch.int32).long() for each in network.parameters()])
    report = {"loss": loss, "own_perplexity": perplexity(logs), "text": (PROMPT + text).decode(errors="replace")}
    report["weights"] = f"{int((bits * torch.arange(1, len(bits) + 1)).sum()):x}"
    print(f"report {json.dumps({**report, 'num_parameters': len(bits)})}", flush=True)


def train_and_redo(network, optimizer, schedule, dataset) -> None:
    model = elastic.DataParallel(network, optimizer, schedule, sums="exact")
    sampler = elastic.Sampler(dataset, slot_size=SLOT_SIZE, batch_size=SLOT_SIZE * NUM_WORKERS, seed=OPTIONS.seed)
    for step in elastic.steps(sampler, epochs=10**6):
        if step.number > OPTIONS.steps:
            return
        for (windows,) in step:
            loss = loss_of(model, windows)
            step.add_loss(loss)
            loss.backward()
        optimizer.step()
        schedule.step()


def train_and_drop(network, optimizer, schedule, dataset) -> None:
    model = elastic.DataParallel(network, optimizer, schedule)
    sampler = elastic.Sampler(dataset, slot_size=SLOT_SIZE, on_failure="drop", seed=OPTIONS.seed)
    loader, num_steps = DataLoader(dataset, batch_size=SLOT_SIZE, sampler=sampler), 0
    while True:  # bounded: by the number of steps
        for (windows,) in loader:
            optimizer.zero_grad()
            loss_of(model, windows).backward()
            optimizer.step()
            schedule.step()
            num_steps += 1
            if num_steps == OPTIONS.steps:
                return


main()
