"""Runs launch/train.py with elasticity switched off and on in turn: what benchmarks/overhead.py compares.

    python benchmarks/inelastic.py --block=10 --parts=waits,notes,beats --config FILE ...

In every other block of steps, the first included, the workers skip the work of elasticity in undisturbed training:
waits that an abort token can end (gloo's own replace them), notes (counting instructions, recording the awaited rank,
checking the token) and beats (the heartbeat thread). All workers switch at the same step of one run, because two runs
of the same configuration differ by more than the effect. The guardian's checks continue, and so do entries: the
gradient norm needs an all-reduce anyway. For measurements only: such a run survives nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel3d.elastic.guardian.heartbeat import HEARTBEAT_INTERVAL_S, Heartbeat
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.gloo_group import GlooGroup
from parallel3d.trainer.loop import Trainer

PARTS = ("waits", "notes", "beats")
switch = threading.Event()
"""Set while elasticity is on in this process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], epilog="The rest is for train.py.")
    parser.add_argument("--block", type=int, required=True, help="steps between two switches")
    parser.add_argument("--parts", required=True, help=f"what is switched, of {','.join(PARTS)}")
    options, sys.argv[1:] = parser.parse_known_args()
    parts = set(filter(None, options.parts.split(",")))
    if parts - {*PARTS}:
        parser.error(f"--parts: use {','.join(PARTS)}, or some of them")
    switch.set()
    follow_steps(options.block)
    if "waits" in parts:
        bare_waits()
    if "notes" in parts:
        only_while_elastic(Heartbeat, "tick", None)
        only_while_elastic(Heartbeat, "on_wait", None)
        only_while_elastic(AbortToken, "check", None)
        only_while_elastic(AbortToken, "waiting", contextlib.nullcontext())
    if "beats" in parts:
        Heartbeat._beat = beat  # type: ignore[method-assign]
    script = ROOT / "launch" / "train.py"
    sys.argv[0] = str(script)
    sys.argv += [
        'elastic.heartbeat_timeout={"min_s": 600.0, "max_s": 600.0}'
    ]  # a missing heartbeat is not a death here
    runpy.run_path(str(script), run_name="__main__")


def is_elastic(step: int, block: int) -> bool:
    """Whether a step (from 1) has elasticity on; the first block has it off."""
    return (step - 1) // block % 2 == 1


def follow_steps(block: int) -> None:
    """Switches at the start of a step."""
    step_of = Trainer._step

    def step(trainer: Trainer) -> None:
        (switch.set if is_elastic(trainer.rank.state.iteration + 1, block) else switch.clear)()
        step_of(trainer)

    Trainer._step = step  # type: ignore[method-assign]


def only_while_elastic(owner: type, name: str, otherwise: Any) -> None:
    """Calls the method while elasticity is on; otherwise returns `otherwise`."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: method(*args, **kwargs) if switch.is_set() else otherwise)


def beat(heartbeat: Heartbeat) -> None:
    """Replaces Heartbeat._beat: sleeps while off, so that no thread wakes."""
    while True:
        switch.wait()
        heartbeat._slot[0] = time.monotonic()
        time.sleep(HEARTBEAT_INTERVAL_S)


def bare_waits() -> None:
    track = GlooGroup._track

    def choose(group: GlooGroup, work: Any, *, then: Any = None) -> Any:
        return track(group, work, then=then) if switch.is_set() else BareWork(work, then)

    GlooGroup._track = choose  # type: ignore[assignment, method-assign]


class BareWork:
    """Waits as gloo itself does."""

    def __init__(self, work: Any, then: Any):
        self._work, self._then = work, then

    def wait(self) -> None:
        self._work.wait()
        if self._then:
            self._then()
            self._then = None


if __name__ == "__main__":
    main()
