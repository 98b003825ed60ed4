"""The options of `parallel3d study`; no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from parallel3d.commands.option_types import add_json, count, not_negative, positive
from parallel3d.config.shipped import find_config

AddConfig = Callable[..., None]


def add_study(parser: argparse.ArgumentParser, add_config: AddConfig) -> None:
    """Adds the kinds of studies. `add_config` adds --config and the overrides."""
    parser.description = "Answer a question about a configuration by short real runs of it."
    kinds = parser.add_subparsers(required=True, dest="kind", metavar="KIND")

    def kind(name: str, text: str, *, config_required: bool = True) -> argparse.ArgumentParser:
        added = kinds.add_parser(name, help=text, description=text)
        if name not in ("golden", "scaling"):
            add_config(added, required=config_required)
        return added

    _add_noise(
        kind("noise", "How far do seeds scatter, and is a change better by more than that?", config_required=False)
    )
    _add_precision(kind("precision", "Which precision policy is the cheapest that is not worse beyond noise?"))
    _add_batch(kind("batch", "Which global batch gives the lowest loss for the same tokens?"))
    _add_golden(kind("golden", "Are a run's losses those that were recorded?"))
    _add_scaling(kind("scaling", "Does a token cost as much on more hosts?"))
    _add_layout(kind("layout", "How fast are the best layouts of `plan`, measured?"))


def seeds(text: str) -> list[int]:
    """Seeds, as in 1,2,3; one number is a count, for which a single negative number stands: -5 is five seeds."""
    numbers = [int(part) for part in text.split(",") if part]
    if not numbers or min(numbers) < 0 or (len(numbers) == 1 and numbers[0] < 1 and "," not in text):
        raise argparse.ArgumentTypeError(f"{text} is neither a number of seeds nor a list of them such as 1,2,3")
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text} names a seed twice")
    return numbers if "," in text else [-numbers[0]]


def chosen_seeds(given: list[int], first: int) -> list[int]:
    """The seeds that an option asks for: a list, or this many from `first` on."""
    return list(range(first, first - given[0])) if len(given) == 1 and given[0] < 0 else given


def counts(text: str) -> list[int]:
    return sorted(map(count, text.split(",")))


def _add_noise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=seeds, default=[-5], metavar="N", help="this many, or a list such as 1,2,3 (5)")
    parser.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="section.field=value",
        help="the candidate: the configuration with this change; may be repeated",
    )
    candidate = parser.add_argument(
        "--candidate",
        type=lambda name: str(find_config(name)),
        metavar="FILE",
        help="the candidate: another JSON file, or a shipped name",
    )
    candidate.complete = "configs"  # type: ignore[attr-defined]
    parser.add_argument(
        "--runs", nargs="+", type=Path, default=[], metavar="FOLDER", help="runs that exist, to train none"
    )
    parser.add_argument(
        "--candidate-runs", nargs="+", type=Path, default=[], metavar="FOLDER", help="with --runs: the candidate's"
    )
    _add_steps_and_out(parser)


def _add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policies", default="fp32,bf16,bf16_sr", metavar="LIST", help="(fp32,bf16,bf16_sr)")
    parser.add_argument("--reference", metavar="POLICY", help="the others are compared with it (the first)")
    parser.add_argument("--seeds", type=seeds, default=[-3], metavar="N", help="this many, or a list such as 1,2,3 (3)")
    parser.add_argument(
        "--margin", type=not_negative, metavar="NATS", help="a difference that does not matter (a quarter of sd)"
    )
    parser.add_argument("--by", choices=("time", "memory"), default="time", help="what is cheap (time)")
    _add_steps_and_out(parser)


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=counts, required=True, metavar="LIST", help="global batches: 8,16,32,64")
    parser.add_argument("--tokens", type=positive, metavar="N", help="that each run trains on (the configuration's)")
    parser.add_argument("--seeds", type=seeds, default=[-1], metavar="N", help="this many, or a list such as 1,2,3 (1)")
    parser.add_argument(
        "--scale-lr", choices=("none", "sqrt", "linear"), default="none", help="the learning rate with the batch (none)"
    )
    _add_out(parser)


def _add_golden(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER", help="the run to compare, or to record")
    parser.add_argument("--against", type=Path, metavar="FILE", help="the golden losses (RUN_FOLDER/golden.json)")
    parser.add_argument("--record", action="store_true", help="write them instead")
    parser.add_argument("--rtol", type=not_negative, metavar="X", help="largest relative difference (1e-3 in fp32)")
    add_json(parser, "text")


def _add_scaling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN_FOLDER", help="measured runs, of different widths")
    parser.add_argument("--ranks-per-host", type=count, metavar="N", help="of the runs (default: all of a run on one)")
    parser.add_argument("--dollars-per-hour", type=positive, metavar="X", help="of one host")
    config = parser.add_argument(
        "--config", type=lambda name: str(find_config(name)), metavar="FILE", help="estimate this one on --devices, too"
    )
    config.complete = "configs"  # type: ignore[attr-defined]
    parser.add_argument("--devices", metavar="LIST", help="hosts of devices: 8xH100-80GB:2,8xH100-80GB:4")
    parser.add_argument("--device-table", type=Path, metavar="FILE", help="a JSON list of further devices")
    parser.add_argument("--search", action="store_true", help="take the best layout on each number of hosts")
    parser.add_argument("--set", action="append", default=[], metavar="section.field=value", help="of --config")
    _add_out(parser)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", required=True, metavar="LIST", help="what the ranking is for: 4xH100-80GB")
    parser.add_argument("--device-table", type=Path, metavar="FILE", help="a JSON list of further devices")
    parser.add_argument("--top", type=count, default=3, metavar="K", help="layouts to run (3)")
    parser.add_argument("--policies", metavar="LIST", help="precision policies to search: bf16,bf16_sr")
    parser.add_argument("--steps", type=count, default=6, metavar="N", help="of each run (6)")
    _add_out(parser)


def _add_steps_and_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=count, metavar="N", help="of each run, at unchanged learning rates (all)")
    _add_out(parser)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the runs and result.json (runs/NAME-KIND)")
    add_json(parser, "the table")
