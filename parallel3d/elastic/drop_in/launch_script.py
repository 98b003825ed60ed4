"""`elastic.init()`: turns the process that runs a script into the one that starts its workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from parallel3d.config.mistakes import explain_mistake, field_name, fields_of
from parallel3d.config.schema import NoticeConfig, TimeoutConfig
from parallel3d.config.sections.elastic import notice_problems
from parallel3d.elastic.guardian.launcher_env import SECRET_VARIABLE, LauncherEnv, read_launcher_env
from parallel3d.elastic.launch import run_workers
from parallel3d.elastic.operator_link import reserve_place
from parallel3d.elastic.protocol.vacancies import GridTarget
from parallel3d.elastic.settings import ElasticSettings, LaunchTimeouts
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.errors import ConfigError, Problem, UserError
from parallel3d.lasting_output import lasting_output
from parallel3d.monitor.environment import describe_environment
from parallel3d.monitor.run_folder import LOGS, ContinuedRunFolder, RunFolder
from parallel3d.monitor.sinks import RunReporter
from parallel3d.parallel.grid import Grid

IS_WORKER: ContextVar[bool] = ContextVar("is_worker")
"""Whether this process is a worker, whose script runs again."""
JOIN_VARIABLE = "PARALLEL3D_JOIN"
"""Set to 1 by a user who adds a worker to the run in `directory`."""


def init(
    num_workers: int = 1,
    *,
    directory: str | Path = "runs/loop",
    seed: int = 0,
    max_rejoins: int = 3,
    max_workers: int | None = None,
    heartbeat_s: float = 15.0,
    patience_s: float = 600.0,
    notice: Mapping[str, Any] | None = None,
    coordinator_host: str | None = None,
) -> None:
    """Starts the workers, each of which runs the script from its first line, and ends with the run's exit code. In a
    worker it returns at once.

    Call it before the script does anything but import. num_workers: without a launcher such as torchrun, which says how
    many there are. directory: of metrics.jsonl and the workers' logs. seed: of the model's first weights and of
    dropout. max_rejoins: how often in an hour each lost worker is replaced. max_workers: up to which the run grows by
    workers that join with PARALLEL3D_JOIN=1. heartbeat_s: a worker that the kernel has stopped is lost after that.
    patience_s: a worker is lost that for so long neither begins a slot nor has a gradient nor waits for others.
    notice: how a host learns that it will be taken away, with the fields of the configuration's elastic.notice:
    {"signal": "USR1"}. coordinator_host: where the run's coordinator is to serve, as elastic.coordinator_host.
    """
    if IS_WORKER.get(False):
        return
    try:
        env = read_launcher_env(os.environ)
        if os.environ.get(JOIN_VARIABLE):
            env = reserve_place(Path(directory), env, os.environ.get(SECRET_VARIABLE, ""))
        elif env is not None:
            num_workers = env.world_size
        elastic = _settings(num_workers, max_workers, max_rejoins, heartbeat_s, patience_s)
        elastic = replace(elastic, notice=read_notice(notice or {}), coordinator_host=read_host(coordinator_host))
        with lasting_output(Path(directory)):
            code = _run(env, Path(directory), elastic, seed=seed, patience_s=patience_s, num_workers=num_workers)
        sys.exit(code)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def _run(
    env: LauncherEnv | None,
    directory: Path,
    elastic: ElasticSettings,
    *,
    seed: int,
    patience_s: float,
    num_workers: int,
) -> int:
    main: Any = sys.modules["__main__"]
    module = main.__spec__.name.removesuffix(".__main__") if main.__spec__ else None
    options: dict[str, Any] = {"path": str(Path(main.__file__).resolve()), "module": module}
    options |= {"seed": seed, "patience_s": patience_s}

    def open_folder() -> RunReporter:
        folder = RunFolder(directory, config="{}", environment=describe_environment(sys.orig_argv))
        return RunReporter(folder, title=Path(options["path"]).stem, charts=False)

    def reopen_folder() -> RunReporter:
        return RunReporter(ContinuedRunFolder(directory), title=Path(options["path"]).stem, charts=False)

    return run_workers(
        partial(_run_worker, options),
        world_size=num_workers,
        logs=directory / LOGS,
        open_report=open_folder,
        reopen_report=reopen_folder,
        env=env,
        preload=("torch", "parallel3d.elastic.drop_in.script"),
        timeouts=LaunchTimeouts(change_s=patience_s),
        elastic=elastic,
    )


def _settings(
    num_workers: int, max_workers: int | None, max_rejoins: int, heartbeat_s: float, patience_s: float
) -> ElasticSettings:
    grid = Grid.uniform(pp_size=1, dp_size=num_workers, tp_size=1)
    return ElasticSettings(
        grid=grid,
        zero_stage=0,
        zero_backups=0,
        target=GridTarget.of(grid, max_replicas=max_workers),
        max_rejoins=max_rejoins,
        heartbeat_timeout=TimeoutConfig(multiplier=1.0, min_s=heartbeat_s, max_s=heartbeat_s),
        watchdog_timeout=TimeoutConfig(multiplier=1.0, min_s=patience_s, max_s=patience_s),
    )


def read_notice(fields: Mapping[str, Any]) -> NoticeConfig:
    """Returns the settings in `fields`. Raises ConfigError with all mistakes."""
    try:
        notice = NoticeConfig.model_validate(dict(fields))
    except ValidationError as error:
        known = dict(fields_of(NoticeConfig))
        mistakes = {field_name(mistake): explain_mistake(mistake, known) for mistake in error.errors()}
        raise ConfigError([replace(each, field=f"notice.{each.field}") for each in mistakes.values()]) from None
    if problems := list(notice_problems(notice, "notice")):
        raise ConfigError(problems)
    return notice


def read_host(name: object) -> str | None:
    """Returns a host's name, or None. Raises ConfigError for anything else."""
    if name is None or (isinstance(name, str) and name):
        return name
    fix = "Give the name that `hostname` prints there, or None"
    raise ConfigError([Problem(field="coordinator_host", value=name, rule="must be the name of a host", fix=fix)])


def _run_worker(options: dict[str, Any], context: WorkerContext) -> int:
    # these import torch, which guardians do not need
    from parallel3d.elastic.drop_in.script import Script, run_worker_script

    IS_WORKER.set(True)
    os.environ.update(launcher_variables(context))
    return run_worker_script(Script(**options), context)


def launcher_variables(context: WorkerContext) -> dict[str, str]:
    """The variables that a script finds, with a launcher or without: those of the first worker in its place, so that a
    rank is always less than the number of workers that the run began with."""
    first_rank = context.rank if context.first_rank is None else context.first_rank
    numbers = {
        "RANK": first_rank,
        "LOCAL_RANK": context.local_rank,
        "WORLD_SIZE": context.world_size,
        "LOCAL_WORLD_SIZE": context.local_world_size,
    }
    return {name: str(number) for name, number in numbers.items()}
