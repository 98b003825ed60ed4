"""The configuration's section `parallel`, and its rules."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, WithJsonSchema
from pydantic_core import PydanticCustomError

from parallel3d.config.sections.base import Section
from parallel3d.pipeline.schedules import SCHEDULES, default_schedule

CountPerStage = Annotated[list[PositiveInt], Field(min_length=1)]
"""One number for each pipeline stage, or virtual stage."""

GridSize = Annotated[int, Field(ge=1, le=65536)]
"""A size of the grid; the limit keeps a mistyped one from being built."""


def _known_schedule(name: str) -> str:
    if name not in SCHEDULES:
        raise PydanticCustomError("schedule", "should be {names}", {"names": " or ".join(SCHEDULES)})
    return name


ScheduleName = Annotated[
    str, AfterValidator(_known_schedule), WithJsonSchema({"type": "string", "enum": list(SCHEDULES)})
]
"""A name in SCHEDULES."""


class ParallelConfig(Section):
    """How the model, its layers and the batch are spread over ranks."""

    tp_size: GridSize = 1
    """Ranks that share each layer (tensor parallel); divides heads and intermediate_size."""
    pp_size: GridSize = 1
    """Pipeline stages; at most model.num_hidden_layers."""
    dp_size: GridSize | None = None
    """Replicas of every stage. Null: what the number of ranks leaves, world / (tp_size * pp_size); 1 if nobody says how
    many ranks there are. Excludes stage_replicas."""
    stage_replicas: CountPerStage | None = None
    """Replicas of each stage where they differ, one number a stage. Null: dp_size everywhere. Excludes dp_size."""
    order: Literal["pp_dp_tp", "dp_pp_tp"] = "pp_dp_tp"
    """Axes of the rank grid, slowest first. pp_dp_tp keeps a stage's replicas together (HLAT's); dp_pp_tp keeps whole
    pipelines together, so that a lost host takes one pipeline."""
    sequence_parallel: bool = False
    """Norms and dropout work on sequence shards over the tensor-parallel ranks; batch.sequence_length becomes a
    multiple of tp_size. Without effect at tp_size 1."""
    schedule: ScheduleName = Field(
        default=default_schedule(1),
        description="\n".join(
            ["Order of the micro-batches in a pipeline.", *(f"{s.name}: {s.summary}" for s in SCHEDULES.values())]
        ),
    )
    virtual_stages: GridSize = 1
    """Chunks of layers on each stage; the schedule says how many it can use. pp_size * virtual_stages is at most
    model.num_hidden_layers."""
    split_backward: Literal["auto", "never"] = "auto"
    """auto: where replicas were lost the backward pass is split, gradients of inputs first, if that makes the iteration
    shorter. never: only a schedule that always splits it does."""
    max_extra_in_flight: NonNegativeInt = 2
    """Micro-batches that a replica may hold above its schedule's limit where replicas were lost: that many more
    activations of its stage (or chunk). Without effect on a schedule that holds all micro-batches anyway."""
    layers_per_stage: CountPerStage | None = None
    """Layers of each stage, summing to model.num_hidden_layers; with virtual stages pp_size * virtual_stages numbers,
    in the order of layers. Null: cut so that the costliest stage is cheapest."""
    zero_stage: Literal[0, 1] = 1
    """1 shards the optimizer's state over the replicas of a stage (ZeRO-1); 0 keeps all of it on each."""
    overlap_grad_reduce: bool = True
    """Reduce the gradients of a bucket while the backward pass still runs."""
    overlap_param_gather: bool = True
    """Gather the updated parameters while the next forward pass already runs. Without effect at zero_stage 0."""
    bucket_mib: PositiveFloat = 16.0
    """Size of a gradient bucket, in MiB of main gradients."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What a layer recomputes in the backward pass to keep less until then: selective keeps its matrix products and
    attention, full only its input. Neither changes a number. Where the backward pass is split, what its second
    half needs is kept from the first half on, all the same."""
    p2p_slots: PositiveInt = 3
    """Messages in flight between two stages' replicas, per ordered pair."""
