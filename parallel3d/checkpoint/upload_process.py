"""The process `parallel3d upload --follow` beside a run, which copies its checkpoints to `checkpoint.upload`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from parallel3d.checkpoint.follower_process import FollowerProcess, FollowerTexts
from parallel3d.child_process import command_line

TEXTS = FollowerTexts(
    field="checkpoint.upload",
    not_ended="the process that uploads has not ended as it should; some may be missing there",
    stopped="the next start of the run sends what is missing",
)


class UploadProcess(FollowerProcess):
    """Sends what is there before it ends."""

    def __init__(self, run_folder: Path, arguments: Sequence[str], *, end_wait_s: float):
        since = ["--follow", str(time.time()), "--end-wait", str(end_wait_s)]
        command = command_line("upload", str(run_folder), *arguments, *since)
        super().__init__(command, TEXTS, end_wait_s=end_wait_s)
