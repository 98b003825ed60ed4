"""Writes a run's records to the terminal (a progress bar, or plain lines) and to the run folder.

A record is a dict with "kind" (or "event"):

    step        step, tokens, loss, grad_norm, lr, tokens_per_s, step_s, ...   becomes a line of metrics.jsonl
    evaluation  step, loss
    notice      text
    move        text, rank, coordinates: those that it had; part: what it builds now
    balance     text, step, slow: the replicas; step_share: planned time of a step, of that with the routes before
    membership  text, live, spare, lost: the workers from now on; places: those of the first grid; widths: of each stage
    diverged    step, reason, data
    restart     text, step: the run starts again, with all workers, after this step
    total       num_steps: the length of the bar; the sizes of a full batch
    summary     the run's figures, once, at its end
    outcome     exit_code: all workers have ended, and nothing but the last lines on the terminal is missing

Records with "event" go to metrics.jsonl unchanged.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from parallel3d.monitor.flops import describe_mfu
from parallel3d.monitor.history import MetricsLog
from parallel3d.monitor.page_writer import PageWriter
from parallel3d.monitor.progress_display import BarDisplay, PlainDisplay, ProgressDisplay
from parallel3d.monitor.run_folder import (
    CHARTS,
    CONFIG,
    ENVIRONMENT,
    LOGS,
    METRICS,
    PAGE,
    RESULTS,
    SUMMARY,
    TENSORBOARD,
    RunFolder,
    iterate_metrics,
    iterate_metrics_backwards,
    read_metrics,
)
from parallel3d.monitor.saved_notice import SavedNotice
from parallel3d.monitor.tensorboard import TensorBoardFile
from parallel3d.monitor.uptime import LastReported, RunHistory, recorded_preemptions

FLUSH_S = 30.0
"""Longest wait for the writing thread to write a record when the run ends or pauses."""
RECORDS_S = 2.0
"""Longest wait for it while the coordinator serves, which does nothing else meanwhile."""

SIZES = {"sequence_length": "seq", "num_sequences": "batch"}
"""Sizes of a step's batch in the records, and their labels in the bar."""

SUMMARY_LINES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("final_loss", "final loss", "{:.4f} nats per token".format),
    ("evaluation_loss", "evaluation loss", "{:.4f} nats per token".format),
    ("unigram_entropy", "unigram entropy", "{:.4f} nats per token".format),
    ("loss_ratio", "loss / unigram entropy", "{:.3f}".format),
    ("steps", "steps", "{:,}".format),
    ("tokens", "tokens", "{:,}".format),
    ("seconds", "seconds", "{:,.1f}".format),
    ("tokens_per_s", "tokens/s", "{:,.0f}".format),
    ("peak_tokens_per_s", "tokens/s of the fastest 10 steps", "{:,.0f}".format),
    ("evaluation_seconds", "seconds of evaluations", "{:,.1f}".format),
    ("mfu", "MFU", str),
    ("unstable_steps", "steps above 1.2 x lowest loss", "{:,}".format),
    ("largest_loss_ratio", "largest loss ratio", "{:.3f}".format),
    ("fraction_clipped", "updates with clipped gradient", "{:.1%}".format),
    ("bubble", "pipeline bubble", "{:.1%}".format),
    ("planned_bubble", "planned bubble", "{:.1%}".format),
    ("world", "workers", str),
    ("layout", "layout", str),
    ("restarts", "restarts", str),
    ("lost_steps", "steps lost by restarts", "{:,}".format),
    ("productive_s", "productive seconds", "{:,.1f}".format),
    ("wall_s", "wall-clock seconds", "{:,.1f}".format),
    ("uptime", "goodput (productive / wall)", "{:.2%}".format),
    ("state_bytes", "optimizer state per rank", lambda size: f"{size / 2**20:,.1f} MiB"),
)
RESTART_FIGURES = ("restarts", "lost_steps", "productive_s", "wall_s", "uptime")
"""Figures that are shown only after a restart."""


class RunReporter:
    """Takes records from any thread and writes them on its own thread, so that a slow disk delays no caller."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        title: str,
        charts: bool = True,
        tensorboard: bool = False,
        write_page: Callable[[Path], object] | None = None,
        page_every_s: float | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ):
        """`out` and `err`: by default this process's standard output and error at this moment."""
        self._folder = folder
        self._title = title
        self._charts = charts
        self._tensorboard = tensorboard
        self._page = PageWriter(folder.path, write_page, every_s=page_every_s) if write_page else None
        self._tensorboard_file: TensorBoardFile | None = None
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._display: ProgressDisplay = (BarDisplay if self._out.isatty() else PlainDisplay)(self._out)
        self._records: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._total: int | None = None
        self._full_sizes: dict[str, int] = {}
        """The sizes of a full batch."""
        self._workers = ""
        """Counts of live, spare and lost workers, once one is lost."""
        self._run_history = None if folder.is_continued else RunHistory(self._read_existing_lines())
        """None until it is asked for: the whole history of a long run takes seconds to read."""
        last = LastReported.of(self._read_existing_lines(iterate_metrics_backwards))
        self.last_step = last.step
        """The last step that was reported before this report began; 0 before the first."""
        self.last_evaluation = last.evaluation
        """The step before the last evaluation that was; -1 if it is none that may be reported again."""
        self._summary = last.summary if folder.is_continued else {}
        self._disk_works = True

    @property
    def run_history(self) -> RunHistory:
        """The account of the run so far; complete while the thread is paused."""
        if self._run_history is None:
            self._run_history = RunHistory(self._read_existing_lines())
        return self._run_history

    def recorded_preemptions(self) -> dict[str, set[int]]:
        """The workers of each host whose notice is recorded in the run folder."""
        return recorded_preemptions(self._read_existing_lines(iterate_metrics_backwards))

    def start(self) -> None:
        """Starts the writing thread, for the first time or after a pause; call it after all forks."""
        if self._thread is None:
            self._display.log(f"{self._title}: run folder {self._folder.path}")
            if self._folder.moved_to:
                self._display.log(f"an earlier run's files are now in {self._folder.moved_to}")
        self._thread = threading.Thread(target=self._write_all, name="run-report", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Writes all pending records and ends the thread, so that this process may fork."""
        if self._thread is not None and self._thread.is_alive():
            self._records.put(None)
            before = self._records.qsize() + 1
            while self._thread.is_alive() and (left := self._records.qsize()) < before:  # bounded
                before = left
                self._thread.join(FLUSH_S)

    def publish(self, record: dict[str, Any]) -> None:
        """Queues a record; never blocks."""
        self._records.put(record)

    def flush(self) -> None:
        """Waits until the thread has written all records, at most `RECORDS_S`."""
        if self._thread is not None and self._thread.is_alive():
            with self._records.all_tasks_done:
                self._records.all_tasks_done.wait_for(lambda: not self._records.unfinished_tasks, RECORDS_S)

    def close(self, message: str, *, exit_code: int) -> None:
        """Writes all pending records, the summary and the charts, and prints how the run ended. A file system that
        does not answer is given up after `FLUSH_S`."""
        self.pause()
        if self._thread is not None and self._thread.is_alive():  # in a call that may never return
            trouble = f"{self._folder.path} does not answer: the last lines and the summary are missing"
            print("\n".join(filter(None, (trouble, message))), file=self._err, flush=True)
            return
        self._records.put(None)
        self._write_all()  # records since the last pause
        self._display.close()
        if is_ours := not self._folder.is_taken:
            self._write_results(message, exit_code)
        self._try_write(self._folder.close)
        if self._tensorboard_file is not None:
            self._try_write(self._tensorboard_file.close)
        if message:
            print(message, file=self._err, flush=True)
        elsewhere = f"another process goes on with the run in {self._folder.path}"
        print(self._format_summary() if is_ours else elsewhere, file=self._out, flush=True)

    def _write_results(self, message: str, exit_code: int) -> None:
        """Writes what a run leaves at its end."""
        self._write_summary(message, exit_code)
        if self._charts:
            self._try_write(self._draw_charts)
        if self._page is not None and self.run_history.newest and (trouble := self._page.finish()):
            print(trouble, file=self._err, flush=True)

    def _write_summary(self, message: str, exit_code: int) -> None:
        newest = self.run_history.newest
        last = {"last_step": newest.get("step"), "last_loss": newest.get("loss")}
        self._summary |= self.run_history.figures()
        self._try_write(
            self._folder.write_summary, {"exit_code": exit_code, "message": message, **last, **self._summary}
        )

    def _write_all(self) -> None:
        while (record := self._records.get()) is not None:  # bounded: close() ends it
            self._write(record)
            self._records.task_done()
        self._records.task_done()

    def _write(self, record: dict[str, Any]) -> None:
        fields = {key: value for key, value in record.items() if key != "kind"}
        match record.get("kind"):
            case "step":
                if self._run_history is not None and self._run_history.awaits_first_step:
                    fields["time"] = round(time.time(), 3)  # how long the restart took (run_costs.py)
                self._append(fields)
                step_s = record.get("step_s", 0.0)
                text = "  ".join(part for part in (_step_text(record), self._shape_text(record), self._workers) if part)
                self._display.show(record["step"], self._total, text, step_s)
                if self._page is not None:
                    self._page.on_step()
            case "evaluation":
                self._display.log(f"step {record['step']}: evaluation loss {record['loss']:.4f}")
                self._append_event("evaluation", fields)
            case "notice" | "move" | "drain" | "balance" | "preemption" as kind:
                self._display.log(record["text"])
                self._append_event(kind, fields)
                if self._page is not None and SavedNotice.parse(record["text"]):
                    self._page.on_checkpoint()
            case "membership":
                self._display.log(record["text"])
                self._workers = _workers_text(record)
            case "diverged":
                self._append_event("diverged", fields)
            case "restart":
                self._display.log(record["text"])
                self._workers = ""
                self._try_write(self._folder.rewind, record["step"])
                self._append_event("restart", fields)
            case "total":
                self._total = record["num_steps"]
                self._full_sizes = {name: record[name] for name in SIZES if name in record}
            case "environment":
                self._try_write(self._folder.add_environment, fields)
            case "summary":
                self._summary = fields
                self._append_event("summary", fields)
            case "outcome" if record["exit_code"] == 0 and not self._folder.is_taken:  # else a restart may follow
                self._write_summary("", 0)
            case None:
                self._append_event(record["event"], fields)

    def _shape_text(self, record: dict[str, Any]) -> str:
        """The sizes that a warmup still keeps below their full values."""
        sizes = [(word, record.get(name), self._full_sizes.get(name)) for name, word in SIZES.items()]
        return "  ".join(f"{word} {now:,}/{full:,}" for word, now, full in sizes if now and full and now < full)

    def _append_event(self, event: str, fields: dict[str, Any]) -> None:
        self._append({"event": event, **fields, "time": round(time.time(), 3)})

    def _append(self, line: dict[str, Any]) -> None:
        """Adds a line to the account, metrics.jsonl and the TensorBoard file."""
        if self._run_history is not None:
            self._run_history.log(line)
        if self._tensorboard and self._tensorboard_file is None:
            self._try_write(self._open_tensorboard_file)
        self._try_write(self._append_metrics, line)
        if self._tensorboard_file is not None:
            self._try_write(self._tensorboard_file.add, line, time.time())

    def _append_metrics(self, line: dict[str, Any]) -> None:
        try:
            self._folder.append_metrics(line)
        except OSError:
            if self._run_history is None:  # it could not be read from metrics.jsonl any more
                self.run_history.log(line)
            raise

    def _open_tensorboard_file(self) -> None:
        """Opens it with the history that metrics.jsonl already holds, unless the process before has written one."""
        path, lines = self._folder.path, () if self._folder.is_continued else read_metrics(self._folder.path / METRICS)
        self._tensorboard_file = TensorBoardFile(path / TENSORBOARD, started_at=time.time(), history=lines)

    def _try_write(self, write: Callable[..., None], *arguments: Any) -> None:
        """Calls `write`. A full disk must not end the training: the first error is printed, later ones are ignored."""
        try:
            write(*arguments)
        except OSError as error:
            if self._disk_works:
                self._disk_works = False
                print(f"can't write into {self._folder.path} any more ({error.strerror})", file=self._err, flush=True)

    def _draw_charts(self) -> None:
        history = MetricsLog.of(read_metrics(self._folder.path / METRICS))
        if len(history.steps) > 1:
            from parallel3d.monitor.charts import draw_all  # matplotlib takes most of a second to import

            config = json.loads((self._folder.path / CONFIG).read_text())
            entropy = self._summary.get("unigram_entropy")
            draw_all(self._folder.path, history, title=self._title, config=config, entropy=entropy)

    def _format_summary(self) -> str:
        figures = dict(self._summary)
        if not figures.get("restarts"):
            figures = {key: value for key, value in figures.items() if key not in RESTART_FIGURES}
        if figures.get("mfu") is not None:
            peak = figures.get("peak_flops_per_s"), figures.get("peak_source")
            figures["mfu"] = describe_mfu(figures["mfu"], *peak)
        loss, entropy = figures.get("final_loss"), figures.get("unigram_entropy")
        if loss is not None and entropy:
            figures["loss_ratio"] = loss / entropy
        known = [(label, form(figures[key])) for key, label, form in SUMMARY_LINES if figures.get(key) is not None]
        width = max((len(label) for label, _ in known), default=0)
        lines = [f"  {label:<{width}}  {value}" for label, value in known]
        names = (METRICS, SUMMARY, RESULTS, *CHARTS, PAGE, CONFIG, ENVIRONMENT, LOGS)
        files = [name for name in names if self._exists(name)]
        return "\n".join([*lines, f"written to {self._folder.path}: {', '.join(files)}"])

    def _read_existing_lines(
        self, iterate: Callable[[Path], Iterator[dict[str, Any]]] = iterate_metrics
    ) -> Iterator[dict[str, Any]]:
        """Lines already in the folder: those of another process whose run this report continues."""
        with contextlib.suppress(OSError):
            yield from iterate(self._folder.path / METRICS)

    def _exists(self, name: str) -> bool:
        return (self._folder.path / name).exists()


def _step_text(record: dict[str, Any]) -> str:
    loss, speed = record.get("loss"), record.get("mean_tokens_per_s", record.get("tokens_per_s"))
    parts = [f"loss {loss:.4f}" if loss is not None else "", f"{speed:,.0f} tokens/s" if speed is not None else ""]
    return "  ".join(part for part in parts if part)


def _workers_text(record: dict[str, Any]) -> str:
    """Returns what the bar says of workers: nothing while each place of the first grid is taken, and no other.

    A stage may have grown while another one has lost a replica: as many are live then as at the beginning.
    """
    live, spare, lost = (record[name] for name in ("live", "spare", "lost"))
    widths = "/".join(map(str, record["widths"]))
    is_as_begun = live == record["places"] and not (spare or lost)
    return "" if is_as_begun else f"live {live} spare {spare} lost {lost} width {widths}"
