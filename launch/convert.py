"""Converts between checkpoints and Hugging Face folders, which plain `transformers` opens and writes.

    python launch/convert.py to-hf CHECKPOINT FOLDER [--dtype bf16] [--tokenizer FILE] [--max-file-gb 5]
    python launch/convert.py from-hf FOLDER CHECKPOINT [--dtype fp32]
    python launch/convert.py model FOLDER

`to-hf` takes a checkpoint, or the folder of a run, of which it takes the newest. `from-hf` makes a checkpoint of
weights alone. `model` prints the section "model" of a configuration that trains on from the folder
(run.initialize_from). Weights pass through one tensor at a time, bit for bit unless --dtype says otherwise; a folder
is whole or not there. Exit codes: 0 done, 2 a mistake in what it was given, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from launch.initial import model_of, read_model  # noqa: E402
from models.hf import HfTensor, check_zeros, hf_tensors  # noqa: E402
from models.hf_config import CONFIG, hf_config, read_json  # noqa: E402
from models.hf_folder import WEIGHTS, WEIGHTS_INDEX, HfFolder, HfStored, open_hf_folder  # noqa: E402
from models.make import shardings_of  # noqa: E402
from parallel3d.checkpoint.catalogue import LATEST, verify  # noqa: E402
from parallel3d.checkpoint.disk import Disk, new_folder, refuse_existing  # noqa: E402
from parallel3d.checkpoint.index import INDEX, WEIGHT, Format, RunFacts  # noqa: E402
from parallel3d.checkpoint.pieces import stored_rows, tensors_of  # noqa: E402
from parallel3d.checkpoint.read import CheckpointReader, check_shapes  # noqa: E402
from parallel3d.checkpoint.shard import StoredTensor, split_into_files, write_shard  # noqa: E402
from parallel3d.checkpoint.weights import write_weights  # noqa: E402
from parallel3d.checkpoint.write import FORMATS, chunks_of  # noqa: E402
from parallel3d.config.schema import ModelConfig  # noqa: E402
from parallel3d.data.hf_tokenizer import hf_byte_tokenizer_files, hf_tokenizer_files  # noqa: E402
from parallel3d.data.tokenizer import MODEL_FILE, ByteTokenizer, SentencePieceTokenizer  # noqa: E402
from parallel3d.errors import CheckpointError, DataError, UserError  # noqa: E402
from parallel3d.sharding import ParamSharding  # noqa: E402

ASKED: Mapping[str, Format | None] = {"keep": None, "fp32": "F32", "bf16": "BF16"}
DTYPES = {name: dtype for dtype, name in FORMATS.items()}
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    MODEL_FILE,
)
EXIT_INTERRUPTED = 130
SPECIAL_IDS = ("bos_token_id", "eos_token_id")


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What of a tokenizer goes into a folder."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json: which ids begin a text, end it and fill it up."""
    note: str = ""
    """For a person."""


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

    def command(name: str, run: Callable[..., Iterator[str]], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run, target=None)
        return added

    to_hf = command("to-hf", export, "Make a Hugging Face folder of a checkpoint.")
    to_hf.add_argument("source", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run's folder: its newest")
    to_hf.add_argument("target", type=Path, metavar="FOLDER", help="the new folder")
    to_hf.add_argument("--tokenizer", type=Path, metavar="FILE", help="a SentencePiece model in place of the run's own")
    to_hf.add_argument("--max-file-gb", type=float, default=5.0, metavar="GB", help="size at which files are split (5)")
    from_hf = command("from-hf", import_folder, "Make a checkpoint of weights alone of a Hugging Face folder.")
    from_hf.add_argument("source", type=Path, metavar="FOLDER", help="Llama, Qwen2 or GPT-2 in safetensors files")
    from_hf.add_argument("target", type=Path, metavar="CHECKPOINT", help="the new checkpoint")
    for added in (to_hf, from_hf):
        added.add_argument("--dtype", choices=ASKED, default="keep", help="format of the weights (keep: as they are)")
    model = command("model", show_model, "Print the section model of a configuration for these weights.")
    model.add_argument("source", type=Path, metavar="FOLDER", help="a Hugging Face folder, or a checkpoint")
    return parser.parse_args(arguments)


def show_model(options: argparse.Namespace) -> Iterator[str]:
    """The section as JSON, without what is ours by default anyway."""
    fields = read_model(find_source(options.source)).model_dump(exclude_defaults=True)
    yield json.dumps({"model": {"architecture": "llama"} | fields}, indent=2)


def find_source(path: Path) -> Path:
    """The folder meant: of a run or its checkpoints, the newest checkpoint; links are followed."""
    for inner in (path, path / LATEST, path / "checkpoints" / LATEST):
        if (inner / INDEX).is_file() or (inner / CONFIG).is_file() and inner == path and not is_run(path):
            return inner.resolve()
    raise CheckpointError(f"{path} is neither a checkpoint nor a folder with one, nor Hugging Face's")


def is_run(path: Path) -> bool:
    """A run's folder has a config.json, too: the run's own."""
    return (path / "metrics.jsonl").exists()


# --- checkpoint -> Hugging Face ---------------------------------------------------------------------------------------


def export(options: argparse.Namespace) -> Iterator[str]:
    """Writes the folder; yields lines for a person."""
    disk, folder = Disk(), find_source(options.source)
    refuse_existing(options.target)
    index = verify(folder)
    model = model_of(index, folder)
    reader, shardings = CheckpointReader(folder, index), {s.name: s for s in shardings_of(model)}
    check_shapes(reader, shardings.values())
    table = {tensor.hf_name: tensor for tensor in hf_tensors(model)}
    formats = {t.hf_name: ASKED[options.dtype] or saved_format(t, shardings, reader) for t in table.values()}
    stored = [StoredTensor(key=name, format=formats[name], shape=table[name].shape) for name in table]
    tokenizer = tokenizer_files(reader, model, options.tokenizer)
    yield f"step {index.step} of {folder}, every byte verified: {len(stored)} tensors"
    parts = split_into_files(stored, int(options.max_file_gb * 1e9))
    with new_folder(disk, options.target) as target:
        for name, tensors in zip(file_names(len(parts)), parts):
            chunks = (
                chunk
                for tensor in tensors
                for chunk in chunks_of(hf_value(table[tensor.key], shardings, reader).to(DTYPES[tensor.format]))
            )
            file = write_shard(disk, target / name, tensors, chunks)
            yield f"{name}: {len(tensors)} tensors, {file.size / 1e6:,.1f} MB"
        for name, content in json_files(model, parts, tokenizer).items():
            disk.write_file(target / name, (json.dumps(content, indent=2) + "\n").encode())
        for name, data in tokenizer.files.items():
            disk.write_file(target / name, data)
    if tokenizer.note:
        yield f"note: {tokenizer.note}"
    yield f"written to {options.target}: AutoModelForCausalLM.from_pretrained({str(options.target)!r})"


def hf_value(tensor: HfTensor, shardings: Mapping[str, ParamSharding], reader: CheckpointReader) -> Tensor:
    """A Hugging Face tensor, whole, in the format that the checkpoint has it in."""
    reader.close()  # lets go of what was read for the tensor before
    if tensor.name is None:
        return torch.zeros(tensor.shape)
    whole: Tensor | None = None
    for name, rows, first in stored_rows(shardings[tensor.name], tensor.rows):
        shape = reader.index.tensors[name].shape
        part = reader.read(WEIGHT, name, (rows.start, *[0] * (len(shape) - 1)), (len(rows), *shape[1:]))
        if tuple(part.shape) == tensor.shape and not tensor.transposed:
            return part
        whole = part.new_empty(tensor.shape) if whole is None else whole
        (whole.t() if tensor.transposed else whole)[first : first + len(rows)] = part
    assert whole is not None, f"nothing of {tensor.hf_name} is stored"
    return whole


def saved_format(tensor: HfTensor, shardings: Mapping[str, ParamSharding], reader: CheckpointReader) -> Format:
    """The format of a tensor's weights in the checkpoint."""
    if tensor.name is None:
        return "F32"
    name = next(stored_rows(shardings[tensor.name], tensor.rows))[0]
    return reader.index.tensors[name].kinds[WEIGHT]


def file_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS]
    stem, suffix = WEIGHTS.split(".")
    return [f"{stem}-{number:05}-of-{count:05}.{suffix}" for number in range(1, count + 1)]


def json_files(
    model: ModelConfig, parts: Sequence[Sequence[StoredTensor]], tokenizer: TokenizerFiles
) -> dict[str, dict[str, Any]]:
    """The JSON files of the folder by name."""
    dtype = str(DTYPES[parts[0][0].format]).removeprefix("torch.")
    files: dict[str, dict[str, Any]] = {
        CONFIG: hf_config(model)
        | {name: tokenizer.generation.get(name) for name in SPECIAL_IDS}
        | {"torch_dtype": dtype},
        GENERATION: dict(tokenizer.generation),
    }
    if len(parts) > 1:
        size = sum(tensor.num_bytes for part in parts for tensor in part)
        names = zip(file_names(len(parts)), parts)
        weight_map = {tensor.key: name for name, part in names for tensor in part}
        files[WEIGHTS_INDEX] = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    return files


def tokenizer_files(reader: CheckpointReader, model: ModelConfig, path: Path | None) -> TokenizerFiles:
    """The tokenizer that the weights were trained with: the checkpoint's, or the SentencePiece model in `path`."""
    there = {file.name: reader.folder / file.name for file in reader.index.files}
    longest = model.max_position_embeddings or 0
    if path is None and GENERATION in there:  # as it came from a Hugging Face folder
        files = {name: there[name].read_bytes() for name in TOKENIZER_FILES if name in there}
        return TokenizerFiles(files=files, generation=read_json(there[GENERATION]))
    if path is not None or MODEL_FILE in there:
        path = path or there[MODEL_FILE]
        data = read_tokenizer(path)
        tokenizer = SentencePieceTokenizer(data, name=str(path))
        if tokenizer.vocab_size > model.vocab_size:
            raise UserError(f"{path} has {tokenizer.vocab_size} pieces, the model a vocabulary of {model.vocab_size}")
        own, generation = {MODEL_FILE: data}, ends_with(tokenizer.eos_id)
        try:
            return TokenizerFiles(files=own | hf_tokenizer_files(data, max_length=longest), generation=generation)
        except DataError as error:
            return TokenizerFiles(files=own, generation=generation, note=f"no tokenizer.json is written: {error}")
    if reader.index.facts.config.get("data", {}).get("tokenizer", {}).get("kind") == "bytes":
        files = hf_byte_tokenizer_files(max_length=longest)
        return TokenizerFiles(files=files, generation=ends_with(ByteTokenizer.eos_id))
    return TokenizerFiles(note="the checkpoint has no tokenizer with it: give its model with --tokenizer FILE")


def ends_with(eos_id: int) -> dict[str, Any]:
    """How generation ends, and what fills up the shorter texts of a batch."""
    return {"eos_token_id": eos_id, "pad_token_id": eos_id}


def read_tokenizer(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror})") from None


# --- Hugging Face -> checkpoint ---------------------------------------------------------------------------------------


def import_folder(options: argparse.Namespace) -> Iterator[str]:
    """Writes the checkpoint; yields lines for a person."""
    refuse_existing(options.target)
    source = open_hf_folder(options.source)
    check_zeros(source.table, source.read)
    shapes = {name: shape for s in shardings_of(source.model) for name, shape in tensors_of(s).items()}
    values = {name: value for s in shardings_of(source.model) for name, value in our_values(s, source)}
    formats = {name: ASKED[options.dtype] or FORMATS[values[name].dtype] for name in shapes}
    facts = RunFacts(
        state={},
        config={"model": source.model.model_dump()},
        versions={name: metadata.version(name) for name in ("parallel3d", "torch", "safetensors")},
    )
    index = write_weights(
        options.target,
        {name: (formats[name], shape) for name, shape in shapes.items()},
        (chunk for name in shapes for chunk in chunks_of(values[name].read().to(DTYPES[formats[name]]))),
        facts=facts,
        step=0,
        files=side_files(source),
    )
    yield f"{len(source.stored)} tensors, {index.num_bytes / 1e6:,.1f} MB, written to {options.target}"
    yield "the model, for a configuration that starts from it (run.initialize_from):"
    yield from show_model(options)


@dataclass(frozen=True, kw_only=True)
class OurValue:
    """A tensor as a checkpoint stores it: rows of a Hugging Face tensor, or columns where that is transposed."""

    stored: HfStored
    part: tuple[slice, ...]
    transposed: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def read(self) -> Tensor:
        value = self.stored[self.part]
        return value.t() if self.transposed else value


def our_values(sharding: ParamSharding, source: HfFolder) -> Iterator[tuple[str, OurValue]]:
    """Each tensor that a parameter is stored as. It lies within one tensor of theirs: no chunk of ours spans two."""
    theirs = [tensor for tensor in source.table if tensor.name == sharding.name]
    for name, rows, first in stored_rows(sharding, range(sharding.shape[0])):
        tensor = next(tensor for tensor in theirs if first in tensor.rows and first + len(rows) - 1 in tensor.rows)
        span = slice(first - tensor.first_row, first - tensor.first_row + len(rows))
        part = (slice(None), span) if tensor.transposed else (span,)
        yield name, OurValue(stored=source.read(tensor.hf_name), part=part, transposed=tensor.transposed)


def side_files(source: HfFolder) -> dict[str, bytes]:
    """The tokenizer's files as they are, and the ids that begin and end a text."""
    paths = (source.path / name for name in (*TOKENIZER_FILES, GENERATION))
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    ids = {name: source.config[name] for name in SPECIAL_IDS if name in source.config}
    return {GENERATION: json.dumps(ids).encode()} | files


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
