"""The three sizes of a batch in a DeepSpeed file, by DeepSpeed's rule.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x replicas

The replicas are those of the configuration's layout. Two sizes give the third. An absent
gradient_accumulation_steps is 1 where one of the others is given alone; alone it says nothing (DeepSpeed's
`_set_batch_related_parameters`). "auto" stands for what the configuration has: batch.global_batch_size,
batch.micro_batch_size, and the accumulation that follows from the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from parallel3d.config.deepspeed_values import AUTO, POSITIVE_INTEGER, DeepSpeedSettings, OwnConfig

TOTAL, MICRO, STEPS = BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Replicas(NamedTuple):
    """Replicas of the layout: their number (None: stages differ in it), and where it comes from."""

    number: int | None
    why: str
    is_free: bool = False
    """Whether nothing sets the number, so that the file may."""

    def __str__(self) -> str:
        return f"{self.number} replica{'' if self.number == 1 else 's'} ({self.why})"


def own_replicas(own: OwnConfig) -> Replicas:
    """Replicas of each stage in the configuration's layout, on the launcher's ranks if there is a launcher."""
    per_stage, dp_size = own.value("parallel", "stage_replicas"), own.integer("parallel", "dp_size")
    if isinstance(per_stage, list) and per_stage:
        is_even = POSITIVE_INTEGER.fits(per_stage[0]) and per_stage.count(per_stage[0]) == len(per_stage)
        return Replicas(per_stage[0] if is_even else None, "parallel.stage_replicas")
    if dp_size is not None:
        return Replicas(dp_size, "parallel.dp_size")
    if own.world_size is None:
        return Replicas(1, "parallel.dp_size is null", is_free=True)
    in_grid = own.world_size - (own.integer("elastic", "spares") or 0)
    per_replica = (own.integer("parallel", "tp_size") or 1) * (own.integer("parallel", "pp_size") or 1)
    return Replicas(max(1, in_grid // per_replica), f"of the launcher's {own.world_size} ranks")


def own_sizes(own: OwnConfig) -> tuple[int | None, int | None]:
    """The configuration's batch.global_batch_size and batch.micro_batch_size, the missing one derived."""
    names = ("global_batch_size", "micro_batch_size", "num_micro_batches")
    total, micro, count = (own.integer("batch", name) for name in names)
    if count is not None:
        micro, total = micro or (total and total // count), total or (micro and micro * count)
    return total, micro


@dataclass(kw_only=True)
class Sizes:
    """The three sizes; None where one is not known yet."""

    total: int | None
    micro: int | None
    steps: int | None


def map_batch(settings: DeepSpeedSettings, raw: Mapping[str, Any]) -> None:
    """Sets the batch, and the number of replicas where all three sizes are given and nothing else sets it."""
    given = {name: raw[name] for name in BATCH if raw.get(name) is not None}
    read = {name: settings.read(name, value, POSITIVE_INTEGER) for name, value in given.items()}
    if any(read[name] is None and value != AUTO for name, value in given.items()) or not any(read.values()):
        return  # refused, or left to the configuration as a whole
    replicas = own_replicas(settings.own)
    sizes = Sizes(total=read.get(TOTAL), micro=read.get(MICRO), steps=read.get(STEPS))
    if replicas.is_free and None not in (sizes.total, sizes.micro, sizes.steps):
        replicas = _replicas_of(sizes) or replicas
        settings.fields["parallel.dp_size"] = replicas.number
    own_total, own_micro = own_sizes(settings.own)
    for name, field, value in ((TOTAL, "global_batch_size", own_total), (MICRO, "micro_batch_size", own_micro)):
        if given.get(name) == AUTO and value is None:
            settings.refuse(name, AUTO, f"needs batch.{field} in the configuration", "Set it there, or give the size")
            return
    sizes.total = own_total if given.get(TOTAL) == AUTO else sizes.total
    sizes.micro = own_micro if given.get(MICRO) == AUTO else sizes.micro
    if sizes.total is None and sizes.micro is None:
        rule = f"says nothing without {TOTAL} or {MICRO}"
        settings.refuse(STEPS, sizes.steps, rule, f'Give one of them, or "{AUTO}" for the configuration\'s')
    elif replicas.number is None:
        rule = "is a product with the number of replicas, and the stages differ in it (parallel.stage_replicas)"
        name = next(name for name in BATCH if read.get(name))
        settings.refuse(name, read[name], rule, "Set parallel.dp_size in its place, or the sizes in batch")
    else:
        _derive(settings, given, sizes, replicas)


def _replicas_of(sizes: Sizes) -> Replicas | None:
    """The replicas that three given sizes imply; None where they imply none."""
    assert sizes.total and sizes.micro and sizes.steps
    count, rest = divmod(sizes.total, sizes.micro * sizes.steps)
    return Replicas(count, "parallel.dp_size") if count and not rest else None


def _derive(settings: DeepSpeedSettings, given: Mapping[str, Any], sizes: Sizes, replicas: Replicas) -> None:
    """Fills in what follows from the known sizes, and sets the batch; refuses sizes whose product is another."""
    origin = ""
    if sizes.steps is None and None in (sizes.total, sizes.micro):  # one size alone
        sizes.steps, origin = 1, "DeepSpeed's default"
        if given.get(STEPS) == AUTO:
            sizes.steps, origin = _own_steps(settings, replicas), "the configuration's"
        if sizes.steps is None:
            return
    assert replicas.number is not None
    factors = {MICRO: sizes.micro, STEPS: sizes.steps}
    known = prod(size for size in factors.values() if size) * replicas.number
    if sizes.total is None:
        sizes.total = known
    is_whole = None not in factors.values()
    if sizes.total % known or (is_whole and sizes.total != known):
        product = " x ".join([*(f"{name} ({size})" for name, size in factors.items() if size), str(replicas)])
        value = f"{AUTO} ({sizes.total} in the configuration)" if given.get(TOTAL) == AUTO else sizes.total
        fix = "Change one of the sizes, or remove one: it follows from the others"
        settings.refuse(TOTAL, value, f"must be {'' if is_whole else 'a multiple of '}{product}", fix)
        return
    sizes.micro = sizes.micro or sizes.total // known
    settings.fields |= {"batch.global_batch_size": sizes.total, "batch.micro_batch_size": sizes.micro}
    settings.fields["batch.num_micro_batches"] = None  # it follows
    if origin:
        product = f"{MICRO} {sizes.micro} x {STEPS} {sizes.steps} ({origin}) x {replicas}"
        settings.notices.append(f"{TOTAL} {sizes.total} = {product}")


def _own_steps(settings: DeepSpeedSettings, replicas: Replicas) -> int | None:
    """The accumulation of the configuration's own batch; refused where it is not whole."""
    total, micro = own_sizes(settings.own)
    assert replicas.number is not None
    if total and micro and total % (micro * replicas.number) == 0:
        return total // (micro * replicas.number)
    rule = f"needs a batch.global_batch_size that is a multiple of batch.micro_batch_size x {replicas}"
    settings.refuse(STEPS, AUTO, f"{rule}; they are {total} and {micro}", "Give the number")
    return None
