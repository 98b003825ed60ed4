"""A strategy in which the rest goes on after a failure, simulated failure by failure. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from parallel3d.goodput.failure_trace import MS_PER_S, FailureTrace
from parallel3d.goodput.outcome import Outcome, RestartCosts


@dataclass(frozen=True, kw_only=True)
class ElasticStrategy:
    """The rest trains on: this says what a failure takes away, when that returns, and how long all others wait.

    A failed device takes its replica of a stage out of training, or its `unit` "pipeline": that replica number of every
    stage. If a stage (or the last pipeline) is lost, the run starts again from its newest checkpoint, with all devices.
    """

    name: str
    unit: Literal["pipeline", "stage"]
    num_stages: int
    num_replicas: int
    """Replicas of each stage."""
    pause_s: float = 0.0
    """For which all wait after a failure, what they compute again included."""
    returns_after_s: float | None = None
    """From the failure until what was lost is back; None: at the end of the repair interval."""
    repair_interval_s: float = 3 * 3600.0
    join_pause_s: float = 0.0
    """For which all wait when something returns."""
    speeds: tuple[float, ...] = ()
    """Throughput with 0, 1, 2, ... lost replicas in the worst stage, as shares; () is the share of those that are
    left."""
    restart: RestartCosts

    @property
    def groups(self) -> int:
        """Sets of `num_replicas` of which the worst one limits the throughput."""
        return self.num_stages if self.unit == "stage" else 1

    def speed(self, lost: int) -> float:
        """Throughput with this number of replicas lost in the worst stage.

        Beyond the known speeds, the last one's ratio to the share of replicas that are left applies.
        """
        left = (self.num_replicas - lost) / self.num_replicas
        if not self.speeds or not lost:
            return left
        known = min(lost, len(self.speeds) - 1)
        return left * self.speeds[known] * self.num_replicas / (self.num_replicas - known)

    def returns_at_ms(self, failed_ms: int) -> int:
        if self.returns_after_s is not None:
            return failed_ms + round(self.returns_after_s * MS_PER_S)
        interval = round(self.repair_interval_s * MS_PER_S)
        return (failed_ms // interval + 1) * interval

    def run(self, trace: FailureTrace) -> Outcome:
        """Simulates the trace."""
        state = _Run(self)
        for now_ms, replica in trace:
            state.take_back(now_ms)
            state.lose(now_ms, replica)
        state.take_back(trace.duration_ms)
        state.advance(trace.duration_ms)
        return state.outcome(trace)


@dataclass
class _Run:
    """A run at one moment; progress is in milliseconds of the fault-free run."""

    strategy: ElasticStrategy
    now_ms: int = 0
    halted_until_ms: int = 0
    progress: float = 0.0
    saved: float = 0.0
    """Progress of the newest checkpoint."""
    paused_ms: int = 0
    repeated: float = 0.0
    num_restarts: int = 0
    out: set[tuple[int, int]] = field(default_factory=set)
    """(group, number) of everything that is lost."""
    returns: deque[tuple[int, tuple[int, int]]] = field(default_factory=deque)
    """(time, what returns), ascending."""

    def __post_init__(self) -> None:
        strategy = self.strategy
        self._make_whole()
        self._speeds = [strategy.speed(lost) for lost in range(strategy.num_replicas + 1)]
        self._pause_ms = round(strategy.pause_s * MS_PER_S)
        self._join_pause_ms = round(strategy.join_pause_s * MS_PER_S)
        self._save_every_ms = round(strategy.restart.interval_s * MS_PER_S)

    def advance(self, to_ms: int) -> None:
        """Trains until `to_ms`, saving at every multiple of the checkpoint interval."""
        begin_ms = min(max(self.now_ms, self.halted_until_ms), to_ms)
        self.paused_ms += begin_ms - self.now_ms
        speed = self._speeds[self._most_lost]
        if (save_ms := to_ms // self._save_every_ms * self._save_every_ms) > self.now_ms:
            self.saved = self.progress + max(0, save_ms - begin_ms) * speed
        self.progress += (to_ms - begin_ms) * speed
        self.now_ms = to_ms

    def take_back(self, until_ms: int) -> None:
        """Advances through everything that returns by `until_ms`; what returns at once shares one pause."""
        returns = self.returns
        while returns and returns[0][0] <= until_ms:
            now_ms = returns[0][0]
            self.advance(now_ms)
            while returns and returns[0][0] == now_ms:
                what = returns.popleft()[1]
                self.out.remove(what)
                self._count(what[0], -1)
            self._halt(self._join_pause_ms)

    def lose(self, now_ms: int, replica: int) -> None:
        """A device of this replica fails; what is out already can't be lost again."""
        stage, number = divmod(replica, self.strategy.num_replicas)
        what = (stage if self.strategy.unit == "stage" else 0, number)
        if what in self.out:
            return
        self.advance(now_ms)
        self.out.add(what)
        self._count(what[0], 1)
        if self._most_lost == self.strategy.num_replicas:
            self._start_again()
        else:
            self.returns.append((self.strategy.returns_at_ms(now_ms), what))
            self._halt(self._pause_ms)

    def outcome(self, trace: FailureTrace) -> Outcome:
        saving = self.strategy.restart.saving_share
        total = trace.duration_ms
        return Outcome(
            goodput=self.progress / total * (1 - saving),
            paused=self.paused_ms / total,
            repeated=self.repeated / total,
            num_failures=len(trace),
            num_restarts=self.num_restarts,
        )

    def _halt(self, pause_ms: int) -> None:
        self.halted_until_ms = max(self.halted_until_ms, self.now_ms + pause_ms)

    def _start_again(self) -> None:
        """Goes back to the newest checkpoint, with all devices."""
        self.num_restarts += 1
        self.repeated += self.progress - self.saved
        self.progress = self.saved
        self._make_whole()
        self._halt(round(self.strategy.restart.restart_s * MS_PER_S))

    def _make_whole(self) -> None:
        self.out.clear()
        self.returns.clear()
        self._lost = [0] * self.strategy.groups
        self._groups_by_lost = [self.strategy.groups] + [0] * self.strategy.num_replicas
        self._most_lost = 0

    def _count(self, group: int, change: int) -> None:
        """Keeps the largest loss of a group up to date; it changes by one at most."""
        lost, by_lost = self._lost, self._groups_by_lost
        by_lost[lost[group]] -= 1
        lost[group] += change
        by_lost[lost[group]] += 1
        if lost[group] > self._most_lost:
            self._most_lost = lost[group]
        elif not by_lost[self._most_lost]:
            self._most_lost -= 1
