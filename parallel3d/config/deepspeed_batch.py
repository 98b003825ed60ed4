"""The three sizes of a batch in a DeepSpeed file: any two give the third."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel3d.config.deepspeed_values import POSITIVE_INTEGER, DeepSpeedSettings

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def map_batch(settings: DeepSpeedSettings, raw: Mapping[str, Any]) -> None:
    """train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x replicas: any two give the
    third, and the replicas where all three are given."""
    dp_size = settings.own.integer("parallel", "dp_size")
    read = [raw.get(name) and settings.read(name, raw[name], POSITIVE_INTEGER) for name in BATCH]
    total, micro, steps = sizes = read
    if sizes == [None] * 3:
        return
    if steps is not None and None in (total, micro) and dp_size is None:
        rule = "counts micro-batches of one replica, and the number of replicas is not known"
        settings.refuse(BATCH[2], steps, rule, "Set parallel.dp_size, or give the other two sizes")
        return
    if total is not None and micro is not None and steps is not None:
        replicas, rest = divmod(total, micro * steps)
        if rest or dp_size not in (None, replicas):
            have = f"{dp_size} replicas (parallel.dp_size)" if dp_size and not rest else "a whole number of replicas"
            rule = f"must be {BATCH[1]} ({micro}) x {BATCH[2]} ({steps}) x {have}"
            settings.refuse(BATCH[0], total, rule, "Remove one of the three")
            return
        settings.fields["parallel.dp_size"] = replicas
    per_micro = (dp_size or 1) * (steps or 1)
    if total is None and micro is not None and steps is not None:
        total = micro * per_micro
    if micro is None and total is not None and steps is not None:
        if total % per_micro:
            rule = f"must be a multiple of {BATCH[2]} ({steps}) x {dp_size} replicas (parallel.dp_size)"
            settings.refuse(BATCH[0], total, rule, "Change it")
            return
        micro = total // per_micro
    known = {"global_batch_size": total, "micro_batch_size": micro}
    settings.fields |= {f"batch.{name}": value for name, value in known.items() if value is not None}
    if None not in known.values():
        settings.fields["batch.num_micro_batches"] = None  # it follows
