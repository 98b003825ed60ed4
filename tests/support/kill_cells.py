"""Kill matrix on gloo processes (layouts x ranks x phases, a real signal in each cell) and its runner.

`python -m tests.support.kill_cells FOLDER` runs the covering cells one after the other, `FOLDER all` all cells,
`FOLDER NAME ...` the named ones; the surviving ranks write their weights to FOLDER/<cell>/<rank>.pt. `make kill-matrix`
runs all cells and compares them with the undisturbed run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel3d.config.schema import Config
from parallel3d.elastic.launch import run_workers
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.elastic.settings import ElasticSettings
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.monitor.run_folder import METRICS, SUMMARY, RunFolder
from parallel3d.monitor.sinks import RunReporter
from parallel3d.trainer.context import RankHooks
from parallel3d.trainer.plans import build_grid
from parallel3d.worker.fault_injection import STEP_PHASES
from parallel3d.worker.hooks import WorkerHooks
from parallel3d.worker.main import train_rank
from tests.support.tiny_runs import make_config, prepare

NUM_STEPS = 4
PHASES = (*STEP_PHASES, "evaluate")
LAYOUTS = {
    "pp2-dp2-tp2": dict(pp_size=2, dp_size=2, tp_size=2, sequence_parallel=True),
    "pp3-dp2": dict(pp_size=3, dp_size=2),
    "pp2-dp4": dict(pp_size=2, dp_size=4),
}
SCHEDULES = {
    "pp2-dp2-interleaved": dict(pp_size=2, dp_size=2, schedule="interleaved", virtual_stages=2),
    "pp2-dp2-zb-h1": dict(pp_size=2, dp_size=2, schedule="zb-h1"),
}
"""Layouts of a few cells each: other lists, the same protocol."""
TIED = {"tied-pp2-dp2": dict(pp_size=2, dp_size=2), "tied-stages-3-1-2": dict(pp_size=3, stage_replicas=[3, 1, 2])}
"""One matrix on both ends of the pipeline."""
WARMUPS = {"warmup-pp2-dp2-tp2": LAYOUTS["pp2-dp2-tp2"]}
"""Steps of 2, 4, 6 and 8 sequences of 8, 12, 12 and 16 tokens."""
ALL_LAYOUTS = {**LAYOUTS, **SCHEDULES, **TIED, **WARMUPS}
LOSS_TOLERANCE = 1e-5
"""fp32 on another layout from the loss on: sums in another order."""


@dataclass(frozen=True, kw_only=True)
class KillCell:
    """One run with faults, each (rank, step, phase, kind).

    `num_changes` are the membership changes it may take; none: it can't be survived.
    """

    layout: str
    faults: tuple[tuple[int, int, str, str], ...]
    num_changes: tuple[int, ...] = (1,)

    @property
    def name(self) -> str:
        return "+".join([self.layout, *(f"{kind}-{rank}-{phase}-{step}" for rank, step, phase, kind in self.faults)])

    @property
    def config(self) -> Config:
        return kill_config(self.layout, self.faults)

    @property
    def dead(self) -> set[int]:
        return {rank for rank, _, _, kind in self.faults if kind != "term"}

    @property
    def survives(self) -> bool:
        return bool(self.num_changes)


def kill_config(layout: str, faults: tuple[tuple[int, int, str, str], ...] = ()) -> Config:
    """A tiny Llama in fp32; the undisturbed run without faults."""
    return make_config(
        model=dict(tie_word_embeddings=layout in TIED),
        parallel=ALL_LAYOUTS[layout],
        warmup=dict(
            sequence_length=dict(kind="linear", start=8, duration=4, multiple=4),
            batch_size=dict(start=2, duration=4, increment=2),
        )
        if layout in WARMUPS
        else {},
        precision=dict(policy="fp32"),
        batch=dict(global_batch_size=8, micro_batch_size=1, sequence_length=16),
        run=dict(num_steps=NUM_STEPS, evaluate_every=2, evaluate_batches=1, timeout_s=60.0),
        elastic=dict(faults=[dict(rank=r, step=s, phase=p, kind=k) for r, s, p, k in faults]),
    )


def single_kills() -> Iterator[KillCell]:
    """Every coordinate of every layout in every phase that it enters."""
    for layout in LAYOUTS:
        grid = build_grid(kill_config(layout))
        for rank in grid.ranks:
            for phase in phases_of(grid.coordinates(rank).pp):
                yield KillCell(layout=layout, faults=((rank, 2, phase, "kill"),))


def phases_of(stage: int) -> tuple[str, ...]:
    """Only the first stage loads text."""
    return PHASES if stage == 0 else tuple(phase for phase in PHASES if phase != "load")


def covering_cells() -> Iterator[KillCell]:
    """Every coordinate once, every phase at least twice, and the other ways to go."""
    for number, layout in enumerate(LAYOUTS):
        grid = build_grid(kill_config(layout))
        for rank in grid.ranks:
            phases = phases_of(grid.coordinates(rank).pp)
            yield KillCell(layout=layout, faults=((rank, 2, phases[(rank + 8 * (number > 0)) % len(phases)], "kill"),))
    yield from special_cells()


def special_cells() -> Iterator[KillCell]:
    """Hangs, departures, several at once, a second loss during recovery, down to one replica a stage, too many; and
    other schedules, losses on either end of a pipeline whose ends share a matrix, and while the batch still grows."""
    cube, wide, tied, uneven = "pp2-dp2-tp2", "pp2-dp4", *TIED
    yield every_kind()
    yield KillCell(layout=cube, faults=((0, 2, "load", "kill"), (1, 2, "load", "kill")), num_changes=(1, 2))
    yield KillCell(layout=cube, faults=((6, 4, "backward", "stop"),))
    yield KillCell(layout=wide, faults=((5, 4, "forward", "stop"),))
    yield KillCell(layout=cube, faults=((3, 2, "forward", "term"),))
    yield KillCell(layout=wide, faults=((0, 2, "backward", "kill"), (7, 2, "recovery_moves", "kill")))
    yield KillCell(layout=wide, faults=((6, 2, "update", "kill"), (1, 2, "recovery_confirm", "kill")))
    yield KillCell(
        layout=wide, faults=((4, 2, "all_reduce", "kill"), (0, 2, "recovery_groups", "kill")), num_changes=(2,)
    )
    yield KillCell(
        layout=wide,
        faults=(
            (0, 1, "forward", "kill"),
            (1, 2, "backup", "kill"),
            (3, 3, "all_gather", "kill"),
            (6, 4, "forward", "kill"),
        ),
        num_changes=(3, 4),
    )
    yield KillCell(layout=cube, faults=((0, 2, "backward", "kill"), (3, 2, "recovery_report", "kill")), num_changes=())
    yield KillCell(layout="pp2-dp2-interleaved", faults=((1, 2, "backward", "kill"),))
    yield KillCell(layout="pp2-dp2-zb-h1", faults=((2, 2, "forward", "kill"),))
    yield KillCell(layout=tied, faults=((2, 2, "all_gather", "kill"),))
    yield KillCell(layout=tied, faults=((1, 2, "reduce_scatter", "kill"), (2, 4, "update", "kill")), num_changes=(2,))
    yield KillCell(layout="warmup-pp2-dp2-tp2", faults=((5, 3, "backward", "kill"),))
    yield KillCell(layout=uneven, faults=((0, 2, "backup", "kill"), (5, 2, "recovery_moves", "kill")))


def every_kind() -> KillCell:
    """Each kind of loss once, one at each stage: a drain, a kill, a hang. One replica of each stage is left."""
    faults = ((5, 1, "forward", "term"), (2, 3, "backward", "kill"), (1, 4, "forward", "stop"))
    return KillCell(layout="pp3-dp2", faults=faults, num_changes=(2, 3))  # the drain may coincide with the kill


def work_on(config: Config, directory: Path, context: WorkerContext) -> int:
    """One worker: trains through all faults, and leaves its weights if it has a place at the end."""
    torch.set_num_threads(1)
    grid = build_grid(config)
    context.control.publish({"kind": "hello", "coordinates": str(grid.coordinates(context.rank))})
    phase_hook = WorkerHooks(config, context)
    watches = RankHooks(on_instruction=phase_hook.on_instruction, phase_hook=phase_hook.enter_phase)
    rank = prepare(config, grid, context.rank, hooks=watches)

    def start_watch(record: GenerationRecord) -> None:
        if record.previous is None:
            context.control.publish({"kind": "round_trip", "seconds": 0.0})

    if train_rank(rank, context, phase_hook, on_generation=start_watch):
        weights = {p.sharding.name: p.detach().clone() for b in rank.optimizer.buckets for p in b.parameters}
        torch.save({"coordinates": str(rank.coordinates), "weights": weights}, directory / f"{context.rank}.pt")
    return 0


def run_kill_cell(folder: Path, name: str, config: Config) -> int:
    """Runs one cell with a process for each rank; returns the run's exit code."""
    directory = folder / name
    return run_workers(
        lambda context: work_on(config, directory, context),
        world_size=len(build_grid(config).ranks),
        logs=directory / "logs",
        open_report=lambda: RunReporter(RunFolder(directory, config="{}", environment={}), title=name, charts=False),
        preload=("torch",),
        elastic=ElasticSettings.from_config(config, build_grid(config)),
    )


def losses_of(folder: Path) -> list[float]:
    """The loss of every step that a run has told, in order, none twice."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1)), "a step is missing, or told twice"
    return [line["loss"] for line in steps] + [line["loss"] for line in lines if line.get("event") == "evaluation"]


def describe_failure(folder: Path, cell: KillCell) -> str:
    """What is wrong with a cell that has run; "" when nothing is."""
    directory, undisturbed = folder / cell.name, folder / cell.layout
    summary = json.loads((directory / SUMMARY).read_text())
    lines = [json.loads(line) for line in (directory / METRICS).read_text().splitlines()]
    changes = [line for line in lines if line.get("event") == "membership"]
    if not cell.survives:
        return "" if summary["exit_code"] == 3 and "no replica left" in summary["message"] else f"ended with {summary}"
    if summary["exit_code"] != 0:
        return f"exit code {summary['exit_code']}: {summary['message']}"
    if len(changes) not in cell.num_changes:
        return f"{len(changes)} membership changes, not {cell.num_changes}"
    ours, theirs = losses_of(directory), losses_of(undisturbed)
    if len(ours) != len(theirs):
        return f"{len(ours)} losses, not {len(theirs)}"
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs))
    if worst > LOSS_TOLERANCE:
        return f"losses differ by {worst:.1e}"
    survivors = {int(path.stem) for path in directory.glob("*.pt")}
    if survivors & cell.dead or not survivors:
        return f"survivors {sorted(survivors)}"
    return _compare_replicas(directory, survivors)


def _compare_replicas(directory: Path, survivors: set[int]) -> str:
    """All ranks that are left and hold a parameter hold the same bits: of a stage, or of both ends."""
    seen: dict[tuple[str, str], torch.Tensor] = {}
    for rank in sorted(survivors):
        home = torch.load(directory / f"{rank}.pt")
        _, _, tp = home["coordinates"].split()
        for name, weight in home["weights"].items():
            if not torch.equal(seen.setdefault((tp, name), weight), weight):
                return f"{name} differs on rank {rank}"
    return ""


def run_cells(folder: Path, cells: list[KillCell]) -> None:
    for layout in dict.fromkeys(cell.layout for cell in cells):
        run_kill_cell(folder, layout, kill_config(layout))
    for cell in cells:
        run_kill_cell(folder, cell.name, cell.config)


def write_log(path: Path, folder: Path, cells: list[KillCell], seconds: float) -> int:
    """The verdict on every cell as a table; returns how many are wrong."""
    failures = {cell: describe_failure(folder, cell) for cell in cells}
    wrong = {cell: verdict for cell, verdict in failures.items() if verdict}
    rows = [
        f"| {cell.name} | {verdict or ('as undisturbed' if cell.survives else 'stopped, as it must')} |"
        for cell, verdict in failures.items()
    ]
    head = [
        "# The kill matrix on processes",
        "",
        f"`make kill-matrix`: {len(cells)} runs with real signals, {len(wrong)} wrong, {seconds:.0f} s. A run is named",
        "layout+kind-rank-phase-step. It is right when it ends with exit code 0, each step logged once, the losses of",
        f"all steps and evaluations within {LOSS_TOLERANCE:g} of the undisturbed run's (fp32), the number of",
        "membership changes as expected, and bitwise equal weights on all replicas that are left; or when it must",
        "stop, and does, with exit code 3 and the lost coordinates.",
        "",
        "| run | outcome |",
        "|---|---|",
    ]
    path.write_text("\n".join([*head, *rows]) + "\n")
    return len(wrong)


if __name__ == "__main__":
    results = Path(sys.argv[1])
    if sys.argv[2:] == ["all"]:
        everything = [*single_kills(), *special_cells()]
        started = time.monotonic()
        run_cells(results, everything)
        log = Path(__file__).parents[2] / "docs" / "logs" / "kill_matrix.md"
        sys.exit(min(1, write_log(log, results, everything, time.monotonic() - started)))
    wanted = sys.argv[2:]
    run_cells(results, [cell for cell in covering_cells() if not wanted or cell.name in wanted])
