"""Converts between checkpoints and Hugging Face folders, which plain `transformers` opens and writes.

    python launch/convert.py to-hf CHECKPOINT FOLDER [--dtype bf16] [--tokenizer PATH] [--max-file-gb 5]
    python launch/convert.py from-hf FOLDER CHECKPOINT [--dtype fp32]
    python launch/convert.py model FOLDER

`to-hf` takes a checkpoint, or the folder of a run for its newest one, or the address of a remote store for either.
`from-hf` makes a weights-only checkpoint. `model` prints the section "model" for a configuration that starts from the
folder (run.initialize_from). Weights are converted one tensor at a time, bit for bit unless --dtype changes their
format; a folder is complete or does not exist.
Exit codes: 0 done, 2 invalid input, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping

from parallel3d.checkpoint.fetch import local_checkpoint
from parallel3d.checkpoint.index import Format
from parallel3d.commands.parsers import WEIGHT_FORMATS, parse
from parallel3d.config.load import CACHE_DIRECTORY
from parallel3d.errors import CheckpointError, UserError
from parallel3d.models.hf_export import export
from parallel3d.models.hf_import import import_folder
from parallel3d.models.initial_weights import find_checkpoint, read_model_config

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
    source = find_checkpoint(local_checkpoint(options.source, CACHE_DIRECTORY))
    if source is None:
        raise CheckpointError(f"{options.source} is neither a checkpoint nor the folder of a run that has one")
    yield from export(
        source,
        options.target,
        weight_format=FORMATS[options.dtype],
        tokenizer=options.tokenizer,
        max_file_bytes=int(options.max_file_gb * 1e9),
    )


def run_import(options: argparse.Namespace) -> Iterator[str]:
    yield from import_folder(options.source, options.target, weight_format=FORMATS[options.dtype])
    yield "the model, for a configuration that starts from it (run.initialize_from):"
    yield from show_model(options)


def show_model(options: argparse.Namespace) -> Iterator[str]:
    """The section as JSON, without fields at their defaults."""
    folder = local_checkpoint(options.source, CACHE_DIRECTORY)
    model = read_model_config(find_checkpoint(folder) or folder)
    fields = {"architecture": model.architecture} | model.model_dump(exclude_defaults=True)
    yield json.dumps({"model": fields}, indent=2)


RUN: Mapping[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "to-hf": run_export,
    "from-hf": run_import,
    "model": show_model,
}
