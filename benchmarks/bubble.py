"""Compares the planned and the measured bubble of each schedule on 4 stages, each a process of its own.

`python benchmarks/bubble.py [--unit-ms 40] [--micro-batches 8] [--steps 5] [--rounds 3]` trains with 1F1B, interleaved
1F1B (2 chunks a stage) and ZB-H1, and prints the bubbles in `metrics.jsonl`. A machine with fewer cores than stages
can't compute all stages at once, so stages sleep instead: a whole stage takes one unit for its forward pass, one for
its input's gradient and one for its weights' gradients. Everything else is real: processes, trainer, lists, sockets,
gloo, optimizer.

`--compute` trains the quickstart's model on 4 stages instead: for a machine with a core for each of them.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from torch import nn

from benchmarks.sleeping import HIDDEN, SleepingStage
from parallel3d.config.load import check_config, resolve
from parallel3d.config.schema import Config
from parallel3d.data.reader import LaneCursor, Reader, ReadResult
from parallel3d.elastic.launch import run_workers
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.elastic.settings import ElasticSettings
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.layers.gemm import Gemm
from parallel3d.monitor.run_folder import METRICS, RunFolder, read_metrics
from parallel3d.monitor.sinks import RunReporter
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.trainer.build import RunLanes, prepare_rank
from parallel3d.trainer.context import RankHooks
from parallel3d.trainer.plans import build_grid
from parallel3d.worker.hooks import WorkerHooks
from parallel3d.worker.main import train_rank

NUM_STAGES = 4
NUM_LAYERS = 8
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "interleaved, 2 chunks": {"schedule": "interleaved", "virtual_stages": 2},
    "zb-h1": {"schedule": "zb-h1"},
}
WARMUP_STEPS = 2


class NoText(Reader):
    """Lanes of zeros."""

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> ReadResult:
        return torch.zeros(num_tokens + 1, dtype=torch.int32).numpy(), cursor


def main() -> None:
    parser = argparse.ArgumentParser(description="The planned and the measured bubble of each schedule.")
    parser.add_argument(
        "--unit-ms", type=float, default=40.0, help="duration of a whole stage's forward pass of one micro-batch"
    )
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of an iteration")
    parser.add_argument("--steps", type=int, default=5, help="measured iterations of a run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each schedule, in turn")
    parser.add_argument("--compute", action="store_true", help="train the quickstart's model instead of sleeping")
    options = parser.parse_args()
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEDULES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for name, parallel in SCHEDULES.items():
                directory = Path(folder) / f"{parallel['schedule']}-{number}"
                run = train_quickstart if options.compute else train_sleeping
                run(directory, parallel, options)
                lines = [line for line in read_metrics(directory / METRICS) if "event" not in line]
                measured[name] += lines[WARMUP_STEPS:]
    print("| schedule | planned bubble | measured bubble (least, most) | step, ms |")
    print("|---|--:|--:|--:|")
    for name, lines in measured.items():
        bubbles, step_s = [line["bubble"] for line in lines], statistics.median(line["step_s"] for line in lines)
        print(
            f"| {name} | {lines[0]['planned_bubble']:.1%} | {statistics.median(bubbles):.1%} "
            f"({min(bubbles):.1%}, {max(bubbles):.1%}) | {1e3 * step_s:.0f} |"
        )


def train_sleeping(directory: Path, parallel: dict[str, Any], options: argparse.Namespace) -> None:
    """Runs sleeping stages, with `directory` as run folder."""
    config = sleeping_config(parallel, options.micro_batches, WARMUP_STEPS + options.steps)
    seconds = options.unit_ms / 1e3 / config.parallel.virtual_stages
    exit_code = run_workers(
        lambda context: work(config, seconds, context),
        world_size=NUM_STAGES,
        logs=directory / "logs",
        open_report=lambda: RunReporter(
            RunFolder(directory, config="{}", environment={}), title=directory.name, out=io.StringIO()
        ),
        preload=("torch",),
        elastic=ElasticSettings.from_config(config, build_grid(config)),
    )
    assert exit_code == 0, f"{directory.name} ended with exit code {exit_code}"


def sleeping_config(parallel: dict[str, Any], num_micro_batches: int, num_steps: int) -> Config:
    config = resolve(
        Config.model_validate(
            {
                "model": {
                    "vocab_size": 8,
                    "hidden_size": HIDDEN,
                    "intermediate_size": HIDDEN,
                    "num_hidden_layers": NUM_LAYERS,
                    "num_attention_heads": 1,
                },
                "parallel": {"pp_size": NUM_STAGES, **parallel},
                "batch": {"micro_batch_size": 1, "num_micro_batches": num_micro_batches, "sequence_length": 4},
                "optimizer": {"learning_rate": 1e-3},
                "run": {"num_steps": num_steps},
            }
        ),
        config_path="bubble.json",
        world_size=NUM_STAGES,
    )
    check_config(config)
    return config


def work(config: Config, seconds: float, context: WorkerContext) -> int:
    """Main function of a worker: the real trainer on stages that sleep."""
    torch.set_num_threads(1)
    grid = build_grid(config)
    context.control.publish({"kind": "hello", "coordinates": str(grid.coordinates(context.rank))})
    phase_hook = WorkerHooks(config, context)

    def make_chunk(
        config: Config, layers: range, tp: TensorParallel, device: torch.device, *, gemm: Gemm | None
    ) -> nn.Module:
        is_last = layers.stop == config.model.num_hidden_layers
        name = f"layers.{layers.start}.weight"
        return SleepingStage(name, is_first=layers.start == 0, is_last=is_last, seconds=seconds)

    rank = prepare_rank(
        config,
        context.rank,
        grid,
        make_stage=make_chunk,
        lanes=RunLanes(train=NoText()),
        device=torch.device("cpu"),
        hooks=RankHooks(on_instruction=phase_hook.on_instruction, phase_hook=phase_hook.enter_phase),
    )

    def start_watch(record: GenerationRecord) -> None:
        context.control.publish({"kind": "round_trip", "seconds": 0.0})

    train_rank(rank, context, phase_hook, on_generation=start_watch)
    return 0


def train_quickstart(directory: Path, parallel: dict[str, Any], options: argparse.Namespace) -> None:
    """Trains the quickstart's model on 4 stages, with `directory` as run folder."""
    changes = {
        "model.num_hidden_layers": NUM_LAYERS,
        "parallel.pp_size": NUM_STAGES,
        "parallel.dp_size": 1,
        "batch.global_batch_size": None,
        "batch.micro_batch_size": 2,
        "batch.num_micro_batches": options.micro_batches,
        "run.num_steps": WARMUP_STEPS + options.steps,
        "run.directory": str(directory),
        **{f"parallel.{name}": value for name, value in parallel.items()},
    }
    overrides = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    command = [sys.executable, "launch/train.py", "--config", "configs/quickstart.json", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
