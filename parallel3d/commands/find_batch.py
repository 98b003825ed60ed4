"""Finds the largest micro-batch that fits: `python launch/find_batch.py --config FILE [section.field=value ...]`.

Each size is tried by a short run of the configured layout in processes of its own, without evaluations and checkpoints:
three steps, because the first may pass and a later one fail. A run fails where an allocator has no memory on any rank
(exit code 8, parallel3d/errors.py), or where a rank grows above the limit; any other error ends the search. Sizes are
doubled until one fails, then bisected (parallel3d/costs/batch_search.py). All stages run together, so the answer is the
least of the stages'. The peaks of each are fitted by a line and compared with `plan`'s estimate
(parallel3d/commands/batch_memory.py). Exit codes: 0 found, 1 not even a micro-batch of 1 fits, 2 invalid input, 130
stopped.

Source: the blog on GPT-2 163M, `--find-max-microbatch-size`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from math import ceil
from pathlib import Path

from parallel3d.child_process import command_line
from parallel3d.commands.batch_memory import TriedBatch, describe_refusal, describe_stages
from parallel3d.commands.parsers import parse
from parallel3d.commands.short_runs import short_run_fields
from parallel3d.config.derived import batch_sizes, world_size
from parallel3d.config.load import dump_config, load_config, resolve
from parallel3d.config.schema import CheckpointConfig, Config
from parallel3d.config.sections.warmup import WarmupConfig
from parallel3d.costs.batch_search import largest_divisor, largest_that_fits
from parallel3d.costs.layered_parameters import LayeredParameters
from parallel3d.costs.rank_memory import estimate_memory
from parallel3d.errors import EXIT_OUT_OF_MEMORY, ConfigError, UserError
from parallel3d.models.make import shardings_of
from parallel3d.monitor.child_memory import available_bytes, peaks_of_workers
from parallel3d.monitor.run_folder import METRICS, read_metrics
from parallel3d.parallel.grid import Grid
from parallel3d.rehearsal.device_rows import GIB
from parallel3d.trainer.plans import build_grid
from parallel3d.worker.device import choose_device

POLL_S = 0.02
SHARE = 0.9
"""Of the memory that is available on a machine whose ranks have no limit."""
NUM_TAIL_LINES = 12
ANSWER = "answer.json"


def main(arguments: list[str]) -> int:
    options = parse("find-batch", arguments)
    try:
        config = resolve(load_config(options.config, options.overrides), config_path=options.config)
        out = options.out or Path(f"runs/{Path(options.config).stem}-batch")
        search = BatchSearch(config, out, limit=options.limit, num_steps=options.steps)
        most = options.most or search.most
        print_line(search.describe(most))
        largest = largest_that_fits(search.fits, most)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print_line("stopped")
        return 130
    for line in search.describe_memory():
        print_line(line)
    if not largest:
        print(search.describe_refusal(), file=sys.stderr)
        return 1
    for line in search.answer(largest):
        print_line(line)
    return 0


class BatchSearch:
    """Runs the short runs of one search, with their logs in `out`."""

    def __init__(self, config: Config, out: Path, *, limit: int | None, num_steps: int):
        """limit: bytes of one rank. Raises UserError where no limit is known."""
        self.runs: list[TriedBatch] = []
        self._config = config
        self._out = out
        self._num_steps = num_steps
        self._on_gpu = choose_device(config, 0, len(self._grid.ranks)).type == "cuda"
        self._limit = limit or (None if self._on_gpu else self._share_of_machine())
        out.mkdir(parents=True, exist_ok=True)

    @property
    def most(self) -> int:
        """The largest micro-batch with which every replica still has one."""
        total, _, _ = batch_sizes(self._config.batch)
        return total // self._num_replicas

    def describe(self, most: int) -> str:
        limit = f"{self._limit / GIB:.2f} GiB a rank" if self._limit else "the device's memory"
        return (
            f"micro-batches of 1 to {most} of {self._config.batch.sequence_length} tokens on {self._num_ranks} ranks,"
            f" {self._num_steps} steps each; limit: {limit}; logs in {self._out}"
        )

    def fits(self, micro_batch_size: int) -> bool:
        """Tries this micro-batch; raises UserError where the run fails for another reason than memory."""
        started = time.monotonic()
        run = self._try(micro_batch_size)
        self.runs.append(run)
        rank = "" if run.rank is None else f" on rank {run.rank}"
        what = "fits" if run.fits else "does not fit"
        speed = "" if run.tokens_per_s is None else f", {run.tokens_per_s:,.0f} tokens/s"
        seconds = time.monotonic() - started
        print_line(
            f"  micro-batch {run.micro_batch_size:>4}: {what}, peak {run.peak_bytes / GIB:.2f} GiB{rank}{speed}"
            f" ({seconds:.0f} s)"
        )
        return run.fits

    def describe_memory(self) -> Iterator[str]:
        """Yields the fitted line of each stage, and `plan`'s estimate beside it."""
        planned = {run.micro_batch_size: self._planned_bytes(run.micro_batch_size) for run in self.runs if run.fits}
        yield from describe_stages(self.runs, planned, self._limit, on_device=self._on_gpu)

    def describe_refusal(self) -> str:
        run = self.runs[-1]
        stage = None if run.rank is None else self._grid.coordinates(run.rank).pp
        return describe_refusal(run, stage, self._limit, f"{self._folder_of(run.micro_batch_size)}.log")

    def answer(self, largest: int) -> Iterator[str]:
        """Yields what to do with the answer, and writes it to a file."""
        total, _, _ = batch_sizes(self._config.batch)
        usable = largest_divisor(total // self._num_replicas, largest)
        while usable > 1 and self._changed(usable, total) is None:
            usable = largest_divisor(total // self._num_replicas, usable - 1)
        overrides = [
            f"batch.micro_batch_size={usable}",
            f"batch.global_batch_size={total}",
            "batch.num_micro_batches=null",
        ]
        record = {
            "largest_micro_batch_size": largest,
            "overrides": overrides,
            "batch": {"micro_batch_size": usable, "global_batch_size": total},
            "limit_bytes": self._limit,
            "runs": [asdict(run) for run in self.runs],
        }
        (self._out / ANSWER).write_text(json.dumps(record, indent=2) + "\n")
        yield f"the largest micro-batch that fits: {largest}"
        if usable != largest:
            yield f"the largest that divides the global batch of {total} for {self._num_replicas} replicas: {usable}"
        yield f"add to the command line, or to the configuration ({self._out / ANSWER} has it too):"
        yield f"  {' '.join(overrides)}"

    # --- a short run --------------------------------------------------------------------------------------------------

    def _try(self, micro_batch_size: int) -> TriedBatch:
        folder = self._folder_of(micro_batch_size)
        shutil.rmtree(folder, ignore_errors=True)
        file, log = folder.with_suffix(".json"), folder.with_suffix(".log")
        file.write_text(dump_config(self._short_config(micro_batch_size, folder)))
        with log.open("wb") as output:
            command = command_line("train", "--config", str(file))
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                code, peaks = self._watch(process)
            except KeyboardInterrupt:
                process.wait()  # bounded: Ctrl-C reaches the run, too, and ends it after its step
                raise
        if code not in (0, EXIT_OUT_OF_MEMORY, None):
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-NUM_TAIL_LINES:])
            raise UserError(
                f"the short run with micro-batch {micro_batch_size} failed with code {code} ({log}):\n{tail}"
            )
        steps = [line for line in read_metrics(folder / METRICS) if "tokens_per_s" in line] if code == 0 else []
        rank = max(peaks, key=lambda each: peaks[each], default=None)
        peak = 0 if rank is None else peaks[rank]
        if self._on_gpu or rank is None:
            rank, peak = None, max((int(step["memory_bytes"]) for step in steps), default=0)
        stages = (peak,) if rank is None else tuple(self._peak_of(stage, peaks) for stage in range(self._grid.pp_size))
        shutil.rmtree(folder, ignore_errors=True)
        return TriedBatch(
            micro_batch_size=micro_batch_size,
            fits=code == 0 and (self._limit is None or peak <= self._limit),
            peak_bytes=peak,
            rank=rank,
            stage_peaks=stages,
            tokens_per_s=float(steps[-1]["tokens_per_s"]) if steps else None,
        )

    def _watch(self, process: subprocess.Popen[bytes]) -> tuple[int | None, dict[int, int]]:
        """Waits for the run; returns its exit code, None if it grew above the limit and was killed, and each rank's
        peak."""
        peaks: dict[int, int] = {}
        while (code := process.poll()) is None:
            for rank, peak in peaks_of_workers(process.pid).items():
                peaks[rank] = max(peak, peaks.get(rank, 0))
            if not self._on_gpu and self._limit and max(peaks.values(), default=0) > self._limit:
                process.kill()  # its processes end with it
                process.wait()  # bounded: it was killed
                return None, peaks
            time.sleep(POLL_S)
        return code, peaks

    def _peak_of(self, stage: int, peaks: Mapping[int, int]) -> int:
        """The largest of the peaks of a stage's ranks."""
        return max((peaks.get(rank, 0) for ranks in self._grid.stages[stage].values() for rank in ranks), default=0)

    def _folder_of(self, micro_batch_size: int) -> Path:
        return self._out / f"micro-batch-{micro_batch_size}"

    def _short_config(self, micro_batch_size: int, folder: Path) -> Config:
        count = self._num_micro_batches(micro_batch_size)
        config = self._changed(micro_batch_size, micro_batch_size * count, count)
        if config is None:
            raise UserError(f"a micro-batch of {micro_batch_size} breaks a rule of the configuration")
        checkpoint = CheckpointConfig(save_at_end=False, directory=str(folder / "checkpoints"))
        fields = short_run_fields(config, folder, num_steps=self._num_steps, checkpoint=checkpoint)
        return resolve(Config.model_validate(fields), config_path="")

    def _changed(self, micro_batch_size: int, total: int, count: int | None = None) -> Config | None:
        """The configuration with these sizes and without a warmup of sizes; None if a rule forbids it."""
        fields = self._config.model_dump()
        fields["batch"] |= {
            "micro_batch_size": micro_batch_size,
            "global_batch_size": total,
            "num_micro_batches": count,
        }
        fields["warmup"] = WarmupConfig().model_dump()
        try:
            return resolve(Config.model_validate(fields), config_path="")
        except ConfigError:
            return None

    # --- the layout ---------------------------------------------------------------------------------------------------

    @property
    def _num_ranks(self) -> int:
        return world_size(self._config)

    @property
    def _num_replicas(self) -> int:
        parallel = self._config.parallel
        return max(parallel.stage_replicas or [parallel.dp_size or 1])

    def _num_micro_batches(self, micro_batch_size: int) -> int:
        """Enough that every stage holds as many sequences as with any smaller micro-batch that makes the configured
        global batch; the second of a replica differs from its first."""
        parallel, (total, _, _) = self._config.parallel, batch_sizes(self._config.batch)
        filled = 2 * parallel.pp_size * parallel.virtual_stages
        return self._num_replicas * min(filled, ceil(total / (micro_batch_size * self._num_replicas)))

    def _share_of_machine(self) -> int:
        available = available_bytes()
        if available is None:
            raise UserError("this system does not say how much memory is available: give --limit GIB")
        return int(SHARE * available) // self._num_ranks

    @cached_property
    def _parts(self) -> LayeredParameters:
        return LayeredParameters.of(shardings_of(self._config.model), self._config.model.num_hidden_layers)

    @cached_property
    def _grid(self) -> Grid:
        return build_grid(self._config)

    def _planned_bytes(self, micro_batch_size: int) -> tuple[int, ...]:
        """Bytes of a rank of each stage, by the plan."""
        count = self._num_micro_batches(micro_batch_size)
        config = self._changed(micro_batch_size, micro_batch_size * count, count)
        assert config is not None
        return tuple(each.total for each in estimate_memory(config, self._parts, on_device=self._on_gpu))


def print_line(text: str) -> None:
    print(text, flush=True)
