"""How long a run may take no notice of a strike, and how many seconds longer a run of the signal matrix took."""

from __future__ import annotations

from pathlib import Path

from parallel3d.elastic.frames import PING_S
from parallel3d.elastic.stub import STUB_PATIENCE
from tests.support import signal_cells, training_cells
from tests.support.signal_cells import RECOVERY, STUB_AND_COORDINATOR, SignalCell
from tests.support.strike_clock import read_steps, read_strike, settled_s
from tests.support.struck_worlds import MOMENTS_S
from tests.support.training_cells import GROUPS, TrainingCell

Cell = SignalCell | TrainingCell
LIMIT_S = 1.0
"""Beyond the patience; more is counted."""
COMMITTED = {"start": -1, "idle": 1, "commit": 1, GROUPS: 1}
"""The generation that is committed at the strike; 0 in the other phases."""


def patience_s(cell: Cell) -> float:
    """The seconds after its strike in which a run need not have gone on, or ended: what docs/elastic.md states.

    KILL    0: a death is seen at once, by waitpid and closed connections. PING_S for a torchrun: how often its stubs
            look for it (stub.py)
    STOP    of a worker its heartbeat timeout (heartbeat.py), control_s before it trains (guardian.py: stopped_s); of a
            guardian, coordinator or relay STUB_PATIENCE x control_s, after which its stub kills it (stub.py); 0 of a
            stub or a torchrun, which delay nothing; of a stub whose coordinator is lost failover_s, for which guardians
            look for the next one there (coordinator_link.py)
    CONT    as STOP, but no longer than the moment

    failover_s is added where a side has no majority, and waits for other hosts before it ends
    (failover_coordinator.py). abort_grace_s and stop_grace_s are not: they are for workers that don't end when they
    should, and no run of the matrix has those.
    """
    if cell.what == "KILL":
        notice_s = PING_S if cell.process == "launcher" and cell.has_torchrun else 0.0
        return notice_s + (float(signal_cells.SPEC["failover_s"]) if _may_lack_majority(cell) else 0.0)
    return min(_stop_patience_s(cell), MOMENTS_S[cell.what] or float("inf"))


def _may_lack_majority(cell: Cell) -> bool:
    """Whether the first host may be lost when the third is out of the run. The stub below a torchrun that is killed in
    a recovery may notice that only after its commit."""
    if isinstance(cell, TrainingCell):
        return cell.ends_all
    phases = {"stub": ("commit",), "launcher": RECOVERY}.get(cell.process, ())
    return (cell.hosts, cell.host) == (3, 0) and cell.phase in phases


def _stop_patience_s(cell: Cell) -> float:
    is_training = isinstance(cell, TrainingCell)
    spec = signal_cells.SPEC
    control_s = training_cells.CONTROL_S if is_training else signal_cells.CONTROL_S
    if cell.process == STUB_AND_COORDINATOR:
        return float(spec["failover_s"])
    if cell.process in ("stub", "launcher"):
        return 0.0
    if cell.process != "worker":
        return STUB_PATIENCE * control_s
    if cell.phase == "start":
        return control_s
    if is_training:
        return training_cells.HEARTBEAT_S
    return float(spec["heartbeat_s"])


def is_lost(cell: Cell) -> bool:
    """Whether the run loses what was struck, and goes on in a new generation."""
    if cell.what == "KILL" or cell.process == STUB_AND_COORDINATOR:
        return True
    moment_s = MOMENTS_S[cell.what] or float("inf")
    return cell.process not in ("stub", "launcher") and moment_s > _stop_patience_s(cell)


def excess_s(cell: Cell, directory: Path) -> float | None:
    """The seconds beyond its patience that a run took until it went on, or had ended; None if that is not known.

    From the strike on: that rank 1 stays in its phase for another 0.2 s counts, too. A stub that is stopped keeps the
    processes right below it, which wait to hand it their last words; its workers end.
    """
    strike = read_strike(directory)
    if strike is None:
        return None
    is_above = cell.process in ("stub", "launcher", STUB_AND_COORDINATOR) and cell.what == "STOP"
    kept = {strike.below[0], *strike.children} if is_above else set()
    seconds = settled_s(
        strike,
        read_steps(directory),
        last_step=training_cells.NUM_STEPS - 1 if isinstance(cell, TrainingCell) else signal_cells.SPEC["num_steps"],
        newer_than=COMMITTED.get(cell.phase, 0) if is_lost(cell) else -1,
        must_end=is_lost(cell) and not (cell.process == STUB_AND_COORDINATOR and cell.what != "STOP"),
        stays={*kept, *(strike.started if cell.has_torchrun else ())},
    )
    return None if seconds is None else seconds - patience_s(cell)
