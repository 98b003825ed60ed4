"""The configuration: every field with its type, range, unit and what else it constrains.

Types are strict (no "8" for 8), unknown fields are errors, objects are frozen. What a field may be on its own is said
here; rules between fields live in rules.py, sizes that follow from fields in derived.py. The docstrings below are the
reference: they are carried into the JSON schema that editors read, which `python -m parallel3d.config.schema` prints.

A field that may be null says what null stands for; `load.resolve` fills in what can be derived.
"""

from __future__ import annotations

import json

from parallel3d.config.sections.base import Section
from parallel3d.config.sections.batch import BatchConfig
from parallel3d.config.sections.checkpoint import CheckpointConfig
from parallel3d.config.sections.data import DataConfig
from parallel3d.config.sections.debug import DebugConfig, DumpConfig, ProfileConfig
from parallel3d.config.sections.elastic import (
    ElasticConfig,
    FaultConfig,
    FaultPhase,
    HeartbeatTimeoutConfig,
    RandomFaults,
    TimeoutConfig,
    WatchdogTimeoutConfig,
)
from parallel3d.config.sections.lr_schedule import LrScheduleConfig
from parallel3d.config.sections.model import ModelConfig
from parallel3d.config.sections.monitor import MonitorConfig
from parallel3d.config.sections.optimizer import OptimizerConfig
from parallel3d.config.sections.parallel import ParallelConfig
from parallel3d.config.sections.precision import LossScaleConfig, PrecisionConfig
from parallel3d.config.sections.restart import RestartConfig
from parallel3d.config.sections.run import RunConfig
from parallel3d.config.sections.warmup import CurriculumLearning, WarmupConfig

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "CurriculumLearning",
    "DataConfig",
    "DebugConfig",
    "DumpConfig",
    "ElasticConfig",
    "FaultConfig",
    "FaultPhase",
    "HeartbeatTimeoutConfig",
    "LossScaleConfig",
    "LrScheduleConfig",
    "ModelConfig",
    "MonitorConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ProfileConfig",
    "RandomFaults",
    "RestartConfig",
    "RunConfig",
    "Section",
    "TimeoutConfig",
    "WarmupConfig",
    "WatchdogTimeoutConfig",
    "json_schema",
]


class Config(Section):
    """A training run: model, layout, batch, optimizer, data."""

    description: str = ""
    """What this configuration is, and for how many devices."""
    source: str = ""
    """Where its numbers come from."""
    model: ModelConfig
    """The decoder's shape."""
    parallel: ParallelConfig = ParallelConfig()
    """How the model, its layers and the batch are spread over ranks."""
    batch: BatchConfig
    """Sizes of an iteration."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    optimizer: OptimizerConfig
    """AdamW."""
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    """The learning rate over the updates."""
    warmup: WarmupConfig = WarmupConfig()
    """Steps that are smaller at first: shorter sequences, or fewer."""
    curriculum_learning: CurriculumLearning = CurriculumLearning()
    """DeepSpeed's block as it stands in its configuration, in place of warmup.sequence_length."""
    data: DataConfig = DataConfig()
    """The text to train on."""
    elastic: ElasticConfig = ElasticConfig()
    """What happens when workers die."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What a run keeps of itself on disk."""
    monitor: MonitorConfig = MonitorConfig()
    """What is recorded of a run's course, and what ends a run that has diverged."""
    restart: RestartConfig = RestartConfig()
    """What happens when a run can't go on in place."""
    debug: DebugConfig = DebugConfig()
    """Aids for the case that something is wrong; all that cost anything are off."""
    run: RunConfig
    """Length, seed, folder and devices of the run."""


def json_schema() -> str:
    """The JSON schema that editors complete and check configurations with; a file names it in its `$schema`."""
    schema = Config.model_json_schema()
    schema["properties"] = {"$schema": {"type": "string", "description": "This schema's path."}} | schema["properties"]
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    print(json_schema(), end="")
