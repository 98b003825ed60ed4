"""Starts a run with given weights instead of random ones (`run.initialize_from`).

They come from a Hugging Face folder (with config.json) or from a checkpoint (with index.json; weights-only or complete,
but only its weights are read). The launcher resolves the path and checks the folder before workers start; each worker
then reads the slices that it holds.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from parallel3d.checkpoint.directory import LATEST, read_index, verify_checkpoint
from parallel3d.checkpoint.fetch import local_checkpoint
from parallel3d.checkpoint.index import INDEX, Index
from parallel3d.config.same_model import model_differences
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.errors import CheckpointError, ConfigError, Problem
from parallel3d.models.hf_config import read_hf_config
from parallel3d.monitor.run_folder import CONFIG, ENVIRONMENT

if TYPE_CHECKING:
    from parallel3d.layers.init import InitMethod


def check_initial_weights(config: Config) -> None:
    """Raises ConfigError if the folder holds another model, naming all differences; CheckpointError if it is damaged.

    The weights of a Hugging Face folder are checked when they are read.
    """
    if config.run.initialize_from is None:
        return
    folder = Path(config.run.initialize_from)
    if problems := [
        Problem(
            field=f"model.{field}",
            value=ours,
            rule=f"the weights in run.initialize_from = {folder} belong to a model with {theirs!r}",
            fix=f"Set it to {theirs!r}",
        )
        for field, ours, theirs in model_differences(config.model, read_model_config(folder))
    ]:
        raise ConfigError(problems)
    if (folder / INDEX).is_file():
        verify_checkpoint(folder)


def resolve_initial_weights(config: Config) -> Config:
    """The configuration with the resolved folder: for a run its newest checkpoint, links followed. So all workers
    read the same weights, even if the link changes. Of an address its copy in the cache, which is made here."""
    if config.run.initialize_from is None:
        return config
    folder = local_checkpoint(config.run.initialize_from, str(config.data.cache_directory))
    settled = str(find_checkpoint(folder) or folder.resolve())
    return config.model_copy(update={"run": config.run.model_copy(update={"initialize_from": settled})})


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint in a folder, or the newest of a run or of its checkpoint directory; links are followed."""
    folders = (path, path / LATEST, checkpoints_of_run(path) / LATEST)
    return next((folder.resolve() for folder in folders if (folder / INDEX).is_file()), None)


def checkpoints_of_run(folder: Path) -> Path:
    """The checkpoint directory of a run: in its folder, which may have been moved, or where its config.json says."""
    inside = folder / "checkpoints"
    if not inside.is_dir():
        with suppress(OSError, ValueError, KeyError, TypeError):
            return Path(json.loads((folder / CONFIG).read_text())["checkpoint"]["directory"])
    return inside


def read_model_config(folder: Path) -> ModelConfig:
    """The resolved model whose weights a folder holds; raises CheckpointError if it holds none."""
    if (folder / INDEX).is_file():
        return model_config_of(read_index(folder), folder)
    if (folder / ENVIRONMENT).is_file() and (folder / CONFIG).is_file():  # not that of a Hugging Face folder
        raise CheckpointError(
            f"{folder} is a run without a checkpoint, in {checkpoints_of_run(folder)}: runs save with "
            "checkpoint.every or checkpoint.save_at_end, and a later start in the same folder moves earlier ones to "
            "checkpoints/previous-N"
        )
    return read_hf_config(folder)[0]


def model_config_of(index: Index, folder: Path) -> ModelConfig:
    """The resolved model of a checkpoint."""
    try:
        return ModelConfig.model_validate(index.facts.config["model"])
    except (KeyError, ValidationError) as error:
        raise CheckpointError(f"{folder} holds a model that this version can't read: {error!r}") from None


def open_initial_weights(config: Config) -> InitMethod | None:
    """Returns the function that reads a rank's share of each parameter; None if the seed decides."""
    if config.run.initialize_from is None:
        return None
    return open_weights(Path(config.run.initialize_from))


def open_weights(folder: Path) -> InitMethod:
    """Returns the function that reads a rank's share of each parameter of a checkpoint or a Hugging Face folder."""
    if (folder / INDEX).is_file():
        from parallel3d.checkpoint.read import CheckpointReader, load_weight  # imports torch, as do those below

        return partial(load_weight, CheckpointReader(folder, read_index(folder)))
    from parallel3d.models.hf import check_zeros, read_local_shard
    from parallel3d.models.hf_folder import open_hf_folder

    source = open_hf_folder(folder)
    check_zeros(source.table, source.read)
    return lambda sharding, *, tp: read_local_shard(sharding, source.table, source.read, tp=tp)
