"""Compares the plan's step times with real runs on this machine: 16 layouts, each in several number formats.

    python benchmarks/plan_accuracy.py [--policies fp32,bf16,bf16_sr] [--rounds 2] [--out build/plan_accuracy.json]

The plan needs a row for a share of this machine's cores, with what kernels reach there (`rehearsal/device_rows.py`). It
is measured first, once for one process with all cores and once for two with half each, which run at the same time:

    products, attention    timed alone, at the layouts' shapes, on the libraries that a run chooses
    all-reduce             of two processes through shared memory, in two sizes
    elementwise kernels    what is left of a layer, from runs of 1 and 7 layers on one rank
    start of a kernel      the part of it that micro-batches of half the size have, too
    update, idle time      from the same runs with 1 and 8 micro-batches, the fastest of some of each

No layout of the table is among those runs. The rows are left in build/plan_accuracy/device-rows-POLICY.json, for
`parallel3d plan --devices 2xthis-machine-1-of-2 --device-table FILE`. Nothing else may run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.costs.layered_parameters import LayeredParameters
from parallel3d.costs.layout_estimate import estimate_layout
from parallel3d.costs.machines import Machines
from parallel3d.costs.rank_memory import MicroBatchSizes, estimate_memory
from parallel3d.costs.stage_work import layer_counts, update_seconds
from parallel3d.models.make import shardings_of
from parallel3d.monitor.run_folder import METRICS, read_metrics
from parallel3d.rehearsal.device_rows import DeviceRow, ReachedRates
from parallel3d.rehearsal.roofline import estimate_phase
from parallel3d.trainer.plans import split_layers

WARMUP_STEPS = 2
FEW, MANY = 1, 7
"""Layers of the runs from which a machine's row comes: what a layer takes is a difference of theirs."""
MICRO_BATCHES = 8
"""Of those runs, beside runs with one."""
MODEL = dict(vocab_size=4096, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8)
BATCH = dict(global_batch_size=8, micro_batch_size=2, sequence_length=256)
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "one process": {},
    "one process, micro-batch 1": {"batch.micro_batch_size": 1},
    "one process, recompute full": {"parallel.recompute": "full"},
    "one process, recompute selective": {"parallel.recompute": "selective"},
    "dp2": {"parallel.dp_size": 2},
    "dp2, ZeRO 0": {"parallel.dp_size": 2, "parallel.zero_stage": 0},
    "dp2, micro-batch 1": {"parallel.dp_size": 2, "batch.micro_batch_size": 1},
    "dp2, recompute full": {"parallel.dp_size": 2, "parallel.recompute": "full"},
    "tp2": {"parallel.tp_size": 2},
    "tp2 + SP": {"parallel.tp_size": 2, "parallel.sequence_parallel": True},
    "tp2, recompute full": {"parallel.tp_size": 2, "parallel.recompute": "full"},
    "tp2 + SP, micro-batch 4": {
        "parallel.tp_size": 2,
        "parallel.sequence_parallel": True,
        "batch.micro_batch_size": 4,
    },
    "pp2, 1F1B": {"parallel.pp_size": 2},
    "pp2, GPipe": {"parallel.pp_size": 2, "parallel.schedule": "gpipe"},
    "pp2, ZB-H1": {"parallel.pp_size": 2, "parallel.schedule": "zb-h1"},
    "pp2, interleaved": {"parallel.pp_size": 2, "parallel.schedule": "interleaved", "parallel.virtual_stages": 2},
}


@dataclass(frozen=True, kw_only=True)
class KernelRates:
    """What benchmarks/peers/plan_kernels.py prints."""

    product: float
    """FLOP/s."""
    attention: float
    attention_backward: float
    all_reduce: tuple[float, float]
    """Seconds of one of 64 KiB and one of 4 MiB; nan of one process."""


@dataclass(kw_only=True)
class Row:
    """One layout in one format."""

    layout: str
    policy: str
    planned_s: float
    measured_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return median(self.measured_s) / self.planned_s


def main() -> int:
    options = parse_arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    table: list[Row] = []
    for policy in options.policies.split(","):
        rows = [Row(layout=name, policy=policy, planned_s=0.0) for name in LAYOUTS]
        for number in range(options.rounds):
            devices = {count: measure_device(policy, count, options) for count in (1, 2)}
            rows_file = options.work / f"device-rows-{policy}.json"
            rows_file.write_text(json.dumps([asdict(device) for device in devices.values()], indent=1) + "\n")
            for row in rows:
                config = make_config(policy, LAYOUTS[row.layout], options)
                if not number:
                    row.planned_s = planned_step_s(config, devices)
                row.measured_s.append(run(config)[0])
                print(f"{policy:<9} {row.layout:<34} {row.planned_s:.3f} {row.measured_s[-1]:.3f}", flush=True)
        table += rows
    print("\n".join(describe(table)))
    if options.out:
        options.out.write_text(json.dumps([{**asdict(row), "ratio": row.ratio} for row in table], indent=1) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policies", default="fp32,bf16,bf16_sr")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--calibrations", type=int, default=3, help="runs of each of the machine's rows; the fastest counts"
    )
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--work", type=Path, default=ROOT / "build/plan_accuracy")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def describe(table: list[Row]) -> Iterator[str]:
    """Yields the table, and the largest and the median difference."""
    policies = list(dict.fromkeys(row.policy for row in table))
    found = {(row.layout, row.policy): row for row in table}
    yield "| layout | " + " | ".join(f"{policy}: planned, measured s, ratio" for policy in policies) + " |"
    yield "|---|" + "--:|" * len(policies)
    for layout in LAYOUTS:
        cells = (found[layout, policy] for policy in policies)
        figures = (f"{row.planned_s:.3f}, {median(row.measured_s):.3f}, {row.ratio:.2f}" for row in cells)
        yield f"| {layout} | {' | '.join(figures)} |"
    errors = sorted(abs(row.ratio - 1) for row in table)
    yield f"difference: median {median(errors):.1%}, largest {errors[-1]:.1%} of {len(errors)}"


# --- configurations and runs ------------------------------------------------------------------------------------------


def make_config(policy: str, changes: Mapping[str, Any], options: argparse.Namespace) -> Config:
    """The resolved configuration of a run in a folder of its own."""
    raw: dict[str, Any] = {
        "model": dict(MODEL),
        "parallel": {},
        "batch": dict(BATCH),
        "precision": {"policy": policy},
        "optimizer": {"learning_rate": 3e-4},
        "lr_schedule": {"kind": "constant"},
        "monitor": {"charts": False},
        "checkpoint": {"save_at_end": False},
        "run": {"directory": "", "num_steps": WARMUP_STEPS + options.steps, "evaluate_batches": 1, "device": "cpu"},
    }
    for name, value in changes.items():
        section, key = name.split(".")
        raw[section][key] = value
    num_ranks = raw["parallel"].get("dp_size", 1) * raw["parallel"].get("tp_size", 1)
    num_ranks *= raw["parallel"].get("pp_size", 1)
    raw["run"]["threads_per_rank"] = raw["run"].get("threads_per_rank") or options.cores // num_ranks
    raw["run"]["directory"] = str(options.work / f"run-{time.monotonic_ns()}")
    file = Path(raw["run"]["directory"]).with_suffix(".json")
    file.write_text(json.dumps(raw))
    return resolve(load_config(str(file), []), config_path=str(file))


def run(*runs: Config) -> list[float]:
    """Runs these at the same time; the median step of each, in seconds."""
    processes = []
    for config in runs:
        folder = Path(config.run.directory)
        command = [sys.executable, str(ROOT / "launch/train.py"), "--config", str(folder.with_suffix(".json"))]
        log = folder.with_suffix(".log").open("wb")
        processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT))
    codes = [process.wait(600) for process in processes]
    assert not any(codes), f"exit codes {codes}: see the logs in {Path(runs[0].run.directory).parent}"
    return [step_s(Path(config.run.directory)) for config in runs]


def step_s(folder: Path) -> float:
    lines = [line for line in read_metrics(folder / METRICS) if "event" not in line and line.get("step_s")]
    return median(line["step_s"] for line in lines[WARMUP_STEPS:])


def planned_step_s(config: Config, devices: Mapping[int, DeviceRow]) -> float:
    parallel = config.parallel
    num_ranks = (parallel.dp_size or 1) * parallel.tp_size * parallel.pp_size
    machines = Machines(device=devices[num_ranks], devices_per_host=num_ranks, num_hosts=1)
    return estimate_layout(config, parts_of(config), machines).step_s


def parts_of(config: Config) -> LayeredParameters:
    return LayeredParameters.of(shardings_of(config.model), config.model.num_hidden_layers)


# --- the machine's row ------------------------------------------------------------------------------------------------


def measure_device(policy: str, num_processes: int, options: argparse.Namespace) -> DeviceRow:
    """The row for one of `num_processes` equal shares of the cores, all of which are busy."""
    threads = options.cores // num_processes
    kernels = time_kernels(policy, num_processes, threads, options)
    sizes = (BATCH["micro_batch_size"] // 2, BATCH["micro_batch_size"])
    steps = {}
    for shape in product(sizes, (FEW, MANY), (1, MICRO_BATCHES)):
        times = []
        for _ in range(options.calibrations):
            alike = (small_config(policy, *shape, threads, options) for _ in range(num_processes))
            times.append(median(run(*alike)))
        steps[shape] = min(times)  # other work only slows a run, and rates come from differences of these
    row = DeviceRow(
        name=f"this-machine-{threads}-of-{options.cores}",
        memory_gib=1e3,
        bandwidth=1e10,
        link_bandwidth=link_bandwidth(kernels),
        bf16_tflops=kernels.product / 1e12,
        fp32_tflops=kernels.product / 1e12,
        is_cpu=True,
        rates=ReachedRates(
            wide_product=1.0,
            narrow_product=1.0,
            misaligned_factor=1.0,
            attention=kernels.attention / kernels.product,
            attention_backward=kernels.attention_backward / kernels.product,
            elementwise=1.0,
            update=1.0,
            collective=1.0,
            collective_start_s=kernels.all_reduce[0] / 2 if num_processes > 1 else 0.0,
            kernel_s=0.0,
            dispatch_s=0.0,
            launch_s=0.0,
            wait_s=0.0,
            step_idle_s=0.0,
        ),
    )
    small, large = (small_config(policy, size, FEW, 1, threads, options) for size in sizes)
    return solve(row, small, large, steps)


def small_config(policy: str, size: int, layers: int, count: int, threads: int, options: argparse.Namespace) -> Config:
    """One rank with `count` micro-batches of `size` sequences."""
    return make_config(
        policy,
        {
            "model.num_hidden_layers": layers,
            "batch.micro_batch_size": size,
            "batch.global_batch_size": count * size,
            "run.threads_per_rank": threads,
        },
        options,
    )


def solve(row: DeviceRow, small: Config, large: Config, steps: Mapping[tuple[int, int, int], float]) -> DeviceRow:
    """The row with the rates that the runs of one rank imply: seconds by size, layers and number of micro-batches."""
    rests, num_bytes, fixed = [], [], {}
    for config in (small, large):  # `fixed` and `both` stay those of the large one
        size = config.batch.micro_batch_size
        assert size is not None
        ones, all_s = ({layers: steps[size, layers, count] for layers in (FEW, MANY)} for count in (1, MICRO_BATCHES))
        batches = {layers: (all_s[layers] - ones[layers]) / (MICRO_BATCHES - 1) for layers in (FEW, MANY)}
        fixed = {layers: max(0.0, ones[layers] - batches[layers]) for layers in (FEW, MANY)}
        layer_s = (batches[MANY] - batches[FEW]) / (MANY - FEW)
        forward, backward = layer_counts(config, MicroBatchSizes.of(config, split_layers(config), on_device=False))
        both = forward + backward
        rests.append(max(0.05 * layer_s, layer_s - estimate_phase(both, replace(row, bandwidth=1e18)).device_s))
        num_bytes.append(both.elementwise_bytes)
    byte_s = max(0.05 * rests[1] / num_bytes[1], (rests[1] - rests[0]) / (num_bytes[1] - num_bytes[0]))
    byte_s = min(byte_s, rests[1] / num_bytes[1])
    bandwidth = 1 / byte_s
    dispatch_s = (rests[1] - byte_s * num_bytes[1]) / both.num_kernels
    [one] = estimate_memory(large, parts_of(large), on_device=False)
    unit_s = update_seconds(large, one.state, replace(row, bandwidth=1.0)) / one.state.updated_elements
    more = one.state.updated_elements - head_elements(large)
    update_s = max(0.0, (fixed[MANY] - fixed[FEW]) / ((MANY - FEW) * more))
    update_bandwidth = unit_s / update_s if update_s else 1e18
    idle_s = max(0.0, fixed[FEW] - update_s * one.state.updated_elements)
    rates = replace(row.rates, update=update_bandwidth / bandwidth, step_idle_s=idle_s, dispatch_s=dispatch_s)
    print(
        f"  {large.precision.policy}: products {row.bf16_tflops * 1e3:.0f} GFLOP/s, attention"
        f" {rates.attention:.2f} and {rates.attention_backward:.2f} of it, elementwise {bandwidth / 1e9:.1f} GB/s"
        f" and {dispatch_s * 1e6:.0f} us a kernel,"
        f" update {update_s * 1e9:.2f} ns an element, idle {idle_s * 1e3:.1f} ms,"
        f" links {row.link_bandwidth / 1e9:.1f} GB/s and {rates.collective_start_s * 1e6:.0f} us",
        flush=True,
    )
    return replace(row, bandwidth=bandwidth, rates=rates)


def head_elements(config: Config) -> int:
    """Parameters outside of the layers."""
    return 2 * config.model.vocab_size * config.model.hidden_size + config.model.hidden_size


def link_bandwidth(kernels: KernelRates) -> float:
    """Bytes/s of a ring's passes: an all-reduce of n bytes by two ranks is two of n / 2."""
    small, large = kernels.all_reduce
    return ((4 << 20) - (64 << 10)) / (large - small) if large > small else 1e18


def time_kernels(policy: str, num_processes: int, threads: int, options: argparse.Namespace) -> KernelRates:
    """Times products and attention in processes that run at the same time."""
    config = small_config(policy, BATCH["micro_batch_size"], FEW, MICRO_BATCHES, threads, options)
    file = Path(config.run.directory).with_suffix(".json")
    store = file.with_suffix(".store")
    command = [sys.executable, "-m", "benchmarks.peers.plan_kernels", str(file), str(store)]
    processes = [
        subprocess.Popen([*command, str(rank), str(num_processes)], stdout=subprocess.PIPE, cwd=ROOT, text=True)
        for rank in range(num_processes)
    ]
    outputs = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in processes]
    return KernelRates(**outputs[0])


if __name__ == "__main__":
    sys.exit(main())
