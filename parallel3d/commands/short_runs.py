"""The first steps of a configured run, for commands that try something out before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallel3d.config.schema import CheckpointConfig, Config, DebugConfig, RandomFaults
from parallel3d.config.sections.restart import RestartConfig


def short_run_fields(config: Config, folder: Path, *, num_steps: int, checkpoint: CheckpointConfig) -> dict[str, Any]:
    """The fields of a run of `num_steps` in `folder`: without evaluations (those beside training included), trackers,
    charts, page, restarts, faults and debugging aids."""
    fields = config.model_dump()
    fields["run"] |= {"num_steps": num_steps, "num_tokens": None, "directory": str(folder), "resume": "never"}
    fields["run"] |= {"evaluate_every": None, "evaluate_share": None, "evaluate_at_start": False}
    fields["evaluation"] |= {"every_tokens": None}
    fields["monitor"] |= {"trackers": [], "tensorboard": False, "charts": False, "page": False}
    fields["restart"] = RestartConfig().model_dump()
    fields["checkpoint"] = checkpoint.model_dump()
    fields["elastic"] |= {"faults": [], "random_faults": RandomFaults().model_dump()}
    fields["debug"] = DebugConfig().model_dump()
    return fields
