"""A stranger at every port that a run opens changes nothing: the run ends like an undisturbed one."""

import contextlib
import os
import re
import signal
import time
from collections import Counter

import pytest

from parallel3d.elastic.guardian.run_secret import FILE_NAME
from tests.launch.test_relayed_training import FOUR, HELD, NUM_STEPS, STRIKE_STEP, lost_ranks, start_ranks
from tests.support.launch_runs import PATIENCE_S, finish, metrics, start, wait_for_step
from tests.support.strangers import (
    HALF_OPEN,
    connect,
    descendants_of,
    listening_ends,
    num_closed,
    record_handshake,
    say,
    whole_words,
)

pytestmark = [pytest.mark.full, pytest.mark.slow]
UNDISTURBED = ("run.num_steps=20",)
HELD_STEP = 2
DAWDLING = "tests.support.dawdling_training"
SUMS = (f"run.num_steps={NUM_STEPS}", "precision.sums=exact")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4")
LINKS = {f"p3d-rank-{rank}": f"the links of rank {rank}" for rank in range(4)}
REJECTED = re.compile("rejected ([0-9]+) connections? to (.+) that did not prove the run's secret, the last from (.+)")


def losses(run):
    return [line["loss"] for line in metrics(run)]


@pytest.mark.sample(0, rest=2)
@pytest.mark.parametrize(
    ("launcher", "exchange"), [((), "auto"), ((), "gloo"), (TORCHRUN, "auto")], ids=["plain", "gloo", "torchrun"]
)
def test_a_stranger_at_every_port(config_file, tmp_path, undisturbed, launcher, exchange):
    held = (tmp_path, HELD, HELD_STEP + 1, "-")  # so that the run can't end before all ends are found
    settings = (*UNDISTURBED, f"run.exchange={exchange}")
    process = start(*held, "--config", config_file, *settings, launcher=(*launcher, "-m"), train=DAWDLING)
    wait_for_step(tmp_path / "run", HELD_STEP)
    of_torchrun = listening_ends([process.pid]) if launcher else {}  # that of its store
    owners = listening_ends([process.pid, *descendants_of(process.pid)])
    ends = owners.keys() - of_torchrun.keys()
    assert {"p3d-coordinator", *LINKS} <= {owners[address] for address in ends}
    with contextlib.ExitStack() as stack:
        for words in (*all_words(owners, tmp_path / "run"), *HALF_OPEN):
            for address in ends:
                with contextlib.suppress(OSError):  # some are turned away before they have spoken
                    say(stack.enter_context(connect(address)), words)
        (tmp_path / "struck").touch()
        code, out, err = finish(process)
    assert code == 0 and "Traceback" not in out + err, out + err
    assert "did not prove the run's secret, the last from 127.0.0.1" in out
    assert losses(tmp_path / "run") == undisturbed(config_file)


def all_words(owners, run):
    (coordinator,) = (address for address, name in owners.items() if name == "p3d-coordinator")
    return whole_words(record_handshake(coordinator, (run / FILE_NAME).read_bytes()))


def ends_of(stubs):
    return listening_ends(pid for stub in stubs for pid in (stub.pid, *descendants_of(stub.pid)))


def wait_until_rejected(strangers, owners):
    """Waits until all that said too much are closed: all ends do that but the listeners of coordinators to come, and
    of gloo, of which each worker has one beside that of its links."""
    wanted = {name: len(whole_words(b"")) for name in owners.values() if name.startswith("p3d-")}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        closed = Counter()
        for address, theirs in strangers.items():
            closed[owners[address]] += num_closed(theirs)
        if all(closed[name] >= number for name, number in wanted.items()):
            return
        assert time.monotonic() < deadline, closed
        time.sleep(0.05)


def rejections(texts):
    """How many connections are said to be rejected, by the end that was struck."""
    found = Counter()
    for number, end, _ in REJECTED.findall("\n".join(texts)):
        found[end] += int(number)
    return found


@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("lost", [set(), {0, 2}], ids=["no-loss", "first-stub"])
def test_strangers_at_every_port_of_two_hosts_with_relays(config_file, tmp_path, undisturbed, lost):
    """They stay until the end, in the queue of a coordinator that takes over, too, if the first stub is lost. With it
    all workers of its host are, whose other stub ends with code 4; the other host has the witness."""
    run = tmp_path / "relayed"
    stubs = start_ranks(config_file, run, FOUR, HELD, f"elastic.witness={tmp_path / 'witness'}")
    wait_for_step(run, STRIKE_STEP)
    owners = ends_of(stubs)
    places = Counter(owners.values())
    assert places.pop("python") == 3, owners  # of those that would take over
    assert places == {"p3d-coordinator": 1, "p3d-relay": 2, **dict.fromkeys(LINKS, 2)}, owners
    words = all_words(owners, run)
    with contextlib.ExitStack() as stack:
        strangers = {}
        for address in owners:
            strangers[address] = [stack.enter_context(connect(address)) for _ in words]
            for stranger, said in zip(strangers[address], words):
                say(stranger, said)
            for said in HALF_OPEN:
                say(stack.enter_context(connect(address)), said)
        wait_until_rejected(strangers, owners)
        assert ends_of(stubs) == owners
        if lost:
            os.killpg(stubs[0].pid, signal.SIGKILL)
        (tmp_path / "struck").touch()
        ended = [finish(stub) for stub in stubs]
    assert [code for code, _, _ in ended] == ([-signal.SIGKILL, 0, 4, 0] if lost else [0, 0, 0, 0]), ended
    assert lost_ranks(run) == lost
    texts = [out + err for _, out, err in ended] + [log.read_text() for log in (run / "logs").iterdir()]
    assert not any("Traceback" in text for text in texts), texts
    expected = {"the coordinator", *(end for name, end in LINKS.items() if int(name[-1]) not in lost)}
    found = rejections(texts)
    assert found.keys() >= expected and all(found[end] >= len(words) for end in expected), found
    assert found["this host's relay"] >= len(words) * (1 if lost else 2), found
    assert losses(run) == undisturbed(config_file, *SUMS)
