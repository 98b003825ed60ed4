"""What `parallel3d.train` returns: the run as its folder holds it, read when it is asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.directory import BEST, CheckpointDirectory
from parallel3d.monitor.run_folder import CONFIG, METRICS, SUMMARY, iterate_metrics


@dataclass(frozen=True)
class TrainResult:
    """A run that has ended."""

    run_folder: Path
    exit_code: int
    """0: trained to its end. docs/python.md lists the others."""
    checkpoint_directory: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The figures of summary.json; empty if the run's end could not write it."""
        return self._read(SUMMARY)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration: `parallel3d.train(result.config)` is the same run again."""
        return self._read(CONFIG)

    @property
    def final_step(self) -> int:
        """The last step that was completed; 0 before the first."""
        return self.summary.get("last_step") or 0

    @property
    def final_loss(self) -> float | None:
        """Its loss, in nats per token."""
        return self.summary.get("last_loss")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of all steps: step, loss, grad_norm, lr, tokens_per_s, ..."""
        return [line for line in self._lines if "event" not in line]

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """All other lines of metrics.jsonl: evaluations, membership changes, notices, ..."""
        return [line for line in self._lines if "event" in line]

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the complete checkpoints, oldest first."""
        directory = CheckpointDirectory(self.checkpoint_directory)
        return [directory.path_of(step) for step in directory.steps()]

    @property
    def best_checkpoint(self) -> Path | None:
        """The folder of the checkpoint with the lowest evaluation loss (without evaluations, training loss) of all
        that have been written; None if there is none."""
        link = self.checkpoint_directory / BEST
        return link.resolve() if link.exists() else None

    @cached_property
    def _lines(self) -> list[dict[str, Any]]:
        path = self.run_folder / METRICS
        return list(iterate_metrics(path)) if path.exists() else []

    def _read(self, name: str) -> dict[str, Any]:
        path = self.run_folder / name
        return json.loads(path.read_text()) if path.exists() else {}
