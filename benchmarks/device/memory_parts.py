"""Memory by mode of recomputation beside its prediction; equal bits of repeated runs; growing sequences."""

from __future__ import annotations

import gc
import time
from functools import partial

import torch

from benchmarks.device.our_steps import GIB, build_rank, peak_gib, reset_peak, synchronize, time_steps
from benchmarks.device.part_process import Part
from benchmarks.device.workloads import SMOKE, load_workload
from parallel3d.checkpoint.snapshot import take_snapshot
from parallel3d.config.derived import tokens_per_step
from parallel3d.config.schema import Config
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.models.make import make_stage
from parallel3d.rehearsal.meta_rank import LayeredRehearsal
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.step import train_step
from parallel3d.worker.device import init_device

NUM_LENGTHS = 20
LARGE = "hlat_7b"


def measure_memory(part: Part) -> None:
    """Peaks of 8 layers of 7B by mode and micro-batch; then whether the whole of it starts under the policy bf16."""
    for recompute in ("none", "selective", "full"):
        for size in (1, 4):
            overrides = [f"parallel.recompute={recompute}", f"batch.micro_batch_size={size}"]
            overrides += [f"batch.global_batch_size={size}", "model.num_hidden_layers=8"]
            report_peak(part, overrides)
    report_peak(part, ["precision.policy=bf16", "batch.micro_batch_size=1", "batch.global_batch_size=1"])


def report_peak(part: Part, overrides: list[str]) -> None:
    """Two steps: the measured peak beside the rehearsal's."""
    config = load_workload(LARGE, [*overrides, *(smoke(LARGE) if part.is_smoke else ())])
    predicted = round(LayeredRehearsal.of(config, make_stage).whole.peak_bytes / GIB, 2)
    reset_peak(part.device)
    try:
        rank = build_rank(config, part.device)
        started_gib = peak_gib(part.device)
        for _ in range(2):
            train_step(rank)
        synchronize(part.device)
        found: dict[str, object] = {"peak_gib": peak_gib(part.device), "peak_of_start_gib": started_gib}
    except RuntimeError as error:  # also torch's out of memory
        found = {"error": str(error)[:300]}
    part.write(overrides=overrides, predicted_gib=predicted, **found)
    rank = None  # noqa: F841 - its memory is wanted
    gc.collect()


def smoke(name: str) -> list[str]:
    """The tiny sizes, but not the batch."""
    return [override for override in SMOKE[name] if not override.startswith("batch.") or "sequence" in override]


def compare_runs(part: Part) -> None:
    """The bits of two equal runs with deterministic kernels and exact sums; the price of these kernels."""
    name = "gpt2_124m"
    config = load_workload(name, ("run.deterministic=true", *(SMOKE[name] if part.is_smoke else ())))
    init_device(part.device, deterministic=True)
    exact = config.model_copy(update={"precision": config.precision.model_copy(update={"sums": "exact"})})
    weights = [weights_after(exact, part, 3) for _ in range(2)]
    part.write(equal_bits=all(torch.equal(a, b) for a, b in zip(*weights)))
    for is_deterministic in (True, False):
        torch.use_deterministic_algorithms(is_deterministic)
        step = partial(train_step, build_rank(config, part.device))
        times = time_steps(step, part.device, num_tokens=tokens_per_step(config), num_steps=3, num_warmup=2)
        part.write(deterministic=is_deterministic, **times.to_json())


def weights_after(config: Config, part: Part, num_steps: int) -> list[torch.Tensor]:
    rank = build_rank(config, part.device)
    for _ in range(num_steps):
        train_step(rank)
    return [bucket.weights.cpu() for bucket in rank.optimizer.buckets]


def change_lengths(part: Part) -> None:
    """Forward and backward passes at 20 growing lengths: memory that is reserved but lost; then a snapshot."""
    name = "llama_1.26b"
    config = load_workload(name, SMOKE[name] if part.is_smoke else ())
    reset_peak(part.device)
    rank = build_rank(config, part.device)
    longest = config.batch.sequence_length
    for length in sorted({max(8, longest * number // NUM_LENGTHS // 8 * 8) for number in range(1, NUM_LENGTHS + 1)}):
        started = time.perf_counter()
        pass_once(rank, config, length)
        synchronize(part.device)
        part.write(length=length, ms=round(1e3 * (time.perf_counter() - started), 1), **reserved_gib(part.device))
    started = time.perf_counter()
    snapshot = take_snapshot(rank.optimizer, tp=rank.tp_shard)
    part.write(snapshot_s=round(time.perf_counter() - started, 2), gib=round(snapshot.num_bytes / GIB, 2))


def pass_once(rank: RankContext, config: Config, length: int) -> None:
    size = config.batch.micro_batch_size
    assert size is not None
    rank.optimizer.begin_iteration(1, 1)
    tokens = torch.randint(config.model.vocab_size, (size * length,), device=rank.device)
    micro_batch = MicroBatch(seed=1, iteration=1, slots=tuple(range(size)), sequence_length=length)
    rank.chunks[0](tokens, micro_batch, tokens).backward()


def reserved_gib(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    return {"peak_gib": round(allocated / GIB, 2), "reserved_gib": round(reserved / GIB, 2)}
