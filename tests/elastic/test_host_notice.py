"""How a guardian learns that its host will be taken away: files, commands, fake metadata servers, signals."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel3d.config.schema import NoticeConfig
from parallel3d.elastic.coordinator.preemptions import END_BEFORE_S, Preemptions
from parallel3d.elastic.guardian.host_notice import HostNotice
from parallel3d.elastic.guardian.notice_sources import Notice, build_sources
from tests.support.metadata_server import MetadataServer, metadata_server
from tests.support.processes import DEADLINE_S

ROOT = Path(__file__).parents[2]
LATE = """
import os, signal, sys
from parallel3d.elastic.guardian.signals import Signals
with Signals() as signals:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.requests == [signal.SIGUSR1]
for number in (signal.SIGUSR1, signal.SIGUSR2):
    os.kill(os.getpid(), number)
sys.exit(7)
"""


@pytest.fixture
def server(monkeypatch) -> Iterator[MetadataServer]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a metadata server is never behind a proxy
    with metadata_server() as server:
        yield server


def ask(**config) -> Notice | None:
    (source,) = build_sources(NoticeConfig(**config)).values()
    return source()


@pytest.mark.parametrize(
    ("cloud", "event", "seconds"),
    [
        ("aws", "terminate", 100.0),
        ("aws", "stop", 100.0),
        ("gcp", "preempted", 30.0),
        ("gcp", "TERMINATE_ON_HOST_MAINTENANCE", 30.0),
        ("azure", "Preempt", 100.0),
        ("azure", "Reboot", 100.0),
    ],
)
def test_what_clouds_say(server, cloud, event, seconds):
    assert ask(cloud=cloud, url=server.url) is None
    server.event = event
    notice = ask(cloud=cloud, url=f"{server.url}/")
    assert notice is not None and notice.text.startswith(f"{cloud}: ") and event in notice.text
    assert seconds - 60.0 < notice.seconds <= seconds
    assert ask(cloud=cloud, url=server.url, deadline_s=7.0) == Notice(text=notice.text, seconds=7.0)
    assert server.refused == []


@pytest.mark.parametrize(("cloud", "event"), [("gcp", "MIGRATE_ON_HOST_MAINTENANCE"), ("azure", "Freeze")])
def test_what_a_machine_outlives_is_no_notice(server, cloud, event):
    server.event = event
    assert ask(cloud=cloud, url=server.url) is None


def test_another_machine_of_the_scale_set_is_taken_away(server):
    server.event, server.machine = "Preempt", "vm_8"
    assert ask(cloud="azure", url=server.url) is None


@pytest.mark.parametrize(("cloud", "usual_s"), [("aws", 120.0), ("azure", 30.0)])
def test_a_time_that_has_passed_by_this_clock_says_nothing(server, cloud, usual_s):
    server.event, server.seconds = {"aws": "terminate", "azure": "Preempt"}[cloud], -500.0
    notice = ask(cloud=cloud, url=server.url)
    assert notice is not None and notice.seconds == usual_s


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_server_that_is_not_there_is_an_error(cloud):
    with pytest.raises(OSError):
        ask(cloud=cloud, url="http://127.0.0.1:1")


def test_files_and_commands(tmp_path):
    file = tmp_path / "notice"
    assert ask(file=str(file)) is None and ask(command=f"cat {file}") is None
    file.write_text("reclaimed\nby its owner")
    assert ask(file=str(file)) == Notice(text=f"{file} exists", seconds=30.0)
    assert ask(command=f"cat {file}", deadline_s=9.0) == Notice(text="reclaimed", seconds=9.0)
    assert ask(command="true") == Notice(text="'true' succeeded", seconds=30.0)


def children() -> set[int]:
    """The child processes of this one."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


class Lookout:
    """A host's notice with a selector of its own."""

    def __init__(self, **config):
        self.selector = selectors.DefaultSelector()
        self.notices, self.troubles = 0, []
        self.notice = HostNotice(
            NoticeConfig(every_s=0.1, **config),
            selector=self.selector,
            on_notice=self._count,
            on_trouble=self.troubles.append,
        )

    def _count(self) -> None:
        self.notices += 1

    def turn_until(self, condition) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline
            self.notice.turn()
            for key, _ in self.selector.select(0.05):
                key.data()


@pytest.fixture
def lookout():
    made = []

    def make(**config) -> Lookout:
        made.append(Lookout(**config))
        return made[-1]

    yield make
    for each in made:
        each.notice.close()
        each.selector.close()


def test_a_notice_comes_once_from_a_process_that_ends(lookout, server):
    before = children()  # such as multiprocessing's tracker, if a test before has started it
    watch = lookout(cloud="aws", url=server.url)
    watch.notice.turn()
    process = children() - before
    assert watch.notice.frame() is None and process
    server.event = "terminate"
    watch.turn_until(lambda: watch.notices)
    frame = watch.notice.frame()
    assert frame is not None and 40 < frame.pop("seconds") <= 100
    assert frame == {"op": "announce_preemption", "text": "aws: spot terminate"}
    watch.turn_until(lambda: not process & children())
    watch.notice.turn()
    assert watch.notices == 1 and not children() - before and watch.troubles == []


def test_a_process_that_was_killed_is_replaced(lookout, tmp_path):
    before = children()
    watch = lookout(file=str(tmp_path / "notice"))
    watch.notice.turn()
    (process,) = children() - before
    os.kill(process, signal.SIGKILL)
    watch.turn_until(lambda: children() - before - {process})
    (tmp_path / "notice").touch()
    watch.turn_until(lambda: watch.notices)


def test_a_source_in_trouble_is_named_once_and_others_are_asked(lookout, tmp_path):
    watch = lookout(cloud="gcp", url="http://127.0.0.1:1", command=f"cat {tmp_path}/notice")
    watch.turn_until(lambda: watch.troubles)
    (tmp_path / "notice").write_text("soon")
    watch.turn_until(lambda: watch.notices)
    (trouble,) = watch.troubles
    assert trouble.startswith("elastic.notice: gcp's metadata at http://127.0.0.1:1 can't be asked (")
    assert watch.notice.frame() == {"op": "announce_preemption", "text": "soon", "seconds": 30}


def test_one_user_signal_is_the_notice_and_the_other_asks_for_the_status(lookout):
    watch = lookout()
    assert watch.notice.status_signal == signal.SIGUSR1
    watch.notice.on_signal(signal.SIGUSR2)
    assert watch.notices == 0 and lookout(signal="USR2").notice.status_signal == signal.SIGUSR1
    watch = lookout(signal="USR1", deadline_s=120.0)
    assert watch.notice.status_signal == signal.SIGUSR2
    for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR1):
        watch.notice.on_signal(number)
    assert watch.notices == 1
    assert watch.notice.frame() == {"op": "announce_preemption", "text": "SIGUSR1", "seconds": 120}


def test_workers_are_ended_a_little_before_their_host():
    preemptions = Preemptions()
    assert preemptions.add("a", [0, 1], "soon", due_s=130.0) == [0, 1]
    assert preemptions.add("a", [0, 1], "again", due_s=101.0) == []
    assert preemptions.add("b", [3], "at once", due_s=101.0) == [3]
    assert preemptions.why([1, 2]) == "host a is taken away (soon)" and preemptions.why([2]) == ""
    assert preemptions.why([0, 1, 3]) == "host a is taken away (soon); host b is taken away (at once)"
    assert preemptions.take_due(100.0) == {3: "host b is taken away (at once)"}
    assert preemptions.take_due(129.9 - END_BEFORE_S) == {}
    assert preemptions.take_due(130.0 - END_BEFORE_S).keys() == {0, 1} and preemptions.take_due(1e9) == {}


def test_a_host_that_came_back_under_its_name_may_get_another_notice():
    preemptions = Preemptions()
    preemptions.add("a", [0], "soon", due_s=130.0)
    assert preemptions.add("a", [6], "once more", due_s=500.0) == [6]
    assert preemptions.take_due(130.0).keys() == {0}


def test_a_notice_that_comes_at_the_very_end_leaves_the_exit_code():
    """A scheduler signals all processes of a host: the first may end the run before the last has its signal."""
    assert subprocess.run([sys.executable, "-c", LATE], cwd=ROOT).returncode == 7
