"""The configuration to begin with for a Hugging Face folder: `convert config` prints it, `--config FOLDER` takes it.

A command that is given a folder in place of a file writes the configuration into the cache and reads it there, so that
`parallel3d train --config FOLDER 'data.sources=["my_text.txt"]'` trains from the folder's weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from parallel3d.checkpoint.fetch import local_checkpoint
from parallel3d.config.derived import num_parameters
from parallel3d.config.json_file import apply_override
from parallel3d.config.load import CACHE_DIRECTORY, load_config, resolve
from parallel3d.config.schema import ModelConfig
from parallel3d.config.starter import starter_config
from parallel3d.data.run_data import open_run_corpus
from parallel3d.data.tokenizer_files import holds_tokenizer
from parallel3d.elastic.guardian.launcher_env import read_launcher_env
from parallel3d.errors import UserError
from parallel3d.models.initial_weights import find_checkpoint, read_model_config
from parallel3d.parallel.abort import AbortToken


def write_folder_config(folder: Path, overrides: Sequence[str]) -> Path:
    """Writes the configuration for a Hugging Face folder and the texts among `overrides` (data.sources) into the cache;
    says so on stderr and returns its path.

    Raises UserError for a folder that is not usable, and under a launcher, whose processes would each do the same.
    """
    texts = _texts_in(overrides)
    command = shlex.join(["parallel3d", "convert", "config", str(folder), *texts])
    made = f"{folder.resolve().name}.json"
    if read_launcher_env(os.environ) is not None:
        raise UserError(
            f"--config {folder}: under a launcher give a file, made once for all processes: {command} > {made}"
        )
    raw, num_read = make_folder_config(folder, texts, num_tokens=None, overrides=overrides)
    text = json.dumps(raw, indent=2) + "\n"
    path = Path(CACHE_DIRECTORY).expanduser() / "configs" / hashlib.sha256(text.encode()).hexdigest()[:16] / made
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(text)
        os.replace(scratch, path)
    except OSError as error:
        reason = f"can't write {path} ({error.strerror})"
        raise UserError(f"--config {folder}: {reason}; make a file of your own: {command} > {made}") from None
    lines = [*describe_folder_config(raw, num_read), f"to change it, make a file of it: {command} > {made}"]
    print("\n".join(f"{folder}: {line}" for line in lines), file=sys.stderr)
    return path


def make_folder_config(
    source: Path | str, texts: Sequence[str], num_tokens: int | None, overrides: Sequence[str] = ()
) -> tuple[dict[str, Any], int]:
    """Returns the configuration's JSON for a folder's model, weights and tokenizer, and the tokens of the texts.

    Without `num_tokens` it trains for one pass over them; without texts for as long as a published rule says. The texts
    are counted as a run with `overrides` splits them.
    """
    folder = local_checkpoint(source, CACHE_DIRECTORY)
    found = find_checkpoint(folder) or folder
    build = partial(
        starter_config,
        read_model_config(found),
        sources=texts,
        weights=str(source) if any(found.glob("*.safetensors")) else None,
        tokenizer=str(found) if holds_tokenizer(found) else None,
    )
    num_read = count_tokens(build(), overrides) if texts else 0
    return build(num_tokens=num_tokens or num_read or None), num_read


def count_tokens(raw: dict[str, Any], overrides: Sequence[str] = ()) -> int:
    """Tokens of one pass over the texts; the corpus stays in the cache, where training finds it."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "starter.json")
        path.write_text(json.dumps(raw))
        config = resolve(load_config(path, overrides), config_path=path)
    return open_run_corpus(config, AbortToken(), partial(print, file=sys.stderr)).num_train_tokens


def describe_folder_config(raw: dict[str, Any], num_read: int) -> Iterator[str]:
    """Says what the configuration trains, from what, for how long."""
    run, batch = raw["run"], raw["batch"]
    step = batch["global_batch_size"] * batch["sequence_length"]
    passes = f" ({run['num_tokens'] / num_read:.3g} x the text)" if num_read else ""
    yield (
        f"{num_parameters(ModelConfig.model_validate(raw['model'])):,} parameters, "
        f"{'from these weights' if 'initialize_from' in run else 'from random weights'}; "
        f"{run['num_tokens']:,} tokens{passes}; {-(-run['num_tokens'] // step):,} steps of {step:,}, "
        f"learning rate {raw['optimizer']['learning_rate']:g}: a beginning to change"
    )


def _texts_in(overrides: Sequence[str]) -> list[str]:
    """The paths that data.sources is set to; [] where it is not, or not to paths, which reading the file reports."""
    raw: dict[str, Any] = {}
    for override in overrides:
        if override.partition("=")[0].strip() == "data.sources":
            list(apply_override(raw, override))
    found = raw.get("data", {}).get("sources", [])
    return [path for path in found if isinstance(path, str)] if isinstance(found, list) else []
