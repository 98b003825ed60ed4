"""Converts between checkpoints and Hugging Face folders, which plain `transformers` opens and writes.

    python launch/convert.py to-hf CHECKPOINT FOLDER [--dtype bf16] [--tokenizer FILE] [--max-file-gb 5]
    python launch/convert.py from-hf FOLDER CHECKPOINT [--dtype fp32]
    python launch/convert.py model FOLDER

`to-hf` takes a checkpoint, or the folder of a run for its newest one. `from-hf` makes a weights-only checkpoint.
`model` prints the section "model" for a configuration that starts from the folder (run.initialize_from). Weights are
converted one tensor at a time, bit for bit unless --dtype changes their format; a folder is complete or does not exist.
Exit codes: 0 done, 2 invalid input, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from parallel3d.checkpoint.index import Format
from parallel3d.errors import CheckpointError, UserError
from parallel3d.models.hf_export import export
from parallel3d.models.hf_import import import_folder
from parallel3d.models.initial_weights import find_checkpoint, read_model_config

FORMATS: Mapping[str, Format | None] = {"keep": None, "fp32": "F32", "bf16": "BF16"}
EXIT_INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    try:
        for line in options.run(options):
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


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Convert between checkpoints and Hugging Face folders.")
    commands = parser.add_subparsers(required=True, metavar="to-hf | from-hf | model")

    def command(name: str, run: Callable[[argparse.Namespace], Iterator[str]], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run, target=None)
        return added

    to_hf = command("to-hf", run_export, "Convert a checkpoint to a Hugging Face folder.")
    to_hf.add_argument("source", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run's folder for its newest")
    to_hf.add_argument("target", type=Path, metavar="FOLDER", help="the new folder")
    to_hf.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="a SentencePiece model that replaces the run's own"
    )
    to_hf.add_argument(
        "--max-file-gb", type=float, default=5.0, metavar="GB", help="size at which files are split (default 5)"
    )
    from_hf = command("from-hf", run_import, "Convert a Hugging Face folder to a weights-only checkpoint.")
    from_hf.add_argument(
        "source", type=Path, metavar="FOLDER", help="Llama, Mistral, Qwen2 or GPT-2 in safetensors files"
    )
    from_hf.add_argument("target", type=Path, metavar="CHECKPOINT", help="the new checkpoint")
    for added in (to_hf, from_hf):
        added.add_argument("--dtype", choices=FORMATS, default="keep", help="format of the weights (keep: as they are)")
    model = command("model", show_model, "Print the section model of a configuration for these weights.")
    model.add_argument("source", type=Path, metavar="FOLDER", help="a Hugging Face folder, or a checkpoint")
    return parser.parse_args(arguments)


def run_export(options: argparse.Namespace) -> Iterator[str]:
    source = find_checkpoint(options.source)
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
    model = read_model_config(find_checkpoint(options.source) or options.source)
    fields = {"architecture": model.architecture} | model.model_dump(exclude_defaults=True)
    yield json.dumps({"model": fields}, indent=2)
