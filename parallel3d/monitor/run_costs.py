"""What saves and restarts have cost a run, from the lines of its metrics.jsonl in their order. Pure.

    {"step": 4, "step_s": 0.20}
    {"step": 5, "step_s": 0.23}                                     the save of step 4 is being written
    {"event": "notice", "text": "saved step 4: ...", "snapshot_s": 0.05}
    {"step": 6, "step_s": 0.20}

    step 4 | snapshot | step 5: 0.03 s slower | step 6         the save has delayed training by 0.08 s

    {"event": "failure" or "ended", "time": 100.0}
    {"event": "restart", ...}
    {"step": 5, "step_s": 0.2, "time": 130.2}                       30 s from the failure until this step began
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from parallel3d.monitor.saved_notice import SavedNotice

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SaveCosts:
    """Seconds by which a save delays training: medians of the saves that began between two steps."""

    num_saves: int
    snapshot_s: float
    """Between two steps, while all wait."""
    slowdown_s: float | None
    """By which the steps that ran while the save was written were slower than those before it; None: unknown, as no
    save has steps of both kinds."""

    @property
    def seconds(self) -> float:
        return self.snapshot_s + max(0.0, self.slowdown_s or 0.0)


def save_costs(lines: Iterable[Json]) -> SaveCosts | None:
    """The costs of this run's saves; None without a save whose snapshot was timed."""
    snapshots_s: list[float] = []
    slowdowns_s: list[float] = []
    steps_s: dict[int, float] = {}
    calm_from = last = 0
    for line in lines:
        match line:
            case {"event": "started" | "restart", "step": int(step)}:
                steps_s, last = {at: seconds for at, seconds in steps_s.items() if at <= step}, step
                calm_from = min(calm_from, step)
            case {"event": "notice", "text": str(text)} if saved := SavedNotice.parse(text):
                before = [steps_s[at] for at in range(calm_from + 1, saved.step + 1) if at in steps_s]
                meanwhile = [steps_s[at] for at in range(saved.step + 1, last + 1) if at in steps_s]
                if (snapshot_s := line.get("snapshot_s")) is not None:
                    snapshots_s.append(snapshot_s)
                    slowdowns_s += [sum(meanwhile) - len(meanwhile) * median(before)] if before and meanwhile else []
                calm_from = last
            case {"event": _}:
                continue
            case {"step": int(step), "step_s": int(seconds) | float(seconds)}:
                steps_s[step], last = seconds, step
    if not snapshots_s:
        return None
    slowdown_s = median(slowdowns_s) if slowdowns_s else None
    return SaveCosts(num_saves=len(snapshots_s), snapshot_s=median(snapshots_s), slowdown_s=slowdown_s)


def restart_times_s(lines: Iterable[Json]) -> Iterator[float]:
    """Yields, for each restart, the seconds from the first sign of the failure until the first step began."""
    failed_at: float | None = None
    has_restarted = False
    for line in lines:
        match line:
            case {"event": "started"}:
                failed_at, has_restarted = None, False
            case {"event": "failure" | "ended", "time": time}:
                failed_at = float(time) if failed_at is None else failed_at
            case {"event": "restart"}:
                has_restarted = True
            case {"event": _}:
                continue
            case {"step": _}:
                if has_restarted and failed_at is not None and "time" in line:
                    yield max(0.0, float(line["time"]) - float(line.get("step_s") or 0.0) - failed_at)
                failed_at, has_restarted = None, False
