"""Trains a model as one JSON file says: `python launch/train.py --config FILE [section.field=value ...]`.

Started plainly, it runs one worker process per rank on this machine; under torchrun or DeepSpeed's launcher, this
process guards the worker of its rank. Exit codes: 0 done, 2 a mistake in what it was given, 3 lost too many workers to
go on, 4 lost the coordinator, 5 copies that must be the same bits are not, 130/143 stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.child import run_script  # noqa: E402
from launch.initial import check_initial  # noqa: E402
from parallel3d.checkpoint.catalogue import Catalogue, Found, verify_whole  # noqa: E402
from parallel3d.config.derived import stage_replicas, world_size  # noqa: E402
from parallel3d.config.load import dump_config, load_config, resolve  # noqa: E402
from parallel3d.config.schema import Config  # noqa: E402
from parallel3d.elastic.coordinator import ElasticSettings, Limits  # noqa: E402
from parallel3d.elastic.launcher_env import LauncherEnv, read_launcher_env  # noqa: E402
from parallel3d.elastic.overdue import OverdueRule  # noqa: E402
from parallel3d.elastic.run import run_workers  # noqa: E402
from parallel3d.elastic.spawn import WorkerContext  # noqa: E402
from parallel3d.errors import UserError  # noqa: E402
from parallel3d.monitor.environment import describe_environment  # noqa: E402
from parallel3d.monitor.run_folder import LOGS, ContinuedFolder, RunFolder  # noqa: E402
from parallel3d.monitor.sinks import RunReport  # noqa: E402
from parallel3d.topology.grid import Grid  # noqa: E402

STOP_AND_SAVE_S = 120.0
"""From a stop asked for to SIGKILL, where a checkpoint is written in between."""


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    env = None
    try:
        env = read_launcher_env(os.environ, local_rank=options.local_rank)
        config = resolve(
            load_config(options.config, options.overrides),
            config_path=options.config,
            world_size=env.world_size if env else None,
        )
        if options.print_config:
            print(dump_config(config))
            return 0
        if options.rehearse and (code := rehearse(options, env)):
            return code
        return train(config, env, title=Path(options.config).stem)
    except UserError as error:
        if env is None or env.local_rank == 0:  # once a host
            print(error, file=sys.stderr)
        return error.exit_code


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a model as one JSON file says.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's JSON file, see configs/")
    parser.add_argument("--print-config", action="store_true", help="print the configuration as resolved, and leave")
    parser.add_argument("--rehearse", action="store_true", help="first 4 steps with a save and a resume, then the run")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="set by launchers, not by people")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="replaces a field of the file")
    options = parser.parse_intermixed_args(arguments)
    if wrong := [override for override in options.overrides if "=" not in override]:
        parser.error(f"unknown argument: {' '.join(wrong)} (an override reads section.field=value)")
    return options


def rehearse(options: argparse.Namespace, env: LauncherEnv | None) -> int:
    """Proves saving and resuming, in processes of its own; 0 where the run may begin."""
    if env is not None:
        raise UserError(
            "--rehearse starts workers of its own, beside those of the launcher that has started this process: rehearse"
            " on one host first (python launch/rehearse.py --config FILE ...), then start the run without --rehearse"
        )
    return run_script("rehearse.py", ["--config", options.config, *options.overrides])


def train(config: Config, env: LauncherEnv | None, *, title: str) -> int:
    """Runs the workers under this process's guard; returns the run's exit code."""
    directory, start = Path(str(config.run.directory)), choose_start(config)
    if start.path is None:
        check_initial(config)

    def open_report() -> RunReport:
        environment = describe_environment(sys.orig_argv)
        folder = RunFolder(
            directory, config=dump_config(config), environment=environment, history_to=history_of(config, start)
        )
        report = RunReport(folder, title=title, tensorboard=config.monitor.tensorboard)
        for record in prepare_checkpoints(config, start):
            report.publish(record)
        return report

    def reopen_report() -> RunReport:
        return RunReport(ContinuedFolder(directory), title=title, tensorboard=config.monitor.tensorboard)

    return run_workers(
        partial(work, config, start.path),
        world_size=world_size(config),
        logs=directory / LOGS,
        open_report=open_report,
        reopen_report=reopen_report,
        env=env,
        preload=("torch",),
        limits=limits_of(config),
        elastic=elastic_settings(config),
    )


def elastic_settings(config: Config) -> ElasticSettings:
    """What the launching side must know to go on after a loss."""
    parallel, elastic, debug = config.parallel, config.elastic, config.debug
    return ElasticSettings(
        grid=Grid.of_replicas(stage_replicas(config), tp_size=parallel.tp_size, order=parallel.order),
        zero_stage=parallel.zero_stage,
        zero_backups=elastic.zero_backups,
        enabled=elastic.enabled,
        silence=elastic.silence,
        stuck=elastic.stuck,
        witness=elastic.witness,
        overdue=OverdueRule(factor=debug.overdue_factor, min_s=debug.overdue_min_s) if debug.overdue_factor else None,
    )


def limits_of(config: Config) -> Limits:
    """A stop that saves may take longer."""
    saves = config.checkpoint.save_at_end or config.checkpoint.every
    return Limits(start_s=config.run.timeout_s, **({"stop_grace_s": STOP_AND_SAVE_S} if saves else {}))


def choose_start(config: Config) -> Found:
    """The checkpoint with which the run begins, all of its bytes verified; every guardian comes to the same one.

    Raises CheckpointError when one that was asked for by its path is damaged.
    """
    resume = config.run.resume
    if resume == "never":
        return Found(path=None, index=None, damaged=())
    if resume == "auto":
        return checkpoints_of(config).find_newest_good()
    path = Path(resume).resolve()
    return Found(path=path, index=verify_whole(path), damaged=())


def checkpoints_of(config: Config) -> Catalogue:
    return Catalogue(Path(str(config.checkpoint.directory)))


def history_of(config: Config, start: Found) -> int:
    """The step up to which the run's folder holds the very run that goes on; 0: another run's."""
    is_own = start.path is not None and start.path.parent == checkpoints_of(config).directory.resolve()
    return start.index.step if start.index is not None and (is_own or config.run.resume == "auto") else 0


def prepare_checkpoints(config: Config, start: Found) -> Iterator[dict[str, Any]]:
    """Moves aside what the run does not go on from; records for the report."""
    for text in start.damaged:
        yield {"kind": "notice", "text": f"passed over: {text}"}
    try:
        aside = checkpoints_of(config).set_aside(after=history_of(config, start))
        num_bytes = checkpoints_of(config).set_aside_bytes()
    except OSError as error:
        raise UserError(f"can't write into {config.checkpoint.directory} ({error.strerror})") from None
    if aside is not None:
        yield {"kind": "notice", "text": f"checkpoints that this run does not go on from are now in {aside}"}
    if num_bytes:
        text = f"{num_bytes / 1e6:,.1f} MB of such checkpoints are kept until you remove {config.checkpoint.directory}"
        yield {"kind": "notice", "text": f"{text}/previous-*"}
    if start.index is not None:
        yield {"event": "resumed_from", "step": start.index.step, "path": str(start.path)}
    elif config.run.resume == "auto":
        yield {"kind": "notice", "text": "no checkpoint to go on from: from the start"}
    if config.run.initialize_from is not None:
        text = "is not read: the run goes on from its checkpoint" if start.index else "gives the weights to begin with"
        yield {"kind": "notice", "text": f"run.initialize_from {config.run.initialize_from} {text}"}


def work(config: Config, start: Path | None, context: WorkerContext) -> int:
    from launch.worker import run_worker  # brings torch: a guardian under a launcher stays without it

    return run_worker(config, context, start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
