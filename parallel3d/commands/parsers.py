"""The options of every command. They import neither torch nor pydantic: help and shell completion need nothing else.

An action may have an attribute `complete`, which says with what a shell completes its value: `configs` (names of
shipped configurations, or files), `shipped` (those names alone) or `fields` (section.field=value).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from parallel3d.commands.model_parsers import add_evaluate, add_generate
from parallel3d.commands.option_types import add_json, count, file_of, positive, seconds, source
from parallel3d.commands.study_parsers import add_study as add_kinds_of_studies
from parallel3d.config.layout_parts import LAYOUT_PARTS
from parallel3d.config.shipped import find_config

WEIGHT_FORMATS = ("keep", "fp32", "bf16")
SHELLS = ("bash", "zsh", "fish")
CONFIG_VALUE: dict[str, Any] = {"type": lambda name: str(find_config(name)), "metavar": "FILE"}
"""What `--config` takes in every command."""


def parse(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command `name`; exits after --help, and on a wrong option or override.

    Options and overrides (section.field=value) come in any order.
    """
    parser = make_parser(name)
    own = next((action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)
    if own and name == "study" and arguments and arguments[0] in own:  # what follows the kind is intermixed
        parser = own[arguments[0]]
        options = parser.parse_intermixed_args(arguments[1:], argparse.Namespace(kind=arguments[0]))
    else:
        options = parser.parse_args(arguments) if own else parser.parse_intermixed_args(arguments)
    if wrong := [override for override in getattr(options, "overrides", []) if "=" not in override]:
        parser.error(f"unknown argument: {' '.join(wrong)} (an override reads section.field=value)")
    if getattr(options, "config", None) is not None:
        options.config = file_of(options.config, getattr(options, "overrides", []))
    return options


def make_parser(name: str) -> argparse.ArgumentParser:
    """The parser of a command of this name."""
    parser = argparse.ArgumentParser(prog=f"parallel3d {name}")
    PARSERS[name](parser)
    return parser


# --- what several commands share --------------------------------------------------------------------------------------


def add_config(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds `--config FILE` and the overrides."""
    help_text = "the run's JSON file, a name that `parallel3d configs` lists, or a Hugging Face folder to train from"
    complete_by(parser.add_argument("--config", required=required, help=help_text, **CONFIG_VALUE), "configs")
    complete_by(add_overrides(parser), "fields")


def add_overrides(parser: argparse.ArgumentParser) -> argparse.Action:
    return parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="replaces a field of the file"
    )


def complete_by(action: argparse.Action, kind: str) -> None:
    action.complete = kind  # type: ignore[attr-defined]


# --- the commands -----------------------------------------------------------------------------------------------------


def add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train a model from a JSON configuration."
    add_config(parser)
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    parser.add_argument("--join", action="store_true", help="add a worker to the run that goes on in run.directory")
    parser.add_argument(
        "--drain",
        metavar="WHAT",
        help="have workers leave the run in run.directory: rank=3, replica=1, stage=1,replica=1 or host=NAME",
    )
    parser.add_argument("--preflight", action="store_true", help="test saving and resuming, then start the run")
    parser.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        metavar="FILE",
        help="DeepSpeed's JSON file: replaces the fields that it names",
    )
    parser.add_argument("--deepspeed", action="store_true", help="as DeepSpeed's scripts have it; no effect")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="set by launchers")


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show the pipeline schedule that one JSON file asks for."
    add_config(parser)
    parser.add_argument("--lost", default="", metavar="RANKS", help="show the plan after these ranks died: 3,5")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the timeline into this file")
    parser.add_argument("--device", metavar="NAMES", help="predict a replica's speed and memory on a GPU: H100,H200")
    parser.add_argument("--workers", type=int, metavar="N", help="estimate the coordinator's costs with N workers")
    parser.add_argument(
        "--rows", "--device-table", type=Path, metavar="FILE", help="a JSON list of further devices, or of other prices"
    )
    parser.add_argument(
        "--devices", metavar="LIST", help="estimate memory, time and money on hosts of devices: 8xH100-80GB:16"
    )
    parser.add_argument("--tokens", type=positive, metavar="N", help="tokens to train on (the configuration's)")
    parser.add_argument("--price", type=positive, metavar="DOLLARS", help="of one device for an hour")
    parser.add_argument("--search", action="store_true", help="rank all layouts on --devices")
    parser.add_argument("--policies", metavar="LIST", help="precision policies to search: bf16,bf16_sr")


def add_preflight(parser: argparse.ArgumentParser) -> None:
    parser.description = "Test saving and resuming a run, in four steps."
    add_config(parser)


def add_verify(parser: argparse.ArgumentParser) -> None:
    parser.description = "Compare layouts of a configured run with one process."
    add_config(parser)
    parser.add_argument("--layouts", metavar="LIST", help=f"as in tp2.pp2.dp2,pp4.gpipe: {LAYOUT_PARTS}")
    parser.add_argument("--steps", type=count, default=3, metavar="N", help="steps to run (3)")
    add_json(parser, "the table")
    parser.add_argument("--yes", action="store_true", help="run even if the estimated memory exceeds what is free")


def add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train a tokenizer, and tokenise a corpus ahead of training."
    add_config(parser)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the tokens into this new folder")
    parser.add_argument("--tokenizer-out", type=Path, metavar="PATH", help="keep the tokenizer in this file or folder")
    num_cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--processes", type=int, default=num_cores, metavar="N", help="processes that tokenise (default: one per core)"
    )


def add_convert(parser: argparse.ArgumentParser) -> None:
    parser.description = "Convert between checkpoints and Hugging Face folders, or export any model's weights."
    commands = parser.add_subparsers(
        required=True, dest="command", metavar="to-hf | to-safetensors | from-hf | model | config"
    )

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(target=None)
        return added

    to_hf = command("to-hf", "Convert a checkpoint to a Hugging Face folder.")
    to_hf.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="a Hugging Face folder or SentencePiece model, not the run's own"
    )
    plain = command(
        "to-safetensors",
        "Export the weights of any checkpoint, your own layers' too, under the names of their modules.",
    )
    for added in (to_hf, plain):
        checkpoint = "a checkpoint, or a run's folder for its newest; or an address"
        added.add_argument("source", type=source, metavar="CHECKPOINT", help=checkpoint)
        added.add_argument("target", type=Path, metavar="FOLDER", help="the new folder")
        size = "size at which files are split (default 5)"
        added.add_argument("--max-file-gb", type=float, default=5.0, metavar="GB", help=size)
    from_hf = command("from-hf", "Convert a Hugging Face folder to a weights-only checkpoint.")
    from_hf.add_argument(
        "source", type=source, metavar="FOLDER", help="Llama, Mistral, Qwen2 or GPT-2 in safetensors files"
    )
    from_hf.add_argument("target", type=Path, metavar="CHECKPOINT", help="the new checkpoint")
    for added in (to_hf, plain, from_hf):
        added.add_argument(
            "--dtype", choices=WEIGHT_FORMATS, default="keep", help="format of the weights (keep: as they are)"
        )
    model = command("model", "Print the section model of a configuration for these weights.")
    model.add_argument("source", type=source, metavar="FOLDER", help="a Hugging Face folder, or a checkpoint")
    config = command("config", "Print a configuration to begin with, of published sizes and rates.")
    config.add_argument("source", type=source, metavar="FOLDER", help="a Hugging Face folder, or a checkpoint")
    config.add_argument("texts", nargs="*", metavar="TEXT", help="what it trains on: files, folders, globs")
    config.add_argument(
        "--tokens", type=float, metavar="N", help="to train on (default: those of the texts, or 20 a parameter)"
    )


def add_average(parser: argparse.ArgumentParser) -> None:
    parser.description = "Average the weights of checkpoints."
    parser.add_argument(
        "named", nargs="*", type=source, metavar="CHECKPOINT", help="checkpoints to average: folders or addresses"
    )
    parser.add_argument("--last", type=int, metavar="N", help="average the newest N of --checkpoints")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="the checkpoint folder of a run")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder of the new checkpoint")


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.description = "Report on a run, finished or not, and redraw its charts, or write a page to show."
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="a run's folder, such as runs/quickstart")
    parser.add_argument("others", nargs="*", type=Path, metavar="OTHER", help="with --html: further runs, to compare")
    parser.add_argument("--html", action="store_true", help="write one page that needs no network: report.html there")
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --html: where to write it")
    parser.add_argument("--dollars-per-hour", type=float, metavar="X", help="with --html: the price of all devices")
    parser.add_argument("--against", type=Path, metavar="OTHER", help="the folder of a run to compare with")
    add_json(parser, "text")
    parser.add_argument("--every", type=float, metavar="S", help="again every S seconds until the run ends")
    parser.add_argument("--no-charts", action="store_true", help="do not redraw the charts")


def add_watch(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show the figures of a run while it goes on; ends with its exit code."
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="a run's folder, such as runs/quickstart")
    parser.add_argument("--every", type=seconds, metavar="S", help="seconds between two looks (default 1; lines: 10)")
    port: dict[str, Any] = {"type": int, "nargs": "?", "const": 0, "metavar": "PORT"}
    parser.add_argument("--serve", **port, help="also serve its page to this machine (default: any free port)")


def add_track(parser: argparse.ArgumentParser) -> None:
    parser.description = "Send the figures of a run to an experiment tracker."
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="a run's folder, such as runs/quickstart")
    parser.add_argument(
        "--to", required=True, metavar="TRACKER", help="wandb, mlflow, trackio, tensorboard, or package:object"
    )
    parser.add_argument("--project", default="parallel3d", help="the tracker's project or experiment")
    parser.add_argument("--name", help="of the run there (default: the folder's)")
    parser.add_argument("--since", type=float, default=0.0, help=argparse.SUPPRESS)  # set for a run that is starting
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)  # only whether the tracker is there


def add_upload(parser: argparse.ArgumentParser) -> None:
    parser.description = "Copy a run's checkpoints to a remote store: s3://, gs://, file:// and others of fsspec."
    parser.add_argument("folder", nargs="?", type=Path, metavar="RUN_FOLDER", help="a run's, or of its checkpoints")
    parser.add_argument("target", nargs="?", metavar="ADDRESS", help="where to, such as s3://bucket/runs/name")
    parser.add_argument("--keep-last", type=count, metavar="N", help="remove all but the last N and the best there")
    parser.add_argument("--keep-every", type=count, metavar="N", help="but not those of steps that are multiples of N")
    parser.add_argument("--probe", metavar="ADDRESS", help="instead: write, read and remove a small file there")
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS}  # set by a run
    parser.add_argument("--checkpoints", type=Path, **hidden)
    parser.add_argument("--follow", type=float, default=0.0, **hidden)
    parser.add_argument("--end-wait", type=float, default=0.0, **hidden)
    parser.add_argument("--stall", type=float, default=120.0, **hidden)
    parser.add_argument("--share", type=float, default=1.0, **hidden)
    parser.add_argument("--continued-from", type=int, **hidden)
    parser.add_argument("--locked", action="store_true", **hidden)
    parser.add_argument("--events", action="store_true", **hidden)


def add_fetch(parser: argparse.ArgumentParser) -> None:
    parser.description = "Fetch a checkpoint from a remote store, with every byte verified."
    parser.add_argument("source", metavar="ADDRESS", help="a checkpoint, or a target of uploads for its newest")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="where its folder step-... appears")
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--newer-than", type=int, default=-1, metavar="STEP", help="only one of a later step")
    parser.add_argument("--resumable", action="store_true", help="not one of weights only")
    parser.add_argument("--events", action="store_true", help=argparse.SUPPRESS)


def add_goodput(parser: argparse.ArgumentParser) -> None:
    parser.description = "Estimate the throughput of training under failures."
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--scenario", metavar="FILE", help="a cluster and its failures, see configs/goodput/")
    help_text = "a run's JSON file (its layout, and seconds from its folder), a shipped name, or a Hugging Face folder"
    complete_by(source.add_argument("--config", help=help_text, **CONFIG_VALUE), "configs")
    source.add_argument(
        "--paper", action="store_true", help="published numbers and what follows from their assumptions"
    )
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the comparison into this file")
    add_json(parser, "tables")
    add_overrides(parser)  # of the scenario


def add_tune_warmup(parser: argparse.ArgumentParser) -> None:
    def lengths(text: str) -> list[int]:
        return sorted(map(count, text.split(",")))

    def tolerance(text: str) -> float:
        if not (value := positive(text)) > 1.0:
            raise argparse.ArgumentTypeError(f"{text} is not above 1")
        return value

    parser.description = "Find a sequence-length warmup for one JSON file by short runs."
    add_config(parser)
    parser.add_argument(
        "--multiple",
        type=count,
        default=3,
        metavar="N",
        help="length of a run in warmups of the learning rate (default 3)",
    )
    parser.add_argument(
        "--max-duration", type=count, metavar="STEPS", help="longest duration to try (default: half of the run)"
    )
    parser.add_argument(
        "--starts", type=lengths, metavar="LENGTHS", help="initial lengths to try (default: 8,16,32 and so on)"
    )
    parser.add_argument(
        "--tolerance", type=tolerance, default=1.3, help="allowed perplexity over the best one before (default 1.3)"
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="where the short runs are kept, finished ones for reuse (default runs/NAME-warmup)",
    )


def add_study(parser: argparse.ArgumentParser) -> None:
    add_kinds_of_studies(parser, add_config)


def add_find_batch(parser: argparse.ArgumentParser) -> None:
    parser.description = "Find the largest micro-batch of one JSON file by short runs, on this machine."
    add_config(parser)
    parser.add_argument(
        "--limit",
        type=gibibytes,
        metavar="GIB",
        help="memory of one rank (default on CPUs: its share of what is available; on GPUs what the device has)",
    )
    parser.add_argument("--most", type=count, metavar="N", help="largest micro-batch to try")
    parser.add_argument("--steps", type=count, default=3, metavar="N", help="steps of a short run (default 3)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="the logs of the short runs and the answer (default runs/NAME-batch)"
    )


def gibibytes(text: str) -> int:
    """A positive number of GiB, in bytes."""
    return int(positive(text) * 2**30)


def add_compare_dumps(parser: argparse.ArgumentParser) -> None:
    parser.description = "Compare the dumps of two runs, whatever their layouts."
    parser.add_argument("ours", type=Path, metavar="A", help="a folder of dumps, or one step in it")
    parser.add_argument("theirs", type=Path, metavar="B", help="the folder or step to compare with")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="allowed max |a - b| / max |b| (default 1e-5)")
    parser.add_argument("--rows", type=int, default=10, help="lines for each kind of tensor (default 10)")


def add_configs(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the configurations that come with the package, or print one."
    name = parser.add_argument("name", nargs="?", help="the configuration to print; schema: the JSON schema")
    complete_by(name, "shipped")


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train undisturbed, then while workers are killed, and compare."


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.description = 'Print what completes this command in a shell: eval "$(parallel3d completion bash)".'
    parser.add_argument("shell", choices=SHELLS, help="the shell that runs it")


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check this machine and environment: what is wrong, and how to mend it."
    add_config(parser, required=False)
    add_json(parser, "lines")


PARSERS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = MappingProxyType(
    {
        "train": add_train,
        "plan": add_plan,
        "preflight": add_preflight,
        "verify": add_verify,
        "prepare": add_prepare,
        "convert": add_convert,
        "generate": add_generate,
        "evaluate": add_evaluate,
        "average": add_average,
        "report": add_report,
        "watch": add_watch,
        "track": add_track,
        "upload": add_upload,
        "fetch": add_fetch,
        "goodput": add_goodput,
        "tune-warmup": add_tune_warmup,
        "find-batch": add_find_batch,
        "study": add_study,
        "compare-dumps": add_compare_dumps,
        "configs": add_configs,
        "demo": add_demo,
        "doctor": add_doctor,
        "completion": add_completion,
    }
)
"""What adds a command's options to its parser."""
