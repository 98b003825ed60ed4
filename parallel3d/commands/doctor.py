"""Checks this machine and environment: `parallel3d doctor [--config FILE] [section.field=value ...] [--json]`.

Each line is OK, a warning (a run would be slow or fragile) or a problem (it would not start, or end), with how to mend
it. With a configuration it also checks the limits, the disk and the threads that this run needs. Under a launcher
(`srun parallel3d doctor`) it checks the launcher's variables. Exit codes: 0 no problem, 1 a problem, 2 invalid input.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from parallel3d.commands.parsers import parse
from parallel3d.doctor.environment_checks import (
    check_compiler,
    check_gpus_and_torch,
    check_interfaces,
    check_packages,
    find_torch_facts,
    read_launcher,
)
from parallel3d.doctor.finding import Finding
from parallel3d.elastic.guardian.launcher_env import LauncherEnv
from parallel3d.errors import ConfigError
from parallel3d.usable_cores import read_cgroup_quota

LOOPBACK = "127.0.0.1"
BYTES_PER_PARAMETER = 12
"""Weights and two moments in fp32, as checkpoints hold them."""


def main(arguments: list[str]) -> int:
    options = parse("doctor", arguments)
    findings = []
    for finding in examine(options.config, options.overrides, os.environ):
        findings.append(finding)
        if not options.json:
            print(finding, flush=True)
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "warning")}
    if options.json:
        print(json.dumps({**counts, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(f"{counts['problem']} problems, {counts['warning']} warnings")
    return 1 if counts["problem"] else 0


def examine(config_path: str | None, overrides: list[str], variables: Mapping[str, str]) -> Iterator[Finding]:
    """All findings; modules that need packages are imported once these are known to be there."""
    packages = list(check_packages())
    yield from packages
    if any(finding.level == "problem" for finding in packages):
        return  # nothing else could be imported
    env, finding = read_launcher(variables)
    yield finding
    yield from check_interfaces(variables)
    facts = find_torch_facts(variables)
    yield from check_gpus_and_torch(facts, variables)
    yield from check_compiler(facts, Path.home() / ".cache" / "parallel3d")
    yield from examine_host(config_path, overrides, variables, env)


def examine_host(
    config_path: str | None, overrides: list[str], variables: Mapping[str, str], env: LauncherEnv | None
) -> Iterator[Finding]:
    """Findings on the host, measured by the run's configuration if there is one."""
    from parallel3d.config.derived import num_parameters, world_size
    from parallel3d.config.load import load_config, resolve
    from parallel3d.doctor import host_checks as host
    from parallel3d.trainer.plans import build_grid

    grid = num_workers = num_bytes = None
    folder = Path("runs")
    if config_path is not None:
        try:
            in_grid = None if env is None else env.world_size
            config = resolve(load_config(config_path, overrides), config_path=config_path, world_size=in_grid)
        except ConfigError as error:
            yield Finding(topic="configuration", level="problem", text=str(error), fix="correct the file or override")
        else:
            grid, num_workers = build_grid(config), world_size(config)
            num_bytes = (config.checkpoint.keep_last + 2) * BYTES_PER_PARAMETER * num_parameters(config.model)
            folder = Path(str(config.checkpoint.directory))
            yield Finding(topic="configuration", text=f"{config_path}: {num_workers} workers")
    one_host = env is None or env.local_world_size == env.world_size
    num_here = num_workers if env is None else env.local_world_size
    port = env.master_port if env is not None and env.rank == 0 and not env.agent_store else None
    yield from host.check_name(socket.gethostname(), one_host=one_host)
    yield from host.check_ports(LOOPBACK if one_host else socket.gethostname(), port)
    yield from host.check_shared_memory(Path("/dev/shm"))
    yield from host.check_open_files(grid)
    yield from host.check_threads(variables, quota=read_cgroup_quota(), num_workers=num_here)
    yield from host.check_folder(folder, num_bytes)
