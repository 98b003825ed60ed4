"""Cuts and kills on two and three hosts, under torchrun and without a launcher, with and without a witness: the rows
that test_cut_networks.py does not have. One side goes on, and each host ends with its code.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.network.test_cut_networks import assert_one_side_finished, codes, lost_ranks
from tests.support.network_runs import CONTROL_S, LAUNCHERS, STATIC, NetworkRun
from tests.support.network_switch import Weather

pytestmark = [pytest.mark.slow, pytest.mark.full]


def cut(run: NetworkRun, host: int) -> None:
    run.network.cut_host(host)


def kill(run: NetworkRun, host: int) -> None:
    run.network.hosts[host - 1].kill_all()


def mute(run: NetworkRun, host: int) -> None:
    """Nothing from the host arrives at the coordinator's; from the coordinator's nothing arrives anywhere."""
    run.network.weather = Weather(cut=frozenset((host, other) for other in _opposite(run, host)))


def deafen(run: NetworkRun, host: int) -> None:
    """The other direction."""
    run.network.weather = Weather(cut=frozenset((other, host) for other in _opposite(run, host)))


def _opposite(run: NetworkRun, host: int) -> list[int]:
    return [other.number for other in run.network.hosts[1:]] if host == 1 else [1]


def part(run: NetworkRun, host: int) -> None:
    """The data's path to the host before it is cut; both reach the coordinator."""
    run.network.weather = Weather(cut=frozenset({(host, host - 1), (host - 1, host)}))


def flap(run: NetworkRun, host: int) -> None:
    """Three short breaks: they are only slow."""
    for _ in range(3):
        run.network.cut_host(host)
        time.sleep(1.0)
        run.network.weather = Weather()
        time.sleep(1.0)


def flap_long(run: NetworkRun, host: int) -> None:
    """A break of more than the patience costs the host its place, for good."""
    run.network.cut_host(host)
    time.sleep(1.5 * CONTROL_S)
    run.network.weather = Weather()


LINGER = [{"step": 20, "rank": 1, "phase": "forward", "kind": "sleep", "seconds": 15.0}]
"""Long enough for torchruns to miss a store: those of the c10d rendezvous have stopped the run after two seconds."""


@dataclass(frozen=True)
class Cell:
    """What happens to which host of how many, and which host the run goes on without; 0: all stay."""

    trouble: Callable[[NetworkRun, int], None]
    host: int
    num_hosts: int
    lost: int
    launcher: str = "variables"
    has_witness: bool = False

    @property
    def name(self) -> str:
        witness = "-witness" if self.has_witness else ""
        return f"{self.trouble.__name__}-{self.host}-of-{self.num_hosts}-{self.launcher}{witness}"


WAYS = tuple(itertools.product(LAUNCHERS, (True, False)))
"""Launchers, with and without a witness."""
OTHER_WAYS = tuple(way for way in WAYS if way != ("variables", False))
"""Those of which test_cut_networks.py has no row."""
CELLS = [
    *(Cell(trouble, num, num, num, *way) for trouble in (mute, deafen) for num in (2, 3) for way in WAYS),
    *(Cell(trouble, 1, 3, 1, launcher) for trouble in (mute, deafen) for launcher in (STATIC, "variables")),
    *(Cell(part, 3, 3, 3, *way) for way in OTHER_WAYS),
    *(Cell(flap, num, num, 0, *way) for num in (2, 3) for way in WAYS),
    *(Cell(flap_long, num, num, num, *way) for num in (2, 3) for way in WAYS),
    *(Cell(cut, 2, 2, 2, "torchrun", has_witness) for has_witness in (True, False)),
    *(Cell(cut, host, 3, host, *way) for host in (1, 3) for way in OTHER_WAYS),
    *(Cell(kill, num, num, num, *way) for num in (2, 3) for way in WAYS),
    Cell(kill, 1, 3, 1, has_witness=True),
    Cell(kill, 1, 3, 1, STATIC),
    Cell(kill, 1, 2, 1, STATIC, has_witness=True),
]


@pytest.mark.sample(0, rest=4)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_one_side_goes_on(start, tmp_path, undisturbed, cell):
    witness = str(tmp_path / "witness") if cell.has_witness else None
    run = start(cell.num_hosts, cell.launcher, witness=witness, faults=LINGER if cell.launcher == STATIC else [])
    run.wait_for_step(5)
    cell.trouble(run, cell.host)
    ended = run.end()
    assert_one_side_finished(run, ended, undisturbed)
    assert lost_ranks(run) == ([cell.lost - 1] if cell.lost else [])
    code = {kill: -signal.SIGKILL, part: 0}.get(cell.trouble, 4)  # one that is evicted has the run's own
    assert codes(ended) == [code if host == cell.lost else 0 for host in range(1, cell.num_hosts + 1)], ended
    if cell.num_hosts == 2 and cell.trouble in (mute, deafen, cut):
        why = f"the witness {witness} " if witness else "no witness is configured"
        assert f"the run can't go on here: this side reaches 1 of 2 hosts, and {why}" in ended[1].out


@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize(
    "cell",
    [
        Cell(kill, 1, 2, 1, "torchrun", has_witness=True),
        Cell(kill, 1, 3, 1, "torchrun"),
        Cell(deafen, 1, 3, 1, "torchrun"),
    ],
    ids=lambda cell: cell.name,
)
def test_torchruns_end_without_the_store_of_their_rendezvous(start, tmp_path, cell):
    """It is in the torchrun of the first host, which is killed, or ends with its deaf coordinator. The run goes on
    without that host, until the other torchruns miss the store: they stop the run, which saves, and end with code 1.

    The kernel of a deaf host sends its oldest unacknowledged data again and again: the end of the connection, behind
    them, may never leave. The others' requests then time out after a quarter of an hour (Linux: `tcp_retries2`), so
    the host hears again once its torchrun is gone."""
    witness = str(tmp_path / "witness") if cell.has_witness else None
    run = start(cell.num_hosts, "torchrun", num_steps=100_000, witness=witness)
    run.wait_for_step(5)
    cell.trouble(run, cell.host)
    run.processes[0].wait(timeout=300)
    run.network.weather = Weather()
    others = range(1, cell.num_hosts)
    assert [run.processes[other].wait(timeout=300) for other in others] == [1 for _ in others]
    ended = run.end()
    assert codes(ended) == [4 if cell.trouble is deafen else -signal.SIGKILL] + [128 + signal.SIGTERM for _ in others]
    assert run.steps() == list(range(1, len(run.steps()) + 1))
    assert f"saved step {len(run.steps())}:" in "".join(each.out for each in ended)
    assert lost_ranks(run)[0] == 0, "the run has not gone on"
