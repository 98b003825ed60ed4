"""Runs launch/train.py without what elasticity does while nobody dies: what benchmarks/overhead.py compares with.

    python benchmarks/inelastic.py [--keep heartbeats,tokens,frames] --config FILE ...

Taken away are the heartbeats (a worker's own thread, its count of instructions, its guardian's looks), the abort
tokens (every wait of a collective is gloo's own, with no callback and no note of who is waited for) and the frames that
tell the coordinator of each step. Entries stay: the gradient norm of a step needs an all-reduce anyway. For
measurements only: a run like this does not survive anything.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel3d.comm import gloo  # noqa: E402
from parallel3d.comm.abort import AbortToken  # noqa: E402
from parallel3d.elastic.pulse import Pulse, Watch  # noqa: E402
from parallel3d.trainer.loop import Trainer  # noqa: E402


def main() -> None:
    kept: list[str] = []
    if sys.argv[1:2] == ["--keep"]:
        kept = sys.argv[2].split(",")
        del sys.argv[1:3]
    for name, take_away in {"heartbeats": no_heartbeats, "tokens": no_tokens, "frames": no_frames}.items():
        if name not in kept:
            take_away()
    script = ROOT / "launch" / "train.py"
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")


def no_heartbeats() -> None:
    replace(Pulse, "start", lambda pulse: None)
    replace(Pulse, "tick", lambda pulse: None)
    replace(Pulse, "note_wait", lambda pulse, wait: None)
    replace(Watch, "look", lambda watch, pids: {})


def no_tokens() -> None:
    replace(AbortToken, "waiting", lambda token, what="", ranks=(): contextlib.nullcontext())
    replace(AbortToken, "check", lambda token: None)
    replace(gloo.GlooGroup, "_track", lambda group, work, tensors, *, then=None: BareWork(work, tensors, then))


def no_frames() -> None:
    step = Trainer._step

    def step_untold(trainer: Trainer) -> None:
        publish = trainer.publish
        trainer.publish = lambda record: None if record["kind"] == "progress" else publish(record)
        try:
            step(trainer)
        finally:
            trainer.publish = publish

    replace(Trainer, "_step", step_untold)


class BareWork:
    """gloo's own wait."""

    def __init__(self, work: Any, tensors: Any, then: Any):
        self._work, self._tensors, self._then = work, tensors, then

    def wait(self) -> None:
        self._work.wait()
        if self._then:
            self._then()
            self._then = None


def replace(where: type, name: str, function: Any) -> None:
    assert hasattr(where, name), f"{where.__name__} has no {name} any more: mend this script"
    setattr(where, name, function)


if __name__ == "__main__":
    main()
