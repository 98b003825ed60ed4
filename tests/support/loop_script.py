"""A user's training script for tests of elastic.init: `loop_script.py DIRECTORY SPEC`; SPEC is JSON.

    num_workers, max_workers, max_rejoins, epochs, num_samples, sums
    seed       of weights, dropout and the order of samples
    kills      {"STEP": RANK}: a worker that kills itself as it computes its first slot of a step
    loop       "steps", or one as in a script for DistributedDataParallel: "plain", or "drop" with on_failure="drop"
    wait_at    the step in which the first workers wait until one that joins is as far as its loop
    step_s     what a slot takes longer from then on, until one has joined
    fail       a rank whose script raises an error in step 2
    notice, coordinator_host    as of elastic.init
    hosts      where each rank thinks that it is, under a launcher that starts a process for each
    slot_s     what every slot takes longer
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from parallel3d import elastic

DIRECTORY, SPEC = Path(sys.argv[1]), json.loads(sys.argv[2])
SEED = SPEC.get("seed", 3)
if "hosts" in SPEC:
    socket.gethostname = lambda: SPEC["hosts"][int(os.environ["RANK"])]
elastic.init(
    SPEC["num_workers"],
    directory=DIRECTORY,
    seed=SEED,
    max_rejoins=SPEC.get("max_rejoins", 0),
    max_workers=SPEC.get("max_workers"),
    notice=SPEC.get("notice"),
    coordinator_host=SPEC.get("coordinator_host"),
)

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from parallel3d.elastic.drop_in.elastic_loop import current_session  # noqa: E402

RANK = current_session().rank
WAIT_S = 300.0


def strike(step: int) -> None:
    """Injects this worker's faults."""
    time.sleep(SPEC.get("slot_s", 0.0))
    if 0 < SPEC.get("wait_at", 0) <= step:
        wait_for_joiner()
        if max(current_session().generations.workers) < SPEC["num_workers"]:
            time.sleep(SPEC["step_s"])
    if SPEC.get("kills", {}).get(str(step)) == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    if SPEC.get("fail") == RANK and step == 2:
        raise ValueError("a mistake of the script")


def wait_for_joiner() -> None:
    deadline = time.monotonic() + WAIT_S
    while not (DIRECTORY / "joiner").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def add_random_numbers(network: nn.Sequential) -> None:
    """Between two steps, where they are the same on all workers."""
    with torch.no_grad():
        network[0].bias.add_(torch.rand(64), alpha=1e-3)


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SPEC.get("num_samples", 64), 16, generator=generator)
    dataset = TensorDataset(x, (x[:, 0] > 0).long())
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    model = elastic.DataParallel(network, optimizer, sums=SPEC.get("sums", "exact"))
    epochs = SPEC.get("epochs", 2)
    found = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    (DIRECTORY / f"variables-{RANK}.json").write_text(json.dumps(found))
    if SPEC["num_workers"] <= RANK:
        (DIRECTORY / "joiner").touch()
    if (loop := SPEC.get("loop", "steps")) != "steps":
        options = {"on_failure": "drop"} if loop == "drop" else {"batch_size": 32}
        sampler = elastic.Sampler(dataset, slot_size=8, seed=SEED, **options)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                strike(current_session().progress.samples.step)
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if sampler.is_step_done and loop == "plain":
                    add_random_numbers(network)
    else:
        sampler = elastic.Sampler(dataset, batch_size=32, slot_size=8, seed=SEED)
        for step in elastic.steps(sampler, epochs=epochs):
            for x, y in step:
                strike(step.number)
                loss = functional.cross_entropy(model(x), y)
                step.add_loss(loss)
                loss.backward()
            optimizer.step()
            add_random_numbers(network)
    print(f"worker {RANK} is at the end of {epochs} epochs")
    torch.save(network.state_dict(), DIRECTORY / f"weights-{RANK}.pt")


main()
