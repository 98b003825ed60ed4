"""Converts between checkpoints and Hugging Face folders, which plain `transformers` opens and writes; exports the
weights of any checkpoint.

    python launch/convert.py to-hf CHECKPOINT FOLDER [--dtype bf16] [--tokenizer PATH] [--max-file-gb 5]
    python launch/convert.py to-safetensors CHECKPOINT FOLDER [--dtype bf16] [--max-file-gb 5]
    python launch/convert.py from-hf FOLDER CHECKPOINT [--dtype fp32]
    python launch/convert.py model FOLDER
    python launch/convert.py config FOLDER [TEXT ...] [--tokens N]

`to-hf` takes a checkpoint, or the folder of a run for its newest one, or the address of a remote store for either.
`to-safetensors` takes the same, of any model, a user's own layers included, and keeps the names of their modules.
`from-hf` makes a weights-only checkpoint. `model` prints the section "model" for a configuration that starts from the
folder (run.initialize_from). `config` prints a whole configuration to begin with: the folder's model, weights and
tokenizer, the texts, whose tokens are counted, and sizes and rates of published runs (parallel3d/config/starter.py).
Weights are converted one tensor at a time, bit for bit unless --dtype changes their format; a folder is complete or
does not exist.
Exit codes: 0 done, 2 invalid input, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from math import inf
from pathlib import Path

from parallel3d.checkpoint.fetch import local_checkpoint
from parallel3d.checkpoint.index import Format
from parallel3d.commands.folder_config import describe_folder_config, make_folder_config
from parallel3d.commands.parsers import WEIGHT_FORMATS, parse
from parallel3d.config.load import CACHE_DIRECTORY
from parallel3d.errors import CheckpointError, UserError
from parallel3d.models.hf_export import export
from parallel3d.models.hf_import import import_folder
from parallel3d.models.initial_weights import find_checkpoint, read_model_config
from parallel3d.models.plain_export import export_plain

FORMATS: Mapping[str, Format | None] = dict(zip(WEIGHT_FORMATS, (None, "F32", "BF16")))
EXIT_INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    options = parse("convert", arguments)
    try:
        for line in RUN[options.command](options):
            print(line, flush=True)
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"can't write {error.filename or options.target} ({error.strerror})", file=sys.stderr)
        return UserError.exit_code
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED


def run_export(options: argparse.Namespace) -> Iterator[str]:
    yield from export(
        checkpoint_of(options.source),
        options.target,
        weight_format=FORMATS[options.dtype],
        tokenizer=options.tokenizer,
        max_file_bytes=int(options.max_file_gb * 1e9),
    )


def run_plain_export(options: argparse.Namespace) -> Iterator[str]:
    yield from export_plain(
        checkpoint_of(options.source),
        options.target,
        weight_format=FORMATS[options.dtype],
        max_file_bytes=int(options.max_file_gb * 1e9),
    )


def checkpoint_of(source: Path | str) -> Path:
    """The checkpoint's folder; raises CheckpointError where there is none."""
    found = find_checkpoint(local_checkpoint(source, CACHE_DIRECTORY))
    if found is None:
        raise CheckpointError(f"{source} is neither a checkpoint nor the folder of a run that has one")
    return found


def run_import(options: argparse.Namespace) -> Iterator[str]:
    folder = local_checkpoint(options.source, CACHE_DIRECTORY)
    yield from import_folder(folder, options.target, weight_format=FORMATS[options.dtype])
    yield "the model, for a configuration that starts from it (run.initialize_from):"
    yield from show_model(options)


def show_model(options: argparse.Namespace) -> Iterator[str]:
    """The section as JSON, without fields at their defaults."""
    folder = local_checkpoint(options.source, CACHE_DIRECTORY)
    model = read_model_config(find_checkpoint(folder) or folder)
    fields = {"architecture": model.architecture} | model.model_dump(exclude_defaults=True)
    yield json.dumps({"model": fields}, indent=2)


def show_config(options: argparse.Namespace) -> Iterator[str]:
    """A configuration to begin with, as JSON. What was chosen, and of how much text, is said on stderr."""
    if options.tokens is not None and not 1 <= options.tokens < inf:
        raise UserError(f"--tokens {options.tokens:g}: must be at least 1, and finite")
    num_tokens = None if options.tokens is None else int(options.tokens)
    raw, num_read = make_folder_config(options.source, options.texts, num_tokens)
    for line in describe_folder_config(raw, num_read):
        print(line, file=sys.stderr)
    yield json.dumps(raw, indent=2)


RUN: Mapping[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "to-hf": run_export,
    "to-safetensors": run_plain_export,
    "from-hf": run_import,
    "model": show_model,
    "config": show_config,
}
