"""`make demo`, as the script that it calls: two workers are killed, both come back, and the losses are shown."""

import json
import re
import subprocess
import sys

import pytest

from tests.support.architecture import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.full]
NUM_STEPS = 140
TOLERANCE = 1e-5
"""Of losses, in nats: fewer workers add fp32 numbers in another order, as in the kill matrix."""


def read(folder):
    """Losses by step, and events."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [(line["step"], line["loss"]) for line in lines if "event" not in line]
    assert [step for step, _ in steps] == [*range(1, NUM_STEPS + 1)], "a step is missing, or there twice"
    return dict(steps), [line for line in lines if "event" in line]


def test_two_workers_are_killed_and_come_back(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "demo.py")], cwd=tmp_path, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out, runs = done.stdout, tmp_path / "runs" / "demo"
    assert out.index("First, undisturbed.") < out.index("Now again, while workers are killed, and come back")

    undisturbed, events = read(runs / "undisturbed")
    assert not [event for event in events if event["event"] == "membership"]
    killed, events = read(runs / "killed")
    changes = [event for event in events if event["event"] == "membership"]
    lost = [(worker["rank"], event["step"]) for event in changes for worker in event["who"]]
    assert lost == [(4, 50), (0, 90)]
    gone = [worker["coordinates"] for event in changes for worker in event["who"]]
    back = [worker["coordinates"] for event in changes for worker in event["joined"]]
    assert back == gone and changes[-1]["widths"] == [3, 3]
    for rank, step in lost:
        assert re.search(rf"lost rank {rank} \(.*killed by SIGKILL in step {step};", out + done.stderr)
    assert len(re.findall(r"generation \d+: rank \d+ \(.*\) joins", out + done.stderr)) == 2

    table = out[out.index("step   undisturbed   with losses") :]
    rows = re.findall(r"^ +(\d+) +(\d+\.\d{6}) +(\d+\.\d{6})$", table, re.MULTILINE)
    assert len(rows) == 8
    for step, without, with_losses in rows:
        assert (without, with_losses) == (f"{undisturbed[int(step)]:.6f}", f"{killed[int(step)]:.6f}")
    farthest = max(abs(killed[step] - undisturbed[step]) for step in undisturbed)
    said = "140 of 140 steps, none skipped, 2 begun twice; the losses differ by at most"
    assert f"{said} {farthest:.1e}" in table
    assert farthest < TOLERANCE and undisturbed[NUM_STEPS] < undisturbed[1] - 1
