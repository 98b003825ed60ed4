"""The configuration of ranks that only compute: the model of some weights, on a layout, up to a length."""

from __future__ import annotations

import re

from parallel3d.config.layouts import parse_layout
from parallel3d.config.load import resolve
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.errors import UserError

_LAYOUT = re.compile(r"(tp|pp|dp)\d+(\.(tp|pp|dp)\d+)*")


def inference_config(
    model: ModelConfig,
    *,
    layout: str,
    policy: str,
    sequence_length: int,
    seed: int = 0,
    num_threads: int | None = None,
) -> Config:
    """The resolved configuration. Raises UserError for a layout that does not fit the model, or has other parts than
    tp, pp and dp; ConfigError for broken rules. `seed`: under which a user's own layers are built, for the buffers that
    they draw. `num_threads`: of each rank on CPUs; None: cores divided by ranks."""
    if not _LAYOUT.fullmatch(layout):
        raise UserError(f"layout {layout!r}: consists of tp, pp and dp here, as in tp2.pp2.dp2")
    fields = parse_layout(layout).fields
    raw = {
        "model": model.model_dump() | {"hidden_dropout": 0.0},
        "parallel": dict(fields),
        "precision": {"policy": policy},
        "batch": {"micro_batch_size": 1, "num_micro_batches": fields["dp_size"], "sequence_length": sequence_length},
        "optimizer": {"learning_rate": 1.0},  # required, and not used
        "run": {"num_steps": 1, "seed": seed, "threads_per_rank": num_threads},
    }
    return resolve(Config.model_validate(raw), config_path="inference")
