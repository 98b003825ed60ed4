"""The options of the commands that compute with a trained model; no torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from parallel3d.commands.option_types import add_json, count, source


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the model, and how it is computed."""
    parser.add_argument(
        "source", type=source, metavar="MODEL", help="a checkpoint, a run's folder, a Hugging Face folder; an address"
    )
    parser.add_argument("--layout", default="tp1", help="ranks that compute, as in tp2.pp2.dp2 (tp1)")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="a Hugging Face folder or SentencePiece model")
    parser.add_argument(
        "--dtype", choices=("auto", "fp32", "bf16", "fp16", "fp64"), default="auto", help="to compute in (the weights')"
    )
    parser.add_argument("--threads", type=count, metavar="N", help="CPU threads of each rank (the cores)")
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU such as cuda, for one rank (cpu)")


def add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Continue prompts with a trained model."
    add_model(parser)
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="a text to continue; none: standard input")
    parser.add_argument("--prompts", metavar="FILE", help="a prompt a line: text, or JSON with prompt or messages")
    parser.add_argument(
        "--max-tokens", "--max-new-tokens", type=count, default=128, metavar="N", help="of each text (128)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (0)")
    parser.add_argument("--top-k", type=count, metavar="K", help="draw from the K likeliest tokens (all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="... that together have this share (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument("--samples", type=count, default=1, metavar="N", help="texts for each prompt (1)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a text; may be repeated")
    parser.add_argument("--chat", action="store_true", help="prompts are messages of a user, in the model's template")
    parser.add_argument("--system", metavar="TEXT", help="the system's message in front of them")
    parser.add_argument("--template", metavar="NAME", help="chatml, a Hugging Face folder or a file, for messages")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="texts under way at once (8)")
    parser.add_argument("--no-cache", action="store_true", help="compute the whole text for each token")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON lines into this file")
    add_json(parser, "text")


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure a trained model: loss and perplexity, last words, tasks of lm-evaluation-harness."
    add_model(parser)
    parser.add_argument(
        "files", nargs="*", metavar="[DOMAIN=]FILE", help="text or JSON lines; none: the text that the run held out"
    )
    parser.add_argument("--last-word", action="store_true", help="the last word of each passage, as in LAMBADA")
    parser.add_argument("--window", type=count, metavar="N", help="tokens that the model sees (those of training)")
    parser.add_argument("--stride", type=count, metavar="N", help="tokens that a window scores (all of the window)")
    parser.add_argument("--text-column", default="text", metavar="NAME", help="the field of JSON lines (text)")
    parser.add_argument(
        "--slice",
        choices=("seen", "unseen", "all", "test"),
        help="of the held-out text: what the run's evaluations read (default), documents they never touched, or all; "
        "or the test (data.test_fraction)",
    )
    parser.add_argument("--by", choices=("domain", "file"), help="a row for each source or file of the held-out text")
    parser.add_argument("--tokens", type=count, metavar="N", help="at most N of each row, in whole sequences")
    parser.add_argument("--set", action="append", default=[], metavar="section.field=value", help="of the run's data")
    parser.add_argument("--tasks", metavar="NAMES", help="tasks of lm-evaluation-harness, separated by commas")
    parser.add_argument("--task-path", type=Path, metavar="FOLDER", help="where further tasks are described")
    parser.add_argument("--limit", type=count, metavar="N", help="examples of each task (all)")
    parser.add_argument("--fewshot", type=int, metavar="N", help="examples in front of each question (the task's own)")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="sequences computed at once (8)")
    parser.add_argument("--follow", action="store_true", help="a run's checkpoints as they come, until it has ended")
    parser.add_argument("--every-tokens", type=count, metavar="N", help="... the first after each N tokens (all)")
    parser.add_argument("--name", metavar="NAME", help="... into evaluations/NAME in the run (held-out, files, tasks)")
    parser.add_argument("--history", action="store_true", help="show what evaluations of the run's checkpoints found")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the JSON file (evaluation-NAME.json)")
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS}  # set by a run, and by a process that follows one
    parser.add_argument("--at", type=Path, **hidden)
    parser.add_argument("--sets", type=json.loads, **hidden)
    parser.add_argument("--checkpoints", type=Path, **hidden)
    parser.add_argument("--since", type=float, default=0.0, **hidden)
    parser.add_argument("--end-wait", type=float, default=0.0, **hidden)
    add_json(parser, "the table")
