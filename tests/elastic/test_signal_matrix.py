"""STOP, STOP and CONT after 0.3 and 3 s, and KILL of every process of a run, in every phase: each run goes on, or ends
with its documented code; none hangs, none leaves a process behind.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.signal_cells import SignalCell, relay_cells, run_signal_cell, signal_cells, torchrun_cells

AT_ONCE = 6
"""Runs at the same time: they mostly wait."""


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "process", "host"),
    [
        *((1, process, 0) for process in ("stub", "guardian", "coordinator", "worker")),
        *((3, process, 0) for process in ("stub", "guardian", "coordinator", "worker")),
        *((3, process, 1) for process in ("stub", "guardian")),
        *((hosts, "stub and coordinator", 0) for hosts in (1, 3)),
    ],
)
def test_signals(tmp_path, hosts, process, host):
    run_cells(signal_cells(hosts, process, host), tmp_path)


@pytest.mark.full
@pytest.mark.sample(0, rest=0)
@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 3])
def test_signals_under_torchrun(tmp_path, hosts):
    """Representatives (TORCHRUN_ENDS), since each process imports torch. One host: each process, the torchrun's own
    among them, in one to three phases. Three: torchrun, a guardian and the coordinator, in start, step and confirm.
    """
    run_cells(torchrun_cells(hosts), tmp_path)


@pytest.mark.full
@pytest.mark.sample(0, rest=0)
@pytest.mark.slow
def test_signals_to_relays(tmp_path):
    run_cells(relay_cells(False, ["relay"]), tmp_path)


@pytest.mark.full
@pytest.mark.sample(0, rest=0)
@pytest.mark.slow
def test_signals_under_torchrun_with_relays(tmp_path):
    """One of each process, in one phase or another: each process imports torch."""
    run_cells(relay_cells(True)[::7], tmp_path)


def run_cells(cells: list[SignalCell], folder: Path) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = list(pool.map(lambda cell: run_signal_cell(cell, folder / cell.name), cells))
    assert not any(wrong), "\n\n".join(filter(None, wrong))
