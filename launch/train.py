"""Trains a model as one JSON file says: `python launch/train.py --config FILE [section.field=value ...]`.

Started plainly, it runs one worker process per rank on this machine; under torchrun or DeepSpeed's launcher, this
process guards the worker of its rank. Exit codes: 0 done, 2 a mistake in what it was given, 3 lost too many workers to
go on, 4 lost the coordinator, 5 copies that must be the same bits are not, 130/143 stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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
        return train(config, env, title=Path(options.config).stem)
    except UserError as error:
        if env is None or env.local_rank == 0:  # once a host
            print(error, file=sys.stderr)
        return error.exit_code


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a model as one JSON file says.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's JSON file, see configs/")
    parser.add_argument("--print-config", action="store_true", help="print the configuration as resolved, and leave")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="set by launchers, not by people")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="replaces a field of the file")
    options = parser.parse_intermixed_args(arguments)
    if wrong := [override for override in options.overrides if "=" not in override]:
        parser.error(f"unknown argument: {' '.join(wrong)} (an override reads section.field=value)")
    return options


def train(config: Config, env: LauncherEnv | None, *, title: str) -> int:
    """Runs the workers under this process's guard; returns the run's exit code."""
    directory = Path(str(config.run.directory))

    def open_report() -> RunReport:
        environment = describe_environment(sys.orig_argv)
        return RunReport(RunFolder(directory, config=dump_config(config), environment=environment), title=title)

    def reopen_report() -> RunReport:
        return RunReport(ContinuedFolder(directory), title=title)

    return run_workers(
        partial(work, config),
        world_size=world_size(config),
        logs=directory / LOGS,
        open_report=open_report,
        reopen_report=reopen_report,
        env=env,
        preload=("torch",),
        limits=Limits(start_s=config.run.timeout_s),
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


def work(config: Config, context: WorkerContext) -> int:
    from launch.worker import run_worker  # brings torch: a guardian under a launcher stays without it

    return run_worker(config, context)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
