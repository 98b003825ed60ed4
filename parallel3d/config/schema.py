"""The configuration: every field with its type, range, unit and what else it constrains.

Types are strict (no "8" for 8), unknown fields are errors, objects are frozen. Each section has a file in sections/,
with its fields and the rules on them; rules.py collects the rules, derived.py computes sizes that follow from fields.
The docstrings under the fields are the reference: the JSON schema that editors read contains them, and `python -m
parallel3d.config.schema` prints it.

The docstring of a field that may be null explains what null means; `load.resolve` fills in what can be derived.
"""

from __future__ import annotations

import json

from parallel3d.config.sections.batch import BatchConfig
from parallel3d.config.sections.checkpoint import CheckpointConfig
from parallel3d.config.sections.curriculum import CurriculumLearning
from parallel3d.config.sections.data import DataConfig
from parallel3d.config.sections.debug import DebugConfig, DumpConfig, ProfileConfig
from parallel3d.config.sections.elastic import (
    ElasticConfig,
    FaultConfig,
    FaultPhase,
    HeartbeatTimeoutConfig,
    NoticeConfig,
    RandomFaults,
    TimeoutConfig,
    WatchdogTimeoutConfig,
)
from parallel3d.config.sections.evaluation import EvaluationConfig
from parallel3d.config.sections.lr_schedule import LrScheduleConfig
from parallel3d.config.sections.model import ModelConfig
from parallel3d.config.sections.monitor import MonitorConfig
from parallel3d.config.sections.optimizer import OptimizerConfig
from parallel3d.config.sections.parallel import ParallelConfig
from parallel3d.config.sections.precision import LossScaleConfig, PrecisionConfig
from parallel3d.config.sections.restart import RestartConfig
from parallel3d.config.sections.run import RunConfig
from parallel3d.config.sections.section import Section
from parallel3d.config.sections.warmup import WarmupConfig

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "CurriculumLearning",
    "DataConfig",
    "DebugConfig",
    "DumpConfig",
    "ElasticConfig",
    "EvaluationConfig",
    "FaultConfig",
    "FaultPhase",
    "HeartbeatTimeoutConfig",
    "LossScaleConfig",
    "LrScheduleConfig",
    "ModelConfig",
    "MonitorConfig",
    "NoticeConfig",
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
    """What this configuration trains, and on how many devices."""
    source: str = ""
    """Source of its numbers."""
    model: ModelConfig
    """The decoder's shape."""
    parallel: ParallelConfig = ParallelConfig()
    """How the model, its layers and the batch are distributed over ranks."""
    batch: BatchConfig
    """Sizes of one step."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    optimizer: OptimizerConfig
    """AdamW."""
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    """The learning rate over the updates."""
    warmup: WarmupConfig = WarmupConfig()
    """Smaller steps first: shorter sequences, or fewer."""
    curriculum_learning: CurriculumLearning = CurriculumLearning()
    """DeepSpeed's block of this name, unchanged, instead of warmup.sequence_length."""
    data: DataConfig = DataConfig()
    """The text to train on."""
    elastic: ElasticConfig = ElasticConfig()
    """What happens when workers die."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What a run saves to disk."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """What checkpoints are evaluated on, beside training."""
    monitor: MonitorConfig = MonitorConfig()
    """What is recorded in addition to the loss, and what ends a run that has diverged."""
    restart: RestartConfig = RestartConfig()
    """Restarts, for when a run can't continue in place."""
    debug: DebugConfig = DebugConfig()
    """Debugging options. All that cost time are off by default."""
    run: RunConfig
    """Length, seed, folder and devices of the run."""


def json_schema() -> str:
    """The JSON schema with which editors complete and check configurations. A file refers to it by `$schema`."""
    schema = Config.model_json_schema()
    schema["properties"] = {"$schema": {"type": "string", "description": "Path of this schema."}} | schema["properties"]
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    print(json_schema(), end="")
