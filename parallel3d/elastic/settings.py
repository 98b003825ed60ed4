"""Settings of the launching side (coordinator, guardians), and how they follow from a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallel3d.config.derived import save_intervals
from parallel3d.config.schema import Config, NoticeConfig, TimeoutConfig
from parallel3d.elastic.protocol.vacancies import GridTarget
from parallel3d.parallel.grid import Grid

STOP_AND_SAVE_S = 120.0
"""From a stop request to SIGKILL, for runs that write a checkpoint in between."""


@dataclass(frozen=True, kw_only=True)
class LaunchTimeouts:
    """Upper bounds for each wait of the launching side, in seconds."""

    start_s: float = 600.0
    """From the coordinator's start until every worker has connected; also the longest look-up of its address."""
    connect_s: float = 60.0
    """Until the coordinator accepts a connection."""
    control_s: float = 30.0
    """Longest silence of the coordinator, or of a guardian, before it counts as lost."""
    change_s: float = 120.0
    """For all reports, and for all confirmations, of a change of membership."""
    failover_s: float = 5.0
    """From the loss of the coordinator until every survivor must have reached its successor."""
    abort_grace_s: float = 3.0
    """From the end of the run to SIGKILL for workers that have not exited."""
    stop_grace_s: float = 15.0
    """From a stop request (Ctrl-C, SIGTERM) to SIGKILL."""

    @staticmethod
    def from_config(config: Config) -> LaunchTimeouts:
        saves = config.checkpoint.save_at_end or save_intervals(config.checkpoint)
        return LaunchTimeouts(
            start_s=config.run.timeout_s,
            control_s=config.elastic.control_timeout_s,
            change_s=config.elastic.change_timeout_s,
            stop_grace_s=STOP_AND_SAVE_S if saves else LaunchTimeouts.stop_grace_s,
        )


@dataclass(frozen=True, kw_only=True)
class SlowStepRule:
    """Bounds on the time of a step, as in the configuration's section `debug`."""

    factor: float
    """Multiple of the median step time."""
    min_s: float
    """Least time in seconds, however fast steps are."""


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """Properties of a run that can go on without some of its workers."""

    grid: Grid
    """The grid at the start."""
    zero_stage: int
    zero_backups: int
    enabled: bool = True
    target: GridTarget | None = None
    """The widths up to which vacancies are filled; None: those of the grid at the start."""
    max_rejoins: int = 0
    """New workers in the place of lost ones, for each place, in an hour."""
    join_threshold: int = 1
    """Workers that join together, if as many are missing."""
    join_wait_s: float = 60.0
    """How long they wait for each other."""
    probation_s: float = 300.0
    """How long the place of a worker that was slow stays empty."""
    heartbeat_timeout: TimeoutConfig
    watchdog_timeout: TimeoutConfig
    witness: str | None = None
    coordinator_host: str | None = None
    """Where the coordinator is to serve; None: where it begins."""
    notice: NoticeConfig = NoticeConfig()
    """How hosts learn that they will be taken away."""
    relay_from: int = 256
    """Workers from which on the guardians of a host share one connection, where a launcher starts them."""
    slow_step: SlowStepRule | None = None
    """When a step counts as slow; None: never."""

    @property
    def protocol_options(self) -> dict[str, Any]:
        """Arguments of the membership protocol."""
        names = ("zero_stage", "zero_backups", "enabled", "target", "join_threshold")
        return {name: getattr(self, name) for name in names}

    @staticmethod
    def from_config(config: Config, grid: Grid, target: GridTarget | None = None) -> ElasticSettings:
        elastic, debug = config.elastic, config.debug
        return ElasticSettings(
            grid=grid,
            zero_stage=config.parallel.zero_stage,
            zero_backups=elastic.zero_backups,
            enabled=elastic.enabled,
            target=target,
            max_rejoins=elastic.max_rejoins,
            join_threshold=elastic.join_threshold,
            join_wait_s=elastic.join_wait_s,
            probation_s=elastic.probation_s,
            heartbeat_timeout=elastic.heartbeat_timeout,
            watchdog_timeout=elastic.watchdog_timeout,
            witness=elastic.witness,
            coordinator_host=elastic.coordinator_host,
            notice=elastic.notice,
            relay_from=elastic.relay_from,
            slow_step=SlowStepRule(factor=debug.slow_step_factor, min_s=debug.slow_step_min_s)
            if debug.slow_step_factor
            else None,
        )
