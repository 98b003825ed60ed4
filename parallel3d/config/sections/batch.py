"""The configuration's section `batch`, its arithmetic, and its rules."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import PositiveInt

from parallel3d.config.rule import WORLD_SIZE, must_be_multiple, rule, too_large
from parallel3d.config.sections.parallel import LAYOUT, ParallelConfig, most_replicas
from parallel3d.config.sections.section import Section
from parallel3d.errors import Problem

BATCH_SIZES = "batch: global_batch_size micro_batch_size num_micro_batches"
"""What a rule reads that needs the three sizes (config/rule.py)."""


class BatchConfig(Section):
    """Sizes of one step. Give two of the three sizes; the third follows from
    global_batch_size = micro_batch_size * num_micro_batches."""

    global_batch_size: PositiveInt | None = None
    """Sequences of one step, over all replicas."""
    micro_batch_size: PositiveInt | None = None
    """Sequences that a replica processes at once."""
    num_micro_batches: PositiveInt | None = None
    """Micro-batches of one step, counted over all replicas; at least as many as the replicas of any stage."""
    sequence_length: PositiveInt
    """Tokens of a sequence."""


def has_batch_sizes(batch: BatchConfig) -> bool:
    """Whether at least two of the three sizes are given."""
    return [batch.global_batch_size, batch.micro_batch_size, batch.num_micro_batches].count(None) <= 1


def batch_sizes(batch: BatchConfig) -> tuple[int, int, int]:
    """(global_batch_size, micro_batch_size, num_micro_batches), the missing one derived. Needs at least two."""
    total, micro, count = batch.global_batch_size, batch.micro_batch_size, batch.num_micro_batches
    if micro is not None and count is not None:
        return (micro * count if total is None else total), micro, count
    assert total is not None, "batch_sizes needs two of the three sizes"
    if micro is not None:
        return total, micro, total // micro
    assert count is not None, "batch_sizes needs two of the three sizes"
    return total, total // count, count


@rule(BATCH_SIZES)
def check_batch_sizes(batch: BatchConfig) -> Iterator[Problem]:
    """Two of the sizes are given, and all agree."""
    if not has_batch_sizes(batch):
        given = batch.model_dump(exclude_none=True)
        yield Problem(
            field="batch",
            value=given,
            rule="needs two of global_batch_size, micro_batch_size and num_micro_batches; the third follows",
            fix=f"Add {'one of the others' if len(given) > 1 else 'two of them'}",
        )
        return
    total, micro, count = batch_sizes(batch)
    if total == micro * count:
        return
    if batch.micro_batch_size and batch.num_micro_batches:
        rule_text = f"must be batch.micro_batch_size ({micro}) * batch.num_micro_batches ({count})"
        fix = f"Remove one of the three, or use {micro * count}"
    else:
        name = "micro_batch_size" if batch.micro_batch_size else "num_micro_batches"
        divisor = micro if batch.micro_batch_size else count
        low = total // divisor * divisor
        rule_text = f"must be a multiple of batch.{name} ({divisor})"
        fix = f"Use {f'{low} or ' if low else ''}{low + divisor}, or change batch.{name}"
    yield Problem(field="batch.global_batch_size", value=total, rule=rule_text, fix=fix)


@rule(BATCH_SIZES, LAYOUT, WORLD_SIZE)
def check_micro_batches_for_all(
    batch: BatchConfig, parallel: ParallelConfig, world_size: int | None
) -> Iterator[Problem]:
    """Every replica has a micro-batch."""
    if not has_batch_sizes(batch):
        return
    total, micro, count = batch_sizes(batch)
    most = most_replicas(parallel, world_size)
    if total != micro * count or count >= most:
        return
    sizes = f"{count} micro-batches a step (batch)"
    fix = f"smaller micro-batches, or a batch.global_batch_size of {micro * most} or more"
    for name in ("dp_size", "stage_replicas"):
        if (value := getattr(parallel, name)) is not None:
            rule_text = f"is too many for {sizes}: each replica needs at least one"
            yield Problem(
                field=f"parallel.{name}", value=value, rule=rule_text, fix=f"Use at most {count} replicas, {fix}"
            )
            return
    yield Problem(
        field="batch.num_micro_batches",
        value=count,
        rule=f"is too few for the {most} replicas that {world_size} ranks make: each needs at least one micro-batch",
        fix=f"Use fewer ranks, {fix}",
    )


@rule("model.max_position_embeddings", "batch.sequence_length")
def check_positions(positions: int | None, length: int) -> Iterator[Problem]:
    """The model has a position for every token."""
    if positions is not None and length > positions:
        yield too_large("batch.sequence_length", length, "model.max_position_embeddings", positions)


@rule("batch.sequence_length", "parallel.tp_size", "parallel.sequence_parallel")
def check_sequence_shards(length: int, tp_size: int, sequence_parallel: bool) -> Iterator[Problem]:
    """Sequence parallelism splits sequences evenly."""
    if sequence_parallel:
        why = "parallel.sequence_parallel splits sequences evenly"
        yield from must_be_multiple("batch.sequence_length", length, "parallel.tp_size", tp_size, why)
