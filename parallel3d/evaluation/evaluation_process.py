"""The process `parallel3d evaluate --follow` beside a run, which evaluates its checkpoints on `evaluation.sets`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from parallel3d.checkpoint.follower_process import FollowerProcess, FollowerTexts
from parallel3d.child_process import command_line

TEXTS = FollowerTexts(
    field="evaluation",
    not_ended="the process that evaluates has not ended as it should; parallel3d evaluate RUN --follow does the rest",
    stopped="the next start of the run, or parallel3d evaluate RUN --follow, does the rest",
)


class EvaluationProcess(FollowerProcess):
    """Evaluates what is due before it ends, if the run has reached its end."""

    def __init__(self, run_folder: Path, arguments: Sequence[str], *, end_wait_s: float):
        since = ["--since", str(time.time()), "--end-wait", str(end_wait_s)]
        command = command_line("evaluate", str(run_folder), "--follow", *arguments, *since)
        super().__init__(command, TEXTS, end_wait_s=end_wait_s)
