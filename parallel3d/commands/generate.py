"""Continues prompts with a trained model: `parallel3d generate CHECKPOINT "Once upon a time"`.

The model comes from a checkpoint, a run's folder (its newest checkpoint), a Hugging Face folder, or an address of a
remote store; `--layout tp2.pp2` computes it on several ranks, which are threads of this process. A single prompt's text
appears while it is computed; several give one JSON object a line. Exit codes: 0 done, 2 invalid input, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from math import exp, inf
from pathlib import Path
from typing import TextIO

import torch

from parallel3d.commands.parsers import parse
from parallel3d.commands.trained_model import (
    TrainedModel,
    compute_config,
    continue_prompts,
    find_tokenizer,
    log,
    open_trained,
)
from parallel3d.config.schema import Config
from parallel3d.data.tokenizer import Tokenizer
from parallel3d.decoding.prompts import (
    PromptEncoder,
    PromptRecord,
    find_template,
    number_samples,
    read_prompts,
)
from parallel3d.decoding.rank_decoder import DecodingRule
from parallel3d.decoding.sampling import SamplingRule
from parallel3d.decoding.texts import Continuation, EndRule, TextStream, cut_at
from parallel3d.errors import DataError, UserError
from parallel3d.models.hf_config import read_json

EXIT_INTERRUPTED = 130
GENERATION = "generation_config.json"


def main(arguments: list[str]) -> int:
    options = parse("generate", arguments)
    try:
        generate(options)
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"can't read or write {error.filename} ({error.strerror})", file=sys.stderr)
        return UserError.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED


def generate(options: argparse.Namespace) -> None:
    trained = open_trained(options.source)
    tokenizer = find_tokenizer(trained, options.tokenizer)
    encoder = make_encoder(options, trained, tokenizer)
    records = [*read_all_prompts(options)]
    if not records:
        raise DataError("no prompt: give one as an argument, in --prompts FILE, or on standard input")
    prompts = number_samples((encoder.ids(record) for record in records), options.samples)
    end = EndRule(
        max_tokens=options.max_tokens,
        end_ids=find_end_ids(trained, tokenizer),
        stops=(*options.stop, *(encoder.stops if options.chat or not all(isinstance(r, str) for r in records) else ())),
        decode=tokenizer.decode,
    )
    rule = DecodingRule(
        sampling=make_sampling(options),
        end=end,
        batch_size=options.batch_size,
        uses_cache=not (options.no_cache or trained.model.module),
    )
    device = torch.device(options.device)
    config = make_config(options, trained, max(len(prompt.ids) for prompt in prompts))
    stream = TerminalStream(tokenizer, end.stops) if len(prompts) == 1 and not (options.json or options.out) else None
    began = time.monotonic()
    texts = continue_prompts(config, trained, prompts, rule, device, on_token=stream.add if stream else None)
    if stream is not None:
        stream.end()
    else:
        write_lines(options.out, describe_all(texts, tokenizer, end.stops))
    log(describe_speed(texts, time.monotonic() - began))


def make_sampling(options: argparse.Namespace) -> SamplingRule:
    """How tokens are drawn. Raises UserError for a number that means nothing."""
    if not 0 <= options.temperature < inf:
        raise UserError(f"--temperature {options.temperature}: must be 0 or more")
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top-p {options.top_p}: must be above 0 and at most 1")
    return SamplingRule(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed)


# --- the model and its tokenizer --------------------------------------------------------------------------------------


def make_encoder(options: argparse.Namespace, trained: TrainedModel, tokenizer: Tokenizer) -> PromptEncoder:
    chat = (trained.data or {}).get("chat") or {}
    prefix = () if trained.data is not None else tuple(getattr(tokenizer, "prefix_ids", ()))
    return PromptEncoder(
        tokenizer=tokenizer,
        prefix=prefix,
        template=find_template(options.template, options.tokenizer or trained.folder, chat.get("template")),
        is_chat=options.chat,
        system=({"role": "system", "content": options.system},) if options.system else (),
    )


def find_end_ids(trained: TrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's, and those that Hugging Face's file names."""
    path = trained.folder / GENERATION
    named = read_json(path).get("eos_token_id") if path.is_file() else None
    return frozenset({tokenizer.eos_id, *(named if isinstance(named, list) else [named] if named is not None else [])})


def make_config(options: argparse.Namespace, trained: TrainedModel, longest_prompt: int) -> Config:
    """The configuration of the ranks. Raises UserError for a text longer than the model's positions."""
    length = longest_prompt + options.max_tokens
    left = max(0, (trained.model.max_position_embeddings or 0) - longest_prompt)
    refusal = (
        f"--max-tokens {options.max_tokens}: with {longest_prompt} tokens of a prompt the text is longer than the "
        f"{trained.model.max_position_embeddings} positions that the model has learned; {left} are left"
    )
    return compute_config(trained, options, length, refusal=refusal)


# --- prompts and texts ------------------------------------------------------------------------------------------------


def read_all_prompts(options: argparse.Namespace) -> Iterator[PromptRecord]:
    """Those of the arguments, then of the file; without either, standard input is one prompt."""
    yield from options.prompt
    if options.prompts == "-":
        yield from read_prompts(sys.stdin, "standard input")
    elif options.prompts is not None:
        with Path(options.prompts).open(encoding="utf-8") as file:
            yield from read_prompts(file, options.prompts)
    elif not options.prompt and not sys.stdin.isatty() and (text := sys.stdin.read().rstrip("\n")):
        yield text


class TerminalStream:
    """Prints a text while it is computed."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._text = TextStream(tokenizer.decode, stops)

    def add(self, text: Continuation) -> None:
        print(self._text.add(text.ids[-1]), end="", flush=True)

    def end(self) -> None:
        print(self._text.end())


def describe_all(texts: Sequence[Continuation], tokenizer: Tokenizer, stops: Sequence[str]) -> Iterator[str]:
    """A JSON object for each text."""
    for number, text in enumerate(texts):
        yield json.dumps(
            {
                "number": number,
                "prompt": tokenizer.decode(text.prompt.ids),
                "text": cut_at(tokenizer.decode(text.ids), stops),
                "tokens": text.ids,
                "ended_by": text.reason,
                "perplexity": text.perplexity,
            },
            ensure_ascii=False,
        )


def write_lines(path: Path | None, lines: Iterator[str]) -> None:
    def write(file: TextIO) -> None:
        file.writelines(f"{line}\n" for line in lines)

    with nullcontext(sys.stdout) if path is None else path.open("w", encoding="utf-8") as file:
        write(file)


def describe_speed(texts: Sequence[Continuation], seconds: float) -> str:
    log_probs = [each for text in texts for each in text.log_probs]
    speed = f"{len(log_probs)} tokens in {seconds:.1f} s, with loading"
    return f"{speed}; perplexity of the model's own tokens {exp(-sum(log_probs) / len(log_probs)):.3f}"
