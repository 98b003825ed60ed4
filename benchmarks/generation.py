"""Measures greedy decoding next to transformers, in turn: `python benchmarks/generation.py [--width 512] [--texts 1]`.

A random Llama of 8 layers on one process, prompts and texts of 64 tokens. Both use the same weights and threads; the
first turn warms up. Prints tokens/s of each further turn, and the ratio of the slower ones. transformers is needed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parallel3d.commands.generate import open_trained
from parallel3d.config.inference import inference_config
from parallel3d.decoding.rank_decoder import DecodingRule, RankDecoder
from parallel3d.decoding.sampling import SamplingRule
from parallel3d.decoding.texts import EndRule, Prompt
from parallel3d.inprocess.loaded_ranks import LoadedRank, run_loaded_ranks
from parallel3d.models.initial_weights import open_weights
from parallel3d.models.make import make_stage

NUM_PROMPT_TOKENS = NUM_NEW_TOKENS = 64
VOCAB_SIZE, NUM_LAYERS, HEAD_SIZE = 32000, 8, 64
T = TypeVar("T")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Greedy decoding next to transformers.")
    parser.add_argument("--width", type=int, default=512, help="hidden size, a multiple of 128")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--texts", type=int, default=1, help="texts at once")
    parser.add_argument("--turns", type=int, default=3, help="of each; the first does not count")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        theirs = make_model(options, Path(folder))
        ours, others, num_equal = compare(options, Path(folder), theirs)
    ratio = min(ours) / min(others)
    print(
        f"{options.width}, {options.dtype}, {options.texts}: ours {ours}, transformers {others} tokens/s: {ratio:.2f}"
    )
    print(f"{num_equal} of {options.texts} texts are equal")


def make_model(options: argparse.Namespace, folder: Path) -> torch.nn.Module:
    """A model of transformers with random weights, which are saved in the folder too."""
    torch.manual_seed(0)
    width = options.width
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 32 * 32,
        num_hidden_layers=options.layers,
        num_attention_heads=width // HEAD_SIZE,
        num_key_value_heads=width // HEAD_SIZE // 2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config).to(DTYPES[options.dtype]).eval()
    model.save_pretrained(folder)
    return model


def compare(options: argparse.Namespace, folder: Path, theirs: torch.nn.Module) -> tuple[list[float], list[float], int]:
    """tokens/s of our turns and of theirs, and how many texts are equal."""
    ids = torch.randint(VOCAB_SIZE, (options.texts, NUM_PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    prompts = [Prompt(ids=tuple(row)) for row in ids.tolist()]
    rule = DecodingRule(sampling=SamplingRule(), end=EndRule(max_tokens=NUM_NEW_TOKENS), batch_size=options.texts)
    speeds: tuple[list[float], list[float]] = ([], [])

    def body(rank: LoadedRank) -> int:
        torch.set_num_threads(options.threads)
        for _ in range(options.turns):
            texts, speed = timed(lambda: RankDecoder(rank.stage, rank.place, rule).run(prompts), options.texts)
            speeds[0].append(speed)
            found, speed = timed(lambda: generate_theirs(theirs, ids), options.texts)
            speeds[1].append(speed)
        return sum(text.ids == row for text, row in zip(texts, found[:, NUM_PROMPT_TOKENS:].tolist()))

    model = open_trained(folder).model
    length = NUM_PROMPT_TOKENS + NUM_NEW_TOKENS
    config = inference_config(model, layout="tp1", policy=options.dtype, sequence_length=length)
    initial, device = open_weights(folder), torch.device("cpu")
    (num_equal,) = run_loaded_ranks(config, body, make_stage=make_stage, initial=initial, device=device)
    return speeds[0][1:], speeds[1][1:], num_equal


def timed(run: Callable[[], T], num_texts: int) -> tuple[T, float]:
    """The result of `run`, and its tokens/s."""
    began = time.perf_counter()
    result = run()
    return result, round(num_texts * NUM_NEW_TOKENS / (time.perf_counter() - began), 1)


@torch.no_grad()
def generate_theirs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    counts = {"max_new_tokens": NUM_NEW_TOKENS, "min_new_tokens": NUM_NEW_TOKENS}
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **counts)


if __name__ == "__main__":
    main(sys.argv[1:])
