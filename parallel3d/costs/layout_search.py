"""Ranks the layouts of a model on given devices, and says why the best wins. Pure.

Every combination of tensor and pipeline parallelism, micro-batch, recomputation, schedule and precision policy that the
rules of the configuration allow is estimated; replicas take the devices that are left. The fastest comes first: the
devices are given, so it is the cheapest, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from parallel3d.config.derived import num_key_value_heads
from parallel3d.config.schema import Config
from parallel3d.costs.layered_parameters import LayeredParameters
from parallel3d.costs.layout_estimate import LayoutEstimate, estimate_layout
from parallel3d.costs.machines import Machines
from parallel3d.costs.rank_memory import estimate_memory
from parallel3d.errors import UserError
from parallel3d.pipeline.partition import partition_layers
from parallel3d.pipeline.schedules import SCHEDULES
from parallel3d.rehearsal.device_rows import GIB
from parallel3d.trainer.plans import costs_of

MOST_TP, MOST_PP = 64, 32
MOST_MICRO_BATCH = 64
RECOMPUTE = ("none", "selective", "full")
SCHEDULE_CHUNKS = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
"""Schedules with their chunks a stage. GPipe idles as 1f1b does, and holds more."""


@dataclass(frozen=True, kw_only=True)
class LayoutChoice:
    """The choices of one candidate."""

    tp: int
    pp: int
    dp: int
    micro_batch: int
    recompute: str
    schedule: str
    policy: str

    @staticmethod
    def of(config: Config) -> LayoutChoice:
        parallel, batch = config.parallel, config.batch
        assert parallel.dp_size is not None and batch.micro_batch_size is not None, "needs a straight, resolved grid"
        return LayoutChoice(
            tp=parallel.tp_size,
            pp=parallel.pp_size,
            dp=parallel.dp_size,
            micro_batch=batch.micro_batch_size,
            recompute=parallel.recompute,
            schedule=parallel.schedule if parallel.pp_size > 1 else "1f1b",
            policy=config.precision.policy,
        )

    def __str__(self) -> str:
        schedule = f", {self.schedule}" if self.pp > 1 else ""
        return (
            f"tp{self.tp} pp{self.pp} dp{self.dp}, micro-batch {self.micro_batch}, recompute {self.recompute}"
            f"{schedule}, {self.policy}"
        )


@dataclass(frozen=True, kw_only=True)
class RankedLayouts:
    """The candidates that fit, fastest first, and the least memory of those that do not."""

    estimates: tuple[LayoutEstimate, ...]
    num_tried: int
    too_large: dict[LayoutChoice, float]
    """GiB that a rank would need."""

    @cached_property
    def layouts(self) -> tuple[LayoutChoice, ...]:
        return tuple(LayoutChoice.of(each.config) for each in self.estimates)

    def place_of(self, layout: LayoutChoice) -> int | None:
        """The place of a layout, counted from 1; None if it does not fit, or was not tried."""
        return self.layouts.index(layout) + 1 if layout in self.layouts else None


def rank_layouts(
    config: Config, parts: LayeredParameters, machines: Machines, policies: Sequence[str] = ()
) -> RankedLayouts:
    """Estimates all layouts of a resolved configuration. `policies` default to its own."""
    found, too_large, limit, num_tried = [], {}, machines.device.memory_gib * GIB, 0
    for layout in candidate_layouts(config, machines.num_devices, policies or (config.precision.policy,)):
        num_tried += 1
        candidate = with_layout(config, layout)
        stages = estimate_memory(candidate, parts)
        if (most := max(stage.total for stage in stages)) > limit:
            too_large[layout] = most / GIB
        else:
            found.append(estimate_layout(candidate, parts, machines, stages))
    found.sort(key=lambda each: (each.step_s, each.worst.total))
    return RankedLayouts(estimates=tuple(found), num_tried=num_tried, too_large=too_large)


def candidate_layouts(config: Config, num_devices: int, policies: Sequence[str]) -> Iterator[LayoutChoice]:
    """Yields all layouts that the rules allow and that use every device."""
    model, batch = config.model, config.batch
    assert batch.global_batch_size is not None
    heads, keys = model.num_attention_heads, num_key_value_heads(model)
    for tp in range(1, min(MOST_TP, num_devices) + 1):
        fits_keys = keys % tp == 0 or tp % keys == 0
        if num_devices % tp or heads % tp or model.intermediate_size % tp or not fits_keys:
            continue
        for pp in range(1, min(MOST_PP, model.num_hidden_layers) + 1):
            if num_devices % (tp * pp):
                continue
            dp = num_devices // (tp * pp)
            for size in _micro_batches(batch.global_batch_size, dp):
                for schedule in _schedules(pp, model.num_hidden_layers, -(-batch.global_batch_size // (size * dp))):
                    for recompute in RECOMPUTE:
                        for policy in policies:
                            yield LayoutChoice(
                                tp=tp,
                                pp=pp,
                                dp=dp,
                                micro_batch=size,
                                recompute=recompute,
                                schedule=schedule,
                                policy=policy,
                            )


def why_not_tried(layout: LayoutChoice) -> str:
    """What of a layout that can use the devices is not among the candidates."""
    if layout.tp > MOST_TP or layout.pp > MOST_PP:
        return f"more than tp{MOST_TP} and pp{MOST_PP}"
    if layout.micro_batch > MOST_MICRO_BATCH or layout.micro_batch & (layout.micro_batch - 1):
        return f"micro-batches other than powers of two up to {MOST_MICRO_BATCH}"
    if layout.schedule not in SCHEDULE_CHUNKS:
        return f"schedules other than {', '.join(SCHEDULE_CHUNKS)}"
    return "its schedule with these sizes, or its number format"


def _micro_batches(global_batch: int, dp: int) -> Iterator[int]:
    """Sizes that divide the batch, with a micro-batch for every replica; some may have one more than others."""
    size = 1
    while size <= MOST_MICRO_BATCH:
        if global_batch % size == 0 and global_batch // size >= dp:
            yield size
        size *= 2


def _schedules(pp: int, num_layers: int, num_micro_batches: int) -> Iterator[str]:
    for name, chunks in SCHEDULE_CHUNKS.items():
        if pp == 1 and name != "1f1b":
            continue
        rules = SCHEDULES[name]
        if pp * chunks <= num_layers and not rules.find_broken_rule(pp, chunks) and rules.suits(pp, num_micro_batches):
            yield name


def with_layout(config: Config, layout: LayoutChoice) -> Config:
    """The configuration with another layout, on as many devices as it needs."""
    batch = config.batch
    assert batch.global_batch_size is not None
    chunks = SCHEDULE_CHUNKS.get(layout.schedule, config.parallel.virtual_stages)
    sharded = layout.tp > 1 and batch.sequence_length % layout.tp == 0
    costs = costs_of(config)
    parallel = config.parallel.model_copy(
        update={
            "tp_size": layout.tp,
            "pp_size": layout.pp,
            "dp_size": layout.dp,
            "stage_replicas": None,
            "recompute": layout.recompute,
            "schedule": layout.schedule,
            "virtual_stages": chunks,
            "sequence_parallel": sharded,
            "layers_per_stage": _split(
                config.model.num_hidden_layers, layout.pp * chunks, costs.layer, costs.embedding, costs.head
            ),
        }
    )
    count = batch.global_batch_size // layout.micro_batch
    sizes = {"micro_batch_size": layout.micro_batch, "num_micro_batches": count}
    return config.model_copy(
        update={
            "parallel": parallel,
            "batch": batch.model_copy(update=sizes),
            "precision": config.precision.model_copy(update={"policy": layout.policy}),
        }
    )


@cache
def _split(num_layers: int, num_stages: int, layer: int, embedding: int, head: int) -> list[int]:
    """Layers of each virtual stage, remembered: many candidates share it. The list is not to be changed."""
    return [len(each) for each in partition_layers([layer] * num_layers, num_stages, embedding, head)]


def on_machines(config: Config, machines: Machines) -> Config:
    """The configuration with as many replicas as the machines have devices for.

    Raises UserError if its tensor- and pipeline-parallel sizes do not divide them, or the batch is too small.
    """
    if obstacle := find_obstacle(config, machines.num_devices):
        raise UserError(f"--devices {machines}: {obstacle.why}. {obstacle.fix}")
    replicas = machines.num_devices // (config.parallel.tp_size * config.parallel.pp_size)
    return config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"dp_size": replicas, "stage_replicas": None})}
    )


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """Why a configuration's layout can't use a number of devices, and what would help."""

    why: str
    fix: str


def find_obstacle(config: Config, num_devices: int) -> Obstacle | None:
    """None if the layout can use all of these devices."""
    unit, count = config.parallel.tp_size * config.parallel.pp_size, config.batch.num_micro_batches
    assert count is not None
    if num_devices % unit:
        return Obstacle(
            why=f"{num_devices} devices do not divide into replicas of tp_size * pp_size = {unit}",
            fix=f"Use a multiple of {unit}, change the sizes, or let --search choose them",
        )
    if (replicas := num_devices // unit) > count:
        return Obstacle(
            why=f"{replicas} replicas need as many micro-batches, and a step has {count}",
            fix="Raise batch.global_batch_size, use fewer devices, or let --search choose",
        )
    return None
