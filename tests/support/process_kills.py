"""The kill matrix on gloo processes, with a real signal in each cell, and its runner.

`python -m tests.support.process_kills FOLDER` runs the covering cells one after the other, `FOLDER all` all cells,
`FOLDER NAME ...` the named ones; the surviving ranks write their weights to FOLDER/<cell>/<rank>.pt. `make kill-matrix`
runs all cells and compares them with the undisturbed run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from parallel3d.config.schema import Config, FaultConfig
from parallel3d.elastic.launch import run_workers
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.elastic.settings import ElasticSettings
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.monitor.run_folder import METRICS, SUMMARY, RunFolder
from parallel3d.monitor.sinks import RunReporter
from parallel3d.trainer.context import RankHooks
from parallel3d.trainer.plans import build_grid
from parallel3d.worker.hooks import WorkerHooks
from parallel3d.worker.main import train_rank
from tests.support.kill_cells import KillCell, Outcome, kill_fault, possible_outcomes
from tests.support.kill_layouts import KILL_LAYOUTS, phases_of
from tests.support.tiny_runs import make_config, prepare

NUM_STEPS = 4
CUBE, LONG, WIDE = LAYOUTS = ("pp2-dp2-tp2-sp", "pp3-dp2", "pp2-dp4")
LOSS_TOLERANCE = 1e-5
"""fp32 on another layout from the loss on: sums in another order."""


def kill_config(layout: str, faults: Sequence[FaultConfig] = ()) -> Config:
    """A tiny Llama in fp32 on a row's layout; without faults the undisturbed run."""
    row = KILL_LAYOUTS[layout]
    return make_config(
        model=row.model,
        parallel=row.parallel,
        warmup=row.warmup,
        precision=dict(policy="fp32"),
        batch=dict(global_batch_size=8, micro_batch_size=1, sequence_length=16),
        run=dict(num_steps=NUM_STEPS, evaluate_every=2, evaluate_batches=1, timeout_s=300.0, exchange=row.exchange),
        elastic=dict(faults=[fault.model_dump() for fault in faults], max_rejoins=0),
    )


def single_kills() -> Iterator[KillCell]:
    """Every coordinate of every layout in every phase that it enters."""
    for layout in LAYOUTS:
        grid = build_grid(kill_config(layout))
        for rank in grid.ranks:
            yield from (kill_cell(layout, (rank, 2, phase, "kill")) for phase in phases_of(grid, rank))


def covering_cells() -> Iterator[KillCell]:
    """Every coordinate once, every phase at least twice, and the special cells."""
    for number, layout in enumerate(LAYOUTS):
        grid = build_grid(kill_config(layout))
        for rank in grid.ranks:
            phases = phases_of(grid, rank)
            shift = 8 if number > 0 else 0
            yield kill_cell(layout, (rank, 2, phases[(rank + shift) % len(phases)], "kill"))
    yield from special_cells()


def kill_cell(layout: str, *faults: tuple[int, int, str, str]) -> KillCell:
    """A cell of faults (rank, step, phase, kind)."""
    return KillCell(
        layout=layout,
        faults=tuple(kill_fault(rank, phase, step, kind) for rank, step, phase, kind in faults),
        num_steps=NUM_STEPS,
    )


def special_cells() -> Iterator[KillCell]:
    """Hangs, drains, several deaths at once, a second loss during recovery, down to one replica a stage, too many
    losses; other schedules, one stage, losses on either end of a pipeline whose ends share a matrix, and while batches
    grow."""
    yield EVERY_KIND
    yield kill_cell(CUBE, (0, 2, "load", "kill"), (1, 2, "load", "kill"))
    yield kill_cell(CUBE, (6, 4, "backward", "stop"))
    yield kill_cell(WIDE, (5, 4, "forward", "stop"))
    yield kill_cell(CUBE, (3, 2, "forward", "term"))
    yield kill_cell(WIDE, (0, 2, "backward", "kill"), (7, 2, "recovery_moves", "kill"))
    yield kill_cell(WIDE, (6, 2, "update", "kill"), (1, 2, "recovery_confirm", "kill"))
    yield kill_cell(WIDE, (4, 2, "all_reduce", "kill"), (0, 2, "recovery_groups", "kill"))
    yield DOWN_TO_ONE
    yield kill_cell(CUBE, (0, 2, "backward", "kill"), (3, 2, "recovery_report", "kill"))  # 2 and 1 become a replica
    yield kill_cell(CUBE, (0, 2, "backward", "kill"), (2, 2, "recovery_report", "kill"))  # nobody has tp0 of stage 0
    yield kill_cell("pp2-dp2-interleaved", (1, 2, "backward", "kill"))
    yield kill_cell("pp2-dp2-zb-h1", (2, 2, "forward", "kill"))
    yield kill_cell("tied-pp2-dp2", (2, 2, "all_gather", "kill"))
    yield kill_cell("tied-pp2-dp2", (1, 2, "reduce_scatter", "kill"), (2, 4, "update", "kill"))
    yield kill_cell("warmup-pp2-dp2-tp2", (5, 3, "backward", "kill"))
    yield kill_cell("dp4", (1, 2, "reduce_scatter", "kill"), (3, 4, "all_gather", "kill"))
    yield kill_cell("dp4", (0, 2, "backward", "stop"))
    yield kill_cell("gloo-dp4", (1, 2, "backup", "kill"), (3, 4, "all_gather", "kill"))
    yield kill_cell("gloo-pp2-dp2", (2, 2, "reduce_scatter", "kill"), (1, 4, "update", "kill"))
    yield kill_cell("dp3-tp2", (4, 2, "all_gather", "kill"), (1, 4, "update", "kill"))
    yield kill_cell("tied-stages-3-1-2", (0, 2, "backup", "kill"), (5, 2, "recovery_moves", "kill"))


DOWN_TO_ONE = kill_cell(
    WIDE, (0, 1, "forward", "kill"), (1, 2, "backup", "kill"), (3, 3, "all_gather", "kill"), (6, 4, "forward", "kill")
)


EVERY_KIND = kill_cell(LONG, (5, 1, "forward", "term"), (2, 3, "backward", "kill"), (1, 4, "forward", "stop"))
"""A drain, a kill and a hang, one at each stage; one replica of each stage is left."""


def outcomes_of(cell: KillCell) -> set[Outcome]:
    """The allowed outcomes. A death after a step's entry may be found with one in the next step: a change less."""
    found = possible_outcomes(kill_config(cell.layout), cell.faults)
    if cell == DOWN_TO_ONE:
        found |= {replace(outcome, num_changes=outcome.num_changes - 1) for outcome in found}
    return found


def survives(cell: KillCell) -> bool:
    return any(outcome.goes_on for outcome in outcomes_of(cell))


class HooksWithDrains(WorkerHooks):
    """Hooks under which a rank that asks to leave trains on once the coordinator has asked it to: that takes a quarter
    of a second, for which drains are gathered, and these runs may be over by then."""

    def __init__(self, config: Config, context: WorkerContext):
        super().__init__(config, context)
        self._control = context.control

    def _fail(self, kind: str) -> None:
        super()._fail(kind)
        while kind == "term" and not self._control.drain_requested:
            self._control.token.sleep(0.01)


def work_on(config: Config, directory: Path, context: WorkerContext) -> int:
    """Runs one worker: it trains through all faults and saves its weights if it holds coordinates at the end."""
    torch.set_num_threads(1)
    grid = build_grid(config)
    context.control.publish({"kind": "hello", "coordinates": str(grid.coordinates(context.rank))})
    phase_hook = HooksWithDrains(config, context)
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
    """The losses of all steps, in order, each logged once, followed by those of the evaluations."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1)), "a step is missing, or logged twice"
    return [line["loss"] for line in steps] + [line["loss"] for line in lines if line.get("event") == "evaluation"]


def describe_failure(folder: Path, cell: KillCell) -> str:
    """Why a cell that has run is wrong; "" if it is right."""
    directory, undisturbed = folder / cell.name, folder / cell.layout
    summary = json.loads((directory / SUMMARY).read_text())
    lines = [json.loads(line) for line in (directory / METRICS).read_text().splitlines()]
    changes = [line for line in lines if line.get("event") == "membership"]
    if not survives(cell):
        return "" if summary["exit_code"] == 3 and "no replica left" in summary["message"] else f"ended with {summary}"
    if summary["exit_code"] != 0:
        return f"exit code {summary['exit_code']}: {summary['message']}"
    if len(changes) not in (allowed := {outcome.num_changes for outcome in outcomes_of(cell)}):
        return f"{len(changes)} membership changes, not {allowed}"
    ours, theirs = losses_of(directory), losses_of(undisturbed)
    if len(ours) != len(theirs):
        return f"{len(ours)} losses, not {len(theirs)}"
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs))
    if worst > LOSS_TOLERANCE:
        return f"losses differ by {worst:.1e}"
    survivors = {int(path.stem) for path in directory.glob("*.pt")}
    if survivors & {fault.rank for fault in cell.faults} or not survivors:
        return f"survivors {sorted(survivors)}"
    return _compare_replicas(directory, survivors)


def _compare_replicas(directory: Path, survivors: set[int]) -> str:
    """Compares, bit for bit, a parameter on all ranks that are left and hold it: those of a stage, or of both ends."""
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
        run_kill_cell(folder, cell.name, kill_config(cell.layout, cell.faults))


def write_log(path: Path, folder: Path, cells: list[KillCell], seconds: float) -> int:
    """Writes the result of every cell as a table; returns the number of wrong ones."""
    failures = {cell: describe_failure(folder, cell) for cell in cells}
    num_wrong = sum(bool(failure) for failure in failures.values())
    rows = [
        f"| {cell.name} | {failure or ('as undisturbed' if survives(cell) else 'stopped, as it must')} |"
        for cell, failure in failures.items()
    ]
    head = [
        "# The kill matrix on processes",
        "",
        f"`make kill-matrix`: {len(cells)} runs with real signals, {num_wrong} wrong, {seconds:.0f} s. A run is named",
        "layout+kind-rank-phase-step. It is right when it ends with exit code 0, each step logged once, the losses of",
        f"all steps and evaluations within {LOSS_TOLERANCE:g} of the undisturbed run's (fp32), the number of",
        "membership changes as expected, and bitwise equal weights on all replicas that are left; or when it must",
        "stop, and does, with exit code 3 and the lost coordinates.",
        "",
        "| run | outcome |",
        "|---|---|",
    ]
    path.write_text("\n".join([*head, *rows]) + "\n")
    return num_wrong


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
