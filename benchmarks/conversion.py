"""Measures memory and speed of conversions: `python benchmarks/conversion.py [--layers 16] [--dtype float32]`

transformers writes a folder with random weights of Llama 3.2 1B's shape (--layers: fewer blocks of it). Then
`convert from-hf` makes a checkpoint of it and `convert to-hf` a folder of that, each in a process of its own. Prints
the peak of its resident memory, pages of mapped files included, beside what it was before the conversion. At the end
the two folders' weights are compared bit for bit. Needs a disk with room for three times the model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.sources import MB, peak_mb

SHAPE = dict(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Measure peak memory and speed of conversions.")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--directory", help="a disk with room for three folders")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.make:
        make(options.make, options.layers, options.dtype)
        return
    if options.convert:
        print(json.dumps(convert(*options.convert)))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        theirs, ours, back = (Path(directory) / name for name in ("theirs", "ours", "back"))
        run(f"--make={theirs}", f"--layers={options.layers}", f"--dtype={options.dtype}")
        size_mb = sum(file.stat().st_size for file in theirs.glob("*.safetensors")) / MB
        print(f"a folder of {size_mb:,.0f} MB, largest tensor {largest(theirs) / MB:,.0f} MB")
        print("| conversion | seconds | before | peak |\n|---|---|---|---|")
        for name, source, target in (("from-hf", theirs, ours), ("to-hf", ours, back)):
            found = json.loads(run("--convert", name, str(source), str(target)).splitlines()[-1])
            print(
                f"| {name} | {found['seconds']:.1f} | {found['before_mb']:,.0f} MB | {found['peak_mb']:,.0f} MB |",
                flush=True,
            )
        print(f"{compare(theirs, back)} tensors, bit for bit the same")


def run(*arguments: str) -> str:
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def make(folder: Path, num_layers: int, dtype: str) -> None:
    """Writes a folder with random weights by transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    torch.set_default_dtype(getattr(torch, dtype))
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers, **SHAPE))
    model.save_pretrained(folder, max_shard_size="2GB")


def convert(name: str, source: str, target: str) -> dict[str, float]:
    """Runs the command in this process; its standard output has a line of its own after the command's."""
    from parallel3d.commands import convert as command

    before_mb, started = peak_mb(), time.perf_counter()
    if code := command.main([name, source, target]):
        raise SystemExit(code)
    return {"before_mb": before_mb, "peak_mb": peak_mb(), "seconds": time.perf_counter() - started}


def weights_of(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def largest(folder: Path) -> int:
    from safetensors import safe_open

    sizes = []
    for name, path in weights_of(folder).items():
        with safe_open(path, "pt") as file:
            tensor = file.get_tensor(name)
            sizes.append(tensor.numel() * tensor.element_size())
    return max(sizes)


def compare(theirs: Path, back: Path) -> int:
    """The number of tensors; ends the program if one differs."""
    import torch
    from safetensors import safe_open

    first, second = weights_of(theirs), weights_of(back)
    if first.keys() != second.keys():
        raise SystemExit(f"other tensors: {first.keys() ^ second.keys()}")
    for name, path in first.items():
        with safe_open(path, "pt") as one, safe_open(second[name], "pt") as other:
            a, b = one.get_tensor(name), other.get_tensor(name)
            if a.dtype != b.dtype or not torch.equal(a, b):
                raise SystemExit(f"{name} is not the same")
    return len(first)


if __name__ == "__main__":
    main(sys.argv[1:])
