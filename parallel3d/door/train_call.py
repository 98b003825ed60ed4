"""`parallel3d.train`: what `parallel3d train` does, as a function."""

from __future__ import annotations

import inspect
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.config.load import dump_config, load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.config.shipped import find_config
from parallel3d.door.callbacks import Callback, Line, StopTraining, as_callbacks, deliver
from parallel3d.door.child import CALLER_VARIABLE, TrainProcess
from parallel3d.door.result import TrainResult
from parallel3d.elastic.guardian.launcher_env import read_launcher_env
from parallel3d.errors import RunFailed, UserError
from parallel3d.monitor.metrics_tail import MetricsTail
from parallel3d.monitor.run_folder import METRICS
from parallel3d.user_code import check_call, load_object

POLL_S = 0.1
"""How often the run folder is looked at."""
GIVEN_NAME = "train"
"""The name of a run whose configuration is a dict: its folder is runs/train."""


def train(
    config: str | Path | Mapping[str, Any] | Config,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    callbacks: Iterable[Callback | Callable[[Line], object] | str] = (),
    *,
    check: bool = True,
    quiet: bool = False,
) -> TrainResult:
    """Trains as `parallel3d train --config CONFIG OVERRIDES` does, and returns when the run is over.

    config: a JSON file or the name of a shipped one, or the same as a dict, in which a function stands for its name.
    overrides: ["section.field=value", ...] or {"section.field": value}.
    callbacks: objects of `Callback`, functions that get each step's line, or names ("package:object").
    check: raise RunFailed if the run ends with another exit code than 0; its `result` is the run so far. A mistake in
    the configuration or the data raises UserError in any case.
    quiet: show nothing of the command's output.
    """
    if CALLER_VARIABLE in os.environ:
        raise UserError(
            "parallel3d.train was called inside a run, where a file of yours is imported: put the call under"
            ' `if __name__ == "__main__":`'
        )
    chosen = as_callbacks(_load_callback(each) if isinstance(each, str) else each for each in callbacks)
    with _config_file(config) as path:
        arguments = ["--config", str(path), *_override_words(overrides)]
        resolved, is_first = _resolve(path, arguments[2:])
        run_folder = Path(str(resolved.run.directory)).absolute()
        checkpoints = Path(str(resolved.checkpoint.directory)).absolute()
        process = TrainProcess(arguments, quiet=quiet)
        follower = _Follower(run_folder, checkpoints, chosen if is_first else [])
        was_stopped = follower.run(process)
    result = TrainResult(run_folder, process.exit_code, checkpoints)
    for callback in follower.callbacks:
        callback.on_end(result)
    if result.exit_code == UserError.exit_code:
        raise UserError("".join(process.errors).strip())
    if result.exit_code and check and not was_stopped:
        raise RunFailed(result.summary.get("message") or "".join(process.errors).strip(), result.exit_code, result)
    return result


class _Follower:
    """Calls callbacks with what appears in the folders of a run."""

    def __init__(self, run_folder: Path, checkpoints: Path, callbacks: list[Callback]):
        self.callbacks = callbacks
        self._run_folder = run_folder
        self._tail = MetricsTail(run_folder / METRICS, since_s=time.time())
        self._checkpoints = CheckpointDirectory(checkpoints)
        self._seen_steps = set(self._checkpoints.steps())

    def run(self, process: TrainProcess) -> bool:
        """Follows the process to its end; returns whether a callback has stopped it."""
        with process:
            try:
                while not process.wait(POLL_S):
                    self._deliver()
                self._deliver()
            except StopTraining:
                process.stop()
                return True
        return False

    def _deliver(self) -> None:
        if not self.callbacks:
            return
        for line in self._tail.new_lines():
            deliver(line, self._run_folder, self.callbacks)
        steps = self._checkpoints.steps()
        for step in steps:
            for callback in self.callbacks if step not in self._seen_steps else ():
                callback.on_checkpoint(step, self._checkpoints.path_of(step))
        self._seen_steps = set(steps)


def _resolve(path: Path, overrides: Sequence[str]) -> tuple[Config, bool]:
    """The resolved configuration, and whether this process calls callbacks: the only one, or that of rank 0."""
    env = read_launcher_env(os.environ)
    config = load_config(path, overrides)
    in_grid = env.world_size - config.elastic.spares if env else None
    return resolve(config, config_path=path, world_size=in_grid), env is None or env.rank == 0


@contextmanager
def _config_file(config: str | Path | Mapping[str, Any] | Config) -> Iterator[Path]:
    """The configuration as a file."""
    if isinstance(config, str | Path):
        yield find_config(str(config))
        return
    text = dump_config(config) if isinstance(config, Config) else json.dumps(config, default=_in_json)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{GIVEN_NAME}.json"
        path.write_text(text)
        yield path


def _in_json(value: object) -> str:
    """A path, or the name of a function: its file and its name there."""
    if isinstance(value, Path):
        return str(value)
    if not callable(value):
        raise UserError(f"the configuration holds {value!r}, which JSON can't: give it as text")
    name, home = getattr(value, "__qualname__", ""), getattr(value, "__module__", "")
    try:
        file = inspect.getfile(value)
    except (OSError, TypeError):
        file = ""
    if not name.isidentifier() or not Path(file).is_file():
        raise UserError(
            f"workers can't import {value!r}: put it into a file, outside of other functions, and import it from there"
        )
    return f"{Path(file).resolve()}:{name}" if home == "__main__" else f"{home}:{name}"


def _override_words(overrides: Sequence[str] | Mapping[str, Any]) -> list[str]:
    if isinstance(overrides, Mapping):
        return [f"{field}={json.dumps(value, default=_in_json)}" for field, value in overrides.items()]
    if isinstance(overrides, str):
        raise UserError(f"overrides is a list of texts: [{overrides!r}]")
    if wrong := [word for word in overrides if "=" not in word]:
        raise UserError(f"an override reads section.field=value, not {wrong[0]!r}")
    return list(overrides)


def _load_callback(name: str) -> Any:
    """A callback by name; a class is called without arguments. Raises UserError if there is none, or it takes some."""
    found = load_object(name, field="callbacks", group="parallel3d.callbacks")
    if not isinstance(found, type):
        return found
    check_call(found, what=f"callbacks {name}")
    return found()
