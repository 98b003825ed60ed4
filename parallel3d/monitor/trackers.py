"""Experiment trackers behind one small interface: Weights & Biases, MLflow, Trackio, TensorBoard, or one's own.

Each is an object of its client library, made in a process of its own (`parallel3d track`), which follows metrics.jsonl.
So a client may block, start threads or crash without the run noticing.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from parallel3d.errors import ConfigError, Problem
from parallel3d.monitor.run_folder import TENSORBOARD
from parallel3d.monitor.tensorboard import TensorBoardFile
from parallel3d.user_code import FIX, check_call, load_object, names_object

FIELD, GROUP = "monitor.trackers", "parallel3d.trackers"


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run for which a tracker is made."""

    folder: Path
    """The run folder; offline files go below it."""
    project: str
    name: str
    config: Mapping[str, Any]
    """The resolved configuration, by section."""
    run_id: str | None
    """The tracker's own name of the run, if an earlier start of it has one: it goes on there."""
    environment: Mapping[str, str]
    """The process's."""
    history: Sequence[Mapping[str, Any]] = ()
    """The lines of metrics.jsonl before this start of a resumed run, for a tracker that keeps them nowhere else."""


class Tracker(Protocol):
    """Takes the figures of one run."""

    run_id: str
    """The tracker's name of the run, which a resumed run gets."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes figures such as train/loss and evaluation/loss of a step. Steps may come again after a resume."""

    def finish(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        """Ends this start of the run."""


MakeTracker = Callable[[TrackedRun], Tracker]


class WandbTracker:
    """Weights & Biases: the account, the server and offline mode are the client's own settings (WANDB_MODE, ...)."""

    def __init__(self, run: TrackedRun):
        import wandb

        self.run_id = run.run_id or uuid4().hex[:8]
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=self.run_id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # its own count can't go back after a restart

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(_figures(summary))
        self._run.finish(exit_code=exit_code)


class MlflowTracker:
    """MLflow: at MLFLOW_TRACKING_URI, or in the folder mlruns of the run folder."""

    def __init__(self, run: TrackedRun):
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        uri = run.environment.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").absolute().as_uri()
        self._client, self._metric = MlflowClient(tracking_uri=uri), Metric
        self.run_id = run.run_id or self._create(run)
        self._client.update_run(self.run_id, status="RUNNING")

    def _create(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        fields = {f"{section}.{name}": value for section, each in run.config.items() for name, value in _items(each)}
        params = [Param(name, str(value)[:500]) for name, value in fields.items()]
        for first in range(0, len(params), 100):  # of one request
            self._client.log_batch(run_id, params=params[first : first + 100])
        return str(run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def finish(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if exit_code else "FINISHED")


class TrackioTracker:
    """Trackio: a database below TRACKIO_DIR, or the Space that its settings name. A run's name is its identity."""

    def __init__(self, run: TrackedRun):
        import trackio

        self.run_id = run.run_id or f"{run.name}-{int(time.time())}"
        self._run = trackio.init(
            project=run.project, name=self.run_id, config=dict(run.config), resume="allow", embed=False
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        self._run.finish()


class TensorBoardTracker:
    """TensorBoard files in the run folder, by tensorboardX: the same curves as monitor.tensorboard's."""

    run_id = "tensorboard"

    def __init__(self, run: TrackedRun):
        folder = run.folder / TENSORBOARD
        history = () if folder.exists() else run.history  # a resumed run has moved the old files away
        self._file = TensorBoardFile(folder, started_at=time.time(), history=history)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._file.add_values(step, values, time.time())

    def finish(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        self._file.close()


TRACKERS: Mapping[str, tuple[str, MakeTracker]] = {
    "wandb": ("wandb", WandbTracker),
    "mlflow": ("mlflow", MlflowTracker),
    "trackio": ("trackio", TrackioTracker),
    "tensorboard": ("tensorboardX", TensorBoardTracker),
}
"""The package that each needs, and its class."""


def find_tracker(name: str) -> MakeTracker:
    """The class of a tracker: one of ours, an entry point of `parallel3d.trackers`, or "package:object".

    Raises ConfigError, also where the package is not installed; UserCodeError if the object does not take a run.
    """
    if name not in TRACKERS:
        if not names_object(name, GROUP):
            near = difflib.get_close_matches(name, TRACKERS, n=1)
            fix = f"Did you mean {near[0]}? " if near else f"Use one of {', '.join(TRACKERS)}. "
            raise ConfigError([Problem(field=FIELD, value=name, rule="is not a tracker", fix=fix + FIX)])
        found = load_object(name, field=FIELD, group=GROUP)
        check_call(found, None, what=f"{FIELD} {name}")
        return found
    package, make = TRACKERS[name]
    if find_spec(package) is None:
        rule, fix = f"needs the package {package}, which is not installed", f"Install it (pip install {package})"
        raise ConfigError([Problem(field=FIELD, value=name, rule=rule, fix=fix)])
    return make


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if isinstance(value, int | float | str)}


def _items(section: Any) -> list[tuple[str, Any]]:
    """The fields of a section; those of sections inside one as one text."""
    return list(section.items()) if isinstance(section, Mapping) else [("value", section)]
