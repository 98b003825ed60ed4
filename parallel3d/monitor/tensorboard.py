"""Writes the figures of steps and evaluations for TensorBoard, through tensorboardX (extra "tensorboard").

tensorboardX's SummaryWriter writes from its own thread: a full disk ends that thread, and the caller then blocks on its
queue. Its EventsWriter writes at once and raises OSError, which the report handles as for every other file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parallel3d.errors import ConfigError, Problem

SKIPPED_FIELDS = ("step", "num_updates", "time")
"""Figures of a step that make no useful curve."""


def check_tensorboard() -> None:
    """Raises ConfigError when tensorboardX is not installed."""
    if find_spec("tensorboardX") is None:
        rule = "needs the package tensorboardX, which is not installed"
        fix = "Install it (pip install tensorboardX), or set monitor.tensorboard to false."
        raise ConfigError([Problem(field="monitor.tensorboard", value=True, rule=rule, fix=fix)])


class TensorBoardFile:
    """One event file of a run; every call may raise OSError."""

    def __init__(self, folder: Path, *, started_at: float, history: Iterable[Mapping[str, Any]] = ()):
        """Creates the folder and the file. `history` are the lines of metrics.jsonl so far, written as of `started_at`
        (seconds since 1970), so that a resumed run has whole curves."""
        from tensorboardX.event_file_writer import EventsWriter

        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.iterdir()))  # else two files of one second would have one name
        self._writer = EventsWriter(str(folder / "events"), f".{number}.parallel3d")
        for line in history:
            self._write(line, started_at)
        self._writer.flush()

    def add(self, line: Mapping[str, Any], wall_time: float) -> None:
        """Writes a line of metrics.jsonl: the figures of a step or of an evaluation; other events are left out."""
        self._write(line, wall_time)
        self._writer.flush()

    def add_values(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
        """Writes figures by their tags."""
        self._write_values(step, values.items(), wall_time)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, line: Mapping[str, Any], wall_time: float) -> None:
        if "step" in line:
            self._write_values(line["step"], scalars(line), wall_time)

    def _write_values(self, step: int, found: Iterable[tuple[str, float]], wall_time: float) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in found]
        if values:
            self._writer.write_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Tags and values of a line: train/loss, train/lr, ..., and evaluation/loss."""
    kind = line.get("event", "train")
    if kind not in ("train", "evaluation") or "step" not in line:
        return
    for name, value in line.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name not in SKIPPED_FIELDS:
            yield f"{kind}/{name}", float(value)
