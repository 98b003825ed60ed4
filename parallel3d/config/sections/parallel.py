"""The configuration's section `parallel`, its arithmetic, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from parallel3d.config.named import check_named, schema_of_names
from parallel3d.config.rule import WORLD_SIZE, excludes, rule
from parallel3d.config.sections.section import Section
from parallel3d.errors import Problem
from parallel3d.pipeline.schedules import SCHEDULES, default_schedule, find_schedule, schedule_code

CountPerStage = Annotated[list[PositiveInt], Field(min_length=1)]
"""One number for each pipeline stage, or virtual stage."""

GridSize = Annotated[int, Field(ge=1, le=65536)]
"""A size of the grid; the limit keeps a mistyped one from being built."""


ScheduleName = Annotated[str, check_named(SCHEDULES, find_schedule), schema_of_names(SCHEDULES)]
"""A name in SCHEDULES, or "package:object"."""

LAYOUT = "parallel: tp_size pp_size dp_size stage_replicas"
"""What a rule reads that needs the grid of ranks (config/rule.py)."""


class ParallelConfig(Section):
    """How the model, its layers and the batch are distributed over ranks."""

    tp_size: GridSize = 1
    """Ranks that share each layer (tensor parallelism); divides heads and intermediate_size."""
    pp_size: GridSize = 1
    """Pipeline stages; at most model.num_hidden_layers."""
    dp_size: GridSize | None = None
    """Replicas of every stage. Null: what the number of ranks allows, world size / (tp_size * pp_size), or 1 without a
    launcher that sets it. Excludes stage_replicas."""
    stage_replicas: CountPerStage | None = None
    """Replicas of each stage if they differ, one number per stage. Null: dp_size everywhere. Excludes dp_size."""
    order: Literal["pp_dp_tp", "dp_pp_tp"] = "pp_dp_tp"
    """Axes of the rank grid, slowest first. pp_dp_tp keeps a stage's replicas together (as HLAT does); dp_pp_tp keeps
    whole pipelines together, so that a lost host takes one pipeline with it."""
    sequence_parallel: bool = False
    """Splits norms and dropout along the sequence over the tensor-parallel ranks; batch.sequence_length must be a
    multiple of tp_size. No effect at tp_size 1."""
    schedule: ScheduleName = Field(
        default=default_schedule(1),
        description="\n".join(
            [
                "Order of the micro-batches in a pipeline.",
                *(f"{s.name}: {s.summary}" for s in SCHEDULES.values()),
                "package:object: a schedule of your own (docs/extending.md).",
            ]
        ),
    )
    virtual_stages: GridSize = 1
    """Chunks of layers on each stage; the schedule decides how many it can use. pp_size * virtual_stages is at most
    model.num_hidden_layers."""
    split_backward: Literal["auto", "never"] = "auto"
    """auto: after a loss of replicas the backward pass is split, gradients of inputs first, if that shortens the step.
    never: only a schedule that always splits it does."""
    max_extra_in_flight: NonNegativeInt = 2
    """Micro-batches that a replica may hold above its schedule's limit after a loss of replicas: as many more
    activations of its stage (or chunk). No effect on a schedule that keeps all micro-batches anyway."""
    layers_per_stage: CountPerStage | None = None
    """Layers of each stage, summing to model.num_hidden_layers; with virtual stages pp_size * virtual_stages numbers,
    in the order of layers. Null: the split whose costliest stage is cheapest."""
    zero_stage: Literal[0, 1] = 1
    """1 shards the optimizer state over the replicas of a stage (ZeRO-1); 0 keeps all of it on each."""
    overlap_grad_reduce: bool = True
    """Reduce a bucket's gradients while the backward pass is still running."""
    overlap_param_gather: bool = True
    """Gather the updated parameters during the next forward pass. No effect at zero_stage 0, and where replicas
    exchange through shared memory (run.exchange), in which nothing moves in the background."""
    bucket_mib: PositiveFloat = 16.0
    """Size of a gradient bucket, in MiB of main gradients."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What a layer recomputes in the backward pass to save memory. selective keeps matrix products and attention, full
    keeps only the layer's input. Neither changes the numbers. If the backward pass is split, what its second
    half needs is kept from the first half on."""
    p2p_slots: PositiveInt = 3
    """Messages in flight between replicas of two stages, per ordered pair."""


# --- arithmetic -------------------------------------------------------------------------------------------------------


def replicas_in_world(parallel: ParallelConfig, world_size: int | None) -> tuple[int, ...]:
    """Replicas of each stage on `world_size` ranks (None: the configuration decides, 1 by default)."""
    if parallel.stage_replicas is not None:
        return tuple(parallel.stage_replicas)
    return (most_replicas(parallel, world_size),) * parallel.pp_size


def most_replicas(parallel: ParallelConfig, world_size: int | None) -> int:
    """The largest number of replicas of a stage."""
    if parallel.stage_replicas is not None:
        return max(parallel.stage_replicas)
    if parallel.dp_size is not None:
        return parallel.dp_size
    return 1 if world_size is None else max(1, world_size // (parallel.tp_size * parallel.pp_size))


def num_ranks(parallel: ParallelConfig, world_size: int | None) -> int:
    """Ranks of the grid on `world_size` ranks; any number of stages, as rules see numbers that no grid can have."""
    if parallel.stage_replicas is not None:
        return sum(parallel.stage_replicas) * parallel.tp_size
    return most_replicas(parallel, world_size) * parallel.pp_size * parallel.tp_size


# --- rules ------------------------------------------------------------------------------------------------------------


@rule("parallel.pp_size", "parallel.virtual_stages", "model.num_hidden_layers")
def check_stages(pp_size: int, virtual_stages: int, num_layers: int) -> Iterator[Problem]:
    """Every stage, or chunk of one, has a layer."""
    if pp_size * virtual_stages <= num_layers:
        return
    if virtual_stages > 1:
        chunks, fix = f" for each of its {virtual_stages} parallel.virtual_stages", "Use fewer stages or fewer chunks"
    else:
        chunks, fix = "", f"Use at most {num_layers} stages"
    rule_text = f"every stage needs a layer{chunks}, and model.num_hidden_layers is {num_layers}"
    yield Problem(field="parallel.pp_size", value=pp_size, rule=rule_text, fix=fix)


@rule("parallel: schedule virtual_stages pp_size")
def check_virtual_stages(parallel: ParallelConfig) -> Iterator[Problem]:
    """The schedule supports the number of stages and of chunks."""
    with schedule_code(parallel.schedule):
        broken = find_schedule(parallel.schedule).find_broken_rule(parallel.pp_size, parallel.virtual_stages)
    if broken:
        value = getattr(parallel, broken.field)
        yield Problem(field=f"parallel.{broken.field}", value=value, rule=broken.rule, fix=broken.fix)


@rule("parallel.layers_per_stage", "parallel.pp_size", "parallel.virtual_stages", "model.num_hidden_layers")
def check_layers_per_stage(
    layers: list[int] | None, pp_size: int, virtual_stages: int, num_layers: int
) -> Iterator[Problem]:
    """There is a number for each stage, and they sum to the model's layers."""
    if layers is None or (len(layers), sum(layers)) == (pp_size * virtual_stages, num_layers):
        return
    count = "parallel.pp_size * parallel.virtual_stages" if virtual_stages > 1 else "parallel.pp_size"
    yield Problem(
        field="parallel.layers_per_stage",
        value=layers,
        rule=f"needs {pp_size * virtual_stages} numbers ({count}) that sum to {num_layers} (model.num_hidden_layers),"
        f" has {len(layers)} that sum to {sum(layers)}",
        fix="Correct it, or remove it to have the layers balanced",
    )


@rule(LAYOUT)
def check_stage_replicas(parallel: ParallelConfig) -> Iterator[Problem]:
    """There is a number for each stage, and dp_size does not say the same."""
    replicas, stages = parallel.stage_replicas, parallel.pp_size
    if replicas is None:
        return
    if len(replicas) != stages:
        yield Problem(
            field="parallel.stage_replicas",
            value=replicas,
            rule=f"needs one number for each of the {stages} stages (parallel.pp_size), has {len(replicas)}",
            fix=f"Give {stages} numbers, or use parallel.dp_size",
        )
    if parallel.dp_size is not None:
        why = "both set the number of replicas"
        yield excludes("parallel.stage_replicas", replicas, "parallel.dp_size", parallel.dp_size, why)


@rule(LAYOUT, "elastic.spares", WORLD_SIZE)
def check_world(parallel: ParallelConfig, spares: int, world_size: int | None) -> Iterator[Problem]:
    """The layout uses all ranks but the spares."""
    if world_size is None:
        return
    needed = num_ranks(parallel, world_size)
    if needed == world_size:
        return
    besides = f", besides {spares} spares (elastic.spares)" if spares else ""
    name = "dp_size" if parallel.stage_replicas is None else "stage_replicas"
    value = getattr(parallel, name)
    if value is None:
        unit = parallel.tp_size * parallel.pp_size
        replicas = f"replicas of tp_size * pp_size = {unit} ranks"
        rule_text = f"can't be derived: {world_size} ranks{besides} don't divide into {replicas}"
        fix = f"Start a multiple of {unit} ranks{besides}, or change parallel.tp_size or parallel.pp_size"
    else:
        sizes = f"tp_size {parallel.tp_size} and pp_size {parallel.pp_size}"
        rule_text = f"makes {needed} ranks with {sizes}, not {world_size}{besides}"
        fix = f"Start {needed + spares} ranks, or change it"
    yield Problem(field=f"parallel.{name}", value=value, rule=rule_text, fix=fix)
