"""Speed of the three workloads: ours in both forms of the kernels, and peers in the same visit."""

from __future__ import annotations

import gc
from functools import partial

from benchmarks.device import peer_loops
from benchmarks.device.our_steps import StepTimes, build_rank, peak_gib, reset_peak, time_steps
from benchmarks.device.part_process import Part
from benchmarks.device.profile_parts import row_of
from benchmarks.device.workloads import SMOKE, load_workload
from parallel3d.config.derived import tokens_per_step
from parallel3d.config.schema import Config
from parallel3d.models.make import make_stage
from parallel3d.rehearsal.config_estimate import estimate_on
from parallel3d.rehearsal.meta_rank import LayeredRehearsal
from parallel3d.trainer.step import train_step

PEERS_SUFFIX = "_peers"


def ours(part: Part) -> None:
    """Ours with Triton's kernels, then with torch's; 7B also with half the micro-batch."""
    variants: list[tuple[str, ...]] = [("run.kernels=auto",), ("run.kernels=torch",)]
    if part.name == "hlat_7b":
        variants.insert(1, ("run.kernels=auto", "batch.micro_batch_size=2", "batch.global_batch_size=2"))
    for overrides in variants:
        config = load_workload(part.name, (*overrides, *(SMOKE[part.name] if part.is_smoke else ())))
        try:
            times, peak = time_ours(part, config)
        except Exception as error:  # noqa: BLE001 - out of memory, or a kernel's compiler: the other form comes next
            part.write(
                contestant="parallel3d", overrides=overrides, error=f"{type(error).__name__}: {str(error)[:300]}"
            )
            continue
        found = {**times.to_json(), "peak_gib": peak, **predicted(part, config, times)}
        part.write(contestant="parallel3d", overrides=overrides, **found)


def predicted(part: Part, config: Config, times: StepTimes) -> dict[str, object]:
    """The rehearsal's figures for the device, and the measured speed as a share of its."""
    estimate = estimate_on(config, LayeredRehearsal.of(config, make_stage).whole, row_of(part.device))
    return {
        "predicted_tokens_per_s": round(estimate.tokens_per_s, 1),
        "predicted_gib": round(estimate.peak_gib, 2),
        "measured_of_predicted": round(times.tokens_per_s / estimate.tokens_per_s, 3),
    }


def time_ours(part: Part, config: Config) -> tuple[StepTimes, float | None]:
    """A run's steps and its peak; the run's memory is free again afterwards."""
    reset_peak(part.device)
    step = partial(train_step, build_rank(config, part.device))
    times = time_steps(step, part.device, num_tokens=tokens_per_step(config), **counts(part))
    peak = peak_gib(part.device)
    del step
    gc.collect()
    return times, peak


def peers(part: Part) -> None:
    """Those that can be imported, on the workload of the part's name."""
    name = part.name.removesuffix(PEERS_SUFFIX)
    config = load_workload(name, SMOKE[name] if part.is_smoke else ())
    for contestant in peer_loops.PEERS[name]:
        reset_peak(part.device)
        try:
            size, step = contestant(config, part.device, part.is_smoke)
            num_tokens = size * config.batch.sequence_length
            times = time_steps(step, part.device, num_tokens=num_tokens, **counts(part))
        except Exception as error:  # noqa: BLE001 - not there, of another version, out of memory: said, and gone on
            part.write(contestant=contestant.__name__, error=describe(error))
            continue
        part.write(
            contestant=contestant.__name__, micro_batch_size=size, peak_gib=peak_gib(part.device), **times.to_json()
        )
        del step
        gc.collect()


def counts(part: Part) -> dict[str, int]:
    """Warmup includes what compiles."""
    return {"num_steps": 1, "num_warmup": 1} if part.is_smoke else {"num_steps": 8, "num_warmup": 4}


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
