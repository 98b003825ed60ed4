"""Resumes a run from a checkpoint, on any layout, and encodes the train state for one.

A fresh run initialises its ranges of optimizer state from the seed; a resumed one reads them from the files instead.
The train state comes with the index.

The model, the seed, the number of sequences per step (each has its own lane) and the text must be unchanged. All else
may change, and is printed: layout, precision, learning rate, length of the run ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.directory import read_index
from parallel3d.checkpoint.index import Index
from parallel3d.checkpoint.read import CheckpointReader, check_states, load_shard
from parallel3d.config.same_model import NON_WEIGHT_FIELDS
from parallel3d.config.schema import Config
from parallel3d.errors import CheckpointError
from parallel3d.pipeline.slow_replicas import NORMAL_SPEEDS, ReplicaSpeeds
from parallel3d.precision.loss_scale import LossScale
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.entry import Entry, EvaluationEntry
from parallel3d.trainer.state import TrainState

Json = dict[str, Any]

FIXED_FIELDS = ("run.seed", "batch.global_batch_size")
UNREPORTED_FIELDS = ("description", "source", "run.directory", "run.resume", "run.timeout_s", "data.cache_directory")
"""Fields whose changes are not printed."""


def state_to_json(state: TrainState) -> Json:
    """The state as JSON, without what concerns one moment: requests, save counts, the speeds of these workers."""
    entries = tuple(
        replace(entry, stop=False, leave=False, num_saved=0, num_not_saved=0, unit_times=()) for entry in state.entries
    )
    return whole_state_to_json(replace(state, entries=entries, speeds=NORMAL_SPEEDS))


def whole_state_to_json(state: TrainState) -> Json:
    """The state as JSON, all of it."""
    return {
        "iteration": state.iteration,
        "num_updates": state.num_updates,
        "tokens_read": state.tokens_read,
        "tokens_dropped": state.tokens_dropped,
        "tokens_trained": state.tokens_trained,
        "cursors": [list(cursor) for cursor in state.cursors],
        "entries": [entry.to_json() for entry in state.entries],
        "evaluations": [evaluation.to_json() for evaluation in state.evaluations],
        "loss_scale": _loss_scale_to_json(state.loss_scale),
        "watch": state.monitor.to_json(),
        "speeds": state.speeds.to_json(),
        "pacing": state.shape_schedule.to_json(),
    }


def state_from_json(data: Json, fresh: TrainState) -> TrainState:
    """The state that `state_to_json` encoded.

    `fresh`, the start state of the resuming run, gives the rules of loss scale, monitor and size schedules, and their
    start values where the older run had none.
    """
    return TrainState(
        iteration=data["iteration"],
        num_updates=data["num_updates"],
        tokens_read=data["tokens_read"],
        tokens_dropped=data.get("tokens_dropped", 0),  # older checkpoints lack it
        tokens_trained=data["tokens_trained"],
        cursors=tuple(tuple(cursor) for cursor in data["cursors"]),
        entries=tuple(Entry.from_json(entry) for entry in data["entries"]),
        evaluations=tuple(EvaluationEntry.from_json(evaluation) for evaluation in data["evaluations"]),
        loss_scale=_loss_scale(data["loss_scale"], fresh.loss_scale),
        monitor=fresh.monitor.from_json(data["watch"])
        if "watch" in data
        else fresh.monitor,  # older checkpoints lack it
        speeds=ReplicaSpeeds.from_json(data.get("speeds", [])),
        shape_schedule=fresh.shape_schedule.resumed(data.get("pacing")),
    )


def data_position_to_json(state: TrainState) -> Json:
    """The run's position in its data."""
    return {"tokens_read": state.tokens_read, "cursors": [list(cursor) for cursor in state.cursors]}


def skip_data_to(state: TrainState, data: Json) -> TrainState:
    """`state` at a later data position, which `data_position_to_json` gave for another state of the same run.

    The tokens in between are dropped: they count neither for the run's length nor for warmups by tokens.
    """
    return replace(
        state,
        tokens_read=data["tokens_read"],
        tokens_dropped=state.tokens_dropped + data["tokens_read"] - state.tokens_read,
        cursors=tuple(map(tuple, data["cursors"])),
    )


def resume(rank: RankContext, folder: Path, text: Json) -> list[str]:
    """Sets up a prepared rank to continue from a checkpoint whose bytes have been verified; returns notices.

    Raises CheckpointError when the checkpoint belongs to another run.
    """
    index = read_index(folder)
    if not index.has_optimizer_state:
        raise CheckpointError(
            f"{folder} holds weights only: no run can resume from it, but one can start from it (run.initialize_from)"
        )
    if problems := [*_conflicts(index, rank.config, text)]:
        raise CheckpointError(
            f"{folder} belongs to another run:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )
    try:
        state = state_from_json(index.facts.state, rank.state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} holds a state that this version can't read: {error!r}") from None
    was, size = len(state.cursors[0]), rank.layout.cursor_size
    if was != size:
        raise CheckpointError(
            f"{folder} belongs to another run: its lane cursors have {was} numbers, this run's have {size}. The sources"
            " of data.blend differ, or only one of the two runs has a blend"
        )
    rank.state = state
    rank.resumed_from = rank.state.iteration
    reader = CheckpointReader(folder, index)
    check_states(reader, rank.optimizer.buckets)
    load = partial(load_shard, reader, tp=rank.tp_shard)
    rank.optimizer.start_from(rank.state.iteration, load)
    changed = ", ".join(_changes(index.facts.config, rank.config.model_dump()))
    message = f"resuming from {folder}, after step {rank.state.iteration}"
    return [message, *([f"changed since then: {changed}"] if changed else [])]


def _conflicts(index: Index, config: Config, text: Json) -> Iterator[str]:
    """The reasons why a run of `config` can't resume from the checkpoint."""
    was, now = _flat(index.facts.config), _flat(config.model_dump())
    for field in sorted(was.keys() | now.keys()):
        is_model = field.startswith("model.") and field.removeprefix("model.") not in NON_WEIGHT_FIELDS
        if (is_model or field in FIXED_FIELDS) and was.get(field) != now.get(field):
            yield f"{field} was {was.get(field)!r}, it is {now.get(field)!r}"
    before = index.facts.text
    if before.get("fingerprint") != text.get("fingerprint"):
        different = [
            f"{name} was {before.get(name)}, it is {text[name]}"
            for name in text
            if name != "fingerprint" and before.get(name) != text[name]
        ]
        yield f"the text differs ({'; '.join(different) or 'though its size is the same'}): lanes can't continue"


def _changes(before: Json, now: Json) -> Iterator[str]:
    was, is_now = _flat(before), _flat(now)
    for field in is_now:
        if field in was and was[field] != is_now[field] and not field.startswith(UNREPORTED_FIELDS):
            yield f"{field} {was[field]} -> {is_now[field]}"


def _flat(tree: Json, path: str = "") -> Json:
    """A nested object as one level, with dotted names."""
    flat: Json = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{path}{name}.") if isinstance(value, dict) and value else {f"{path}{name}": value}
    return flat


def _loss_scale_to_json(loss_scale: LossScale) -> Json | None:
    """The loss scale's state; None under a policy that does not scale."""
    return {"scale": loss_scale.scale, "num_finite": loss_scale.num_finite} if loss_scale.is_dynamic else None


def _loss_scale(saved: Json | None, fresh: LossScale) -> LossScale:
    """The saved scale if both runs scale the loss; else this run's start value."""
    if saved is None or not fresh.is_dynamic:
        return fresh
    return replace(fresh, scale=saved["scale"], num_finite=saved["num_finite"])
