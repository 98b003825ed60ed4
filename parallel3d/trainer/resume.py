"""A run's state as a checkpoint keeps it, and the way from a checkpoint into a run.

The start of a run is a recovery from nothing: every rank makes its ranges from the seed. A resumed run makes them from
the files instead, on whatever layout; everything else is a fold over entries, and comes with the index.

What must be as it was: the model, the seed and the number of sequences a step (each has a lane of its own), and the
text. All else may differ, and is told: layout, precision, learning rate, length of the run ...
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
from parallel3d.precision.loss_scale import LossScale
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.entry import Entry, EvaluationEntry
from parallel3d.trainer.state import TrainState

Json = dict[str, Any]

FIXED_FIELDS = ("run.seed", "batch.global_batch_size")
UNREPORTED_FIELDS = ("description", "source", "run.directory", "run.resume", "run.timeout_s", "data.cache_directory")
"""Fields whose change is nobody's concern."""


def state_to_json(state: TrainState) -> Json:
    """Everything but what one moment asked for: a request to stop, words on a save."""
    return {
        "iteration": state.iteration,
        "num_updates": state.num_updates,
        "tokens_read": state.tokens_read,
        "tokens_dropped": state.tokens_dropped,
        "tokens_trained": state.tokens_trained,
        "cursors": [list(cursor) for cursor in state.cursors],
        "entries": [
            replace(entry, stop=False, leave=False, num_saved=0, num_not_saved=0).to_json() for entry in state.entries
        ],
        "evaluations": [evaluation.to_json() for evaluation in state.evaluations],
        "loss_scale": _loss_scale_to_json(state.loss_scale),
        "watch": state.monitor.to_json(),
        "pacing": state.shape_schedule.to_json(),
    }


def state_from_json(data: Json, fresh: TrainState) -> TrainState:
    """The state; `fresh`, that of a run at its start, gives the rules of loss scale and pacing, and
    where those begin if the older run had none."""
    return TrainState(
        iteration=data["iteration"],
        num_updates=data["num_updates"],
        tokens_read=data["tokens_read"],
        tokens_dropped=data.get("tokens_dropped", 0),  # older checkpoints have dropped none
        tokens_trained=data["tokens_trained"],
        cursors=tuple(tuple(cursor) for cursor in data["cursors"]),
        entries=tuple(Entry.from_json(entry) for entry in data["entries"]),
        evaluations=tuple(EvaluationEntry.from_json(evaluation) for evaluation in data["evaluations"]),
        loss_scale=_loss_scale(data["loss_scale"], fresh.loss_scale),
        monitor=fresh.monitor.from_json(data["watch"]) if "watch" in data else fresh.monitor,  # older ones have none
        shape_schedule=fresh.shape_schedule.resumed(data.get("pacing")),
    )


def data_position_to_json(state: TrainState) -> Json:
    """Where a run stands in its data, and nothing else of it."""
    return {"tokens_read": state.tokens_read, "cursors": [list(cursor) for cursor in state.cursors]}


def skip_data_to(state: TrainState, data: Json) -> TrainState:
    """`state` with the place in its data that `data_position_to_json` told of another state of the same run.

    What lies in between is dropped: it counts neither for the run's length nor for a warmup by tokens.
    """
    return replace(
        state,
        tokens_read=data["tokens_read"],
        tokens_dropped=state.tokens_dropped + data["tokens_read"] - state.tokens_read,
        cursors=tuple(map(tuple, data["cursors"])),
    )


def resume(rank: RankContext, folder: Path, text: Json) -> list[str]:
    """Lets a prepared rank begin from a checkpoint, of which the bytes have been verified; what a person shall know.

    Raises CheckpointError for one of another run.
    """
    index = read_index(folder)
    if not index.has_optimizer_state:
        raise CheckpointError(
            f"{folder} holds weights alone: no run goes on from it, but one can start from it (run.initialize_from)"
        )
    if problems := [*_conflicts(index, rank.config, text)]:
        raise CheckpointError(f"{folder} is of another run:\n" + "\n".join(f"  - {problem}" for problem in problems))
    try:
        state = state_from_json(index.facts.state, rank.state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} holds a state that this version can't read: {error!r}") from None
    was, size = len(state.cursors[0]), rank.layout.cursor_size
    if was != size:
        raise CheckpointError(
            f"{folder} is of another run: its lanes' places are of {was} numbers, these of {size}: data.blend has other"
            " sources, or there is one where there was none"
        )
    rank.state = state
    rank.resumed_from = rank.state.iteration
    reader = CheckpointReader(folder, index)
    check_states(reader, rank.optimizer.buckets)
    load = partial(load_shard, reader, tp_rank=rank.coordinates.tp, tp_size=rank.first_grid.tp_size)
    rank.optimizer.start_from(rank.state.iteration, load)
    changed = ", ".join(_changes(index.facts.config, rank.config.model_dump()))
    message = f"going on from {folder}, after step {rank.state.iteration}"
    return [message, *([f"changed since then: {changed}"] if changed else [])]


def _conflicts(index: Index, config: Config, text: Json) -> Iterator[str]:
    """What keeps a run of `config` from going on where the checkpoint's stood, in sentences."""
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
        yield f"the text is another one ({'; '.join(different) or 'of the same size'}): its lanes can't be gone on with"


def _changes(before: Json, now: Json) -> Iterator[str]:
    was, is_now = _flat(before), _flat(now)
    for field in is_now:
        if field in was and was[field] != is_now[field] and not field.startswith(UNREPORTED_FIELDS):
            yield f"{field} {was[field]} -> {is_now[field]}"


def _flat(tree: Json, path: str = "") -> Json:
    """Nested objects by their fields' full names."""
    flat: Json = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{path}{name}.") if isinstance(value, dict) and value else {f"{path}{name}": value}
    return flat


def _loss_scale_to_json(loss_scale: LossScale) -> Json | None:
    """None where the policy scales nothing."""
    return {"scale": loss_scale.scale, "num_finite": loss_scale.num_finite} if loss_scale.is_dynamic else None


def _loss_scale(saved: Json | None, fresh: LossScale) -> LossScale:
    """Goes on where both runs scale; where scaling begins with this one, it begins as this one says."""
    if saved is None or not fresh.is_dynamic:
        return fresh
    return replace(fresh, scale=saved["scale"], num_finite=saved["num_finite"])
