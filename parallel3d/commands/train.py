"""Trains a model from a JSON configuration: `python launch/train.py --config FILE [section.field=value ...]`.

Without a launcher it runs one worker process per rank on this machine; under torchrun, srun, mpirun or DeepSpeed's
launcher this process guards the worker of its rank. Exit codes: 0 success, 2 invalid input, 3 too many workers lost, 4
coordinator lost, 5 replicas that must be bitwise equal differ, 6 diverged, 7 preempted, 130/143 stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.checkpoint.fetch import FetchingDirectory
from parallel3d.checkpoint.store_process import check_target
from parallel3d.checkpoint.upload_process import UploadProcess
from parallel3d.child_process import run_command
from parallel3d.commands.evaluate_options import parse_sets, settings_of
from parallel3d.commands.parsers import parse
from parallel3d.config.deepspeed_json import deepspeed_overrides
from parallel3d.config.derived import world_size
from parallel3d.config.load import dump_config, load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.config.warmup_builder import check_length_function
from parallel3d.door.child import CALLER_VARIABLE
from parallel3d.elastic.coordinator.run_status import EXIT_BY_SIGNAL
from parallel3d.elastic.drain_target import parse_drain_target
from parallel3d.elastic.guardian.gpu_check import check_gpus
from parallel3d.elastic.guardian.launcher_env import SECRET_VARIABLE, LauncherEnv, read_launcher_env
from parallel3d.elastic.guardian.open_files import raise_open_files
from parallel3d.elastic.host_return import HostReturn
from parallel3d.elastic.launch import run_workers
from parallel3d.elastic.operator_link import request_drain, reserve_place
from parallel3d.elastic.protocol.restart_policy import RestartPolicy
from parallel3d.elastic.restart_manager import LauncherInfo, RestartManager
from parallel3d.elastic.settings import ElasticSettings, LaunchTimeouts
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.errors import EXIT_PREEMPTED, CheckpointError, ConfigError, Problem, UserError
from parallel3d.evaluation.evaluation_process import EvaluationProcess
from parallel3d.evaluation.saved_results import ResultFolder
from parallel3d.lasting_output import lasting_output
from parallel3d.models.initial_weights import check_initial_weights, resolve_initial_weights
from parallel3d.monitor.environment import describe_environment
from parallel3d.monitor.page_writer import PageWriter
from parallel3d.monitor.run_folder import ENVIRONMENT, LOGS, PAGE, RunFolder
from parallel3d.monitor.sinks import RunReporter
from parallel3d.monitor.tensorboard import check_tensorboard
from parallel3d.monitor.tracker_processes import TrackerProcesses, check_tracker
from parallel3d.remote_address import redacted
from parallel3d.report_page.page_file import write_page_of
from parallel3d.trainer.plans import build_grid, build_target

WORKER_MODULES = ("parallel3d.models.initial_weights", "parallel3d.models.make", "parallel3d.worker.main")
"""What a worker imports besides torch."""
FIRST_RANK_S = 10.0
"""Longest lag of a host's first rank behind its others, at the start."""


def main(arguments: list[str]) -> int:
    options = parse("train", arguments)
    env = None
    try:
        env = read_launcher_env(os.environ, local_rank=options.local_rank)
        if options.join or options.drain:
            options.config = enter_working_directory(options.config)
        notices = read_deepspeed_config(options, env)
        config = load_config(options.config, options.overrides)
        in_grid = env.world_size - config.elastic.spares if env and not (options.join or options.drain) else None
        config = resolve(config, config_path=options.config, world_size=in_grid)
        directory, secret_words = Path(str(config.run.directory)), os.environ.get(SECRET_VARIABLE, "")
        if options.drain:
            print(request_drain(directory, parse_drain_target(options.drain), secret_words))
            return 0
        if options.join:
            env = reserve_place(directory, env, secret_words)
        if notices and (env is None or env.rank == 0):
            print("\n".join(notices), file=sys.stderr)
        if options.print_config:
            print(dump_config(config))
            return 0
        check_gpus(config, env, world_size(config) + config.elastic.spares)
        if options.preflight and (code := preflight(options, env)):
            return code
        check_length_function(config)
        elastic, run = config.elastic, partial(train, resolve_initial_weights(config), title=Path(options.config).stem)
        host_return = HostReturn(
            find_place=partial(reserve_place, directory, env, secret_words),
            max_rejoins=elastic.max_rejoins if elastic.enabled else 0,
            return_s=elastic.return_s,
        )
        with lasting_output(directory):
            return host_return.run(run, env)
    except UserError as error:
        if env is None or env.local_rank == 0:  # once per host
            print(error, file=sys.stderr)
        else:  # a launcher that sees this end kills the others, and with them the one that says why
            time.sleep(FIRST_RANK_S)
        return error.exit_code


def enter_working_directory(config: str) -> str:
    """Changes to the folder in which a run was started, if `config` is in the run's folder and that folder is there:
    what is relative in it is relative to that. Returns the file's absolute path then."""
    file = Path(config).absolute()
    try:
        started_in = json.loads((file.parent / ENVIRONMENT).read_text()).get("working_directory")
        os.chdir(started_in or ".")
    except (OSError, ValueError, AttributeError):
        return config
    return str(file)


def read_deepspeed_config(options: argparse.Namespace, env: LauncherEnv | None) -> list[str]:
    """Puts what --deepspeed_config says before the overrides, which win; returns notices."""
    if options.deepspeed_config is None:
        return []
    in_run = env.world_size if env and not (options.join or options.drain) else None
    file, overrides = options.deepspeed_config, options.overrides
    options.overrides, notices = deepspeed_overrides(file, options.config, overrides, world_size=in_run)
    return notices


def preflight(options: argparse.Namespace, env: LauncherEnv | None) -> int:
    """Tests saving and resuming in processes of its own; returns 0 if the run may begin."""
    if env is not None:
        raise UserError(
            "--preflight starts workers of its own, which conflict with those of your launcher: run it on one host"
            " first (python launch/preflight.py --config FILE ...), then start the run without --preflight"
        )
    return run_command("preflight", ["--config", options.config, *options.overrides])


def train(config: Config, env: LauncherEnv | None, *, title: str) -> int:
    """Runs the workers, guarded by this process; returns the run's exit code."""
    if config.monitor.tensorboard:
        check_tensorboard()
    is_first = env is None or (env.rank == 0 and not env.joins)
    trackers = config.monitor.trackers if is_first else []
    for tracker in trackers:
        check_tracker(tracker)
    project, directory = config.monitor.tracker_project, Path(str(config.run.directory))
    evaluated = evaluations(config) if is_first else nullcontext()
    page = updated_page(config) if is_first else nullcontext()
    with TrackerProcesses(trackers, directory, project=project, name=title), uploads(config, env), page, evaluated:
        return guard_workers(config, env, title=title)


def evaluations(config: Config) -> AbstractContextManager[object]:
    """The process that evaluates checkpoints on `evaluation.sets`. Raises ConfigError for sets that can't be evaluated,
    UserError if the run's folder has results of other ones with their names."""
    folder, settings = Path(str(config.run.directory)), config.evaluation
    if settings.every_tokens is None:
        return nullcontext()
    for name, options in parse_sets(folder, settings.sets).items():
        ResultFolder(folder, name).check(settings_of(options))
    arguments = ["--sets", json.dumps(settings.sets), "--checkpoints", str(config.checkpoint.directory)]
    arguments += ["--every-tokens", str(settings.every_tokens), "--threads", str(settings.threads)]
    return EvaluationProcess(folder, arguments, end_wait_s=settings.end_wait_s)


@contextmanager
def updated_page(config: Config) -> Iterator[None]:
    """Writes the run's page again at the end: checkpoints are still evaluated after training has written it."""
    yield
    folder = Path(str(config.run.directory))
    if config.evaluation.every_tokens is None or not (config.monitor.page and (folder / PAGE).exists()):
        return
    if trouble := PageWriter(folder, write_page_of, every_s=None).finish():
        print(trouble, file=sys.stderr)


def uploads(config: Config, env: LauncherEnv | None) -> AbstractContextManager[object]:
    """The process that copies checkpoints to `checkpoint.upload`, on each host: one of them works at a time.

    Raises ConfigError if nothing can be written there.
    """
    settings = config.checkpoint
    if settings.upload is None or (env is not None and env.local_rank):
        return nullcontext()
    if env is None or (env.rank == 0 and not env.joins):
        try:
            check_target(settings.upload)
        except CheckpointError as error:
            fix = "Correct the address, the driver's credentials or its rights there; null: no uploads"
            raise ConfigError(
                [Problem(field="checkpoint.upload", value=redacted(settings.upload), rule=str(error), fix=fix)]
            ) from None
    keep = {"--keep-last": settings.upload_keep_last or settings.keep_last, "--keep-every": settings.keep_every}
    limits = [word for name, value in keep.items() if value is not None for word in (name, str(value))]
    places = ["--checkpoints", str(settings.directory), "--share", str(settings.write_share)]
    arguments = [settings.upload, *places, *limits]
    return UploadProcess(Path(str(config.run.directory)), arguments, end_wait_s=settings.upload_end_wait_s)


def guard_workers(config: Config, env: LauncherEnv | None, *, title: str) -> int:
    grid = build_grid(config)
    raise_open_files(grid)
    directory, restart = Path(str(config.run.directory)), config.restart
    checkpoint_dir = FetchingDirectory(Path(str(config.checkpoint.directory)), config.checkpoint.upload)

    def open_folder(history_until_step: int) -> RunFolder:
        environment = describe_environment(sys.orig_argv)
        return RunFolder(
            directory, config=dump_config(config), environment=environment, history_until_step=history_until_step
        )

    restart_manager = RestartManager(
        directory=directory,
        open_folder=open_folder,
        prepare=partial(prepare_start, config),
        make_report=partial(
            RunReporter,
            title=title,
            charts=config.monitor.charts,
            tensorboard=config.monitor.tensorboard,
            write_page=write_page_of if config.monitor.page else None,
            page_every_s=config.monitor.page_every_s,
        ),
        checkpoint_dir=checkpoint_dir,
        resume=config.run.resume,
        policy=RestartPolicy(
            max_restarts=restart.max_restarts, backoff_s=restart.backoff_s, max_backoff_s=restart.max_backoff_s
        ),
        skip_diverging_data=restart.skip_diverging_data,
        launcher=LauncherInfo(by_launcher=True, run_id=env.run_id, attempt=env.attempt) if env else LauncherInfo(),
    )
    code = run_workers(
        partial(run_worker_process, config),
        world_size=world_size(config) + config.elastic.spares,
        logs=directory / LOGS,
        open_report=restart_manager.begin,
        reopen_report=restart_manager.reopen,
        restart_handler=restart_manager,
        env=env,
        preload=("torch", *WORKER_MODULES),
        timeouts=LaunchTimeouts.from_config(config),
        elastic=ElasticSettings.from_config(config, grid, build_target(config)),
        parent=int(os.environ.get(CALLER_VARIABLE, "0")) or None,
    )
    if (code > EXIT_BY_SIGNAL or code == EXIT_PREEMPTED) and env is None and (steps := checkpoint_dir.steps()):
        print(f"to continue after step {steps[-1]}, run the same command with run.resume=auto", file=sys.stderr)
    return code


def prepare_start(config: Config, is_resuming: bool) -> list[str]:
    """Checks whose checkpoints `checkpoint.directory` holds, and `run.initialize_from` if the run begins with it;
    returns notices. Raises UserError."""
    check_owner(config, is_resuming)
    if config.run.initialize_from is None:
        return []
    if not is_resuming:
        check_initial_weights(config)
    text = "is not read: the run resumes from its checkpoint" if is_resuming else "provides the initial weights"
    return [f"run.initialize_from {config.run.initialize_from} {text}"]


def check_owner(config: Config, is_resuming: bool) -> None:
    """Raises ConfigError if `checkpoint.directory` holds another run's checkpoints, from which this one does not
    resume: it would move them aside."""
    run, directory = Path(str(config.run.directory)).resolve(), Path(str(config.checkpoint.directory)).resolve()
    resumes_there = config.run.resume == "auto" or Path(config.run.resume).resolve().parent == directory
    if directory.is_relative_to(run) or (is_resuming and resumes_there):
        return
    owner = CheckpointDirectory(directory).owner()
    if owner is not None and owner.resolve() != run and str(owner) != config.run.directory:
        fix = (
            "Give this run a folder of its own; null: checkpoints in run.directory; or run.resume=auto to continue"
            " from them"
        )
        rule = f"it holds the checkpoints of the run in {owner}"
        problem = Problem(field="checkpoint.directory", value=config.checkpoint.directory, rule=rule, fix=fix)
        raise ConfigError([problem])


def run_worker_process(config: Config, context: WorkerContext) -> int:
    from parallel3d.models.initial_weights import (
        open_initial_weights,  # these import torch, which guardians do not need
    )
    from parallel3d.models.make import make_stage
    from parallel3d.worker.main import run_worker

    return run_worker(config, context, make_stage=make_stage, open_initial_weights=open_initial_weights)
