"""The sizes that every contestant trains with, and how they travel on a command line; no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A Llama-like model (RMSNorm, rotary, SwiGLU, untied, no biases) and its batches."""

    vocab_size: int = 8192
    hidden_size: int = 512
    intermediate_size: int = 1376
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    sequence_length: int = 512
    micro_batch_size: int = 4
    global_batch_size: int = 16
    policy: str = "fp32"

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch_size // self.micro_batch_size

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    def arguments(self) -> list[str]:
        """The command line that `parse_workload` reads back."""
        return [part for name, value in asdict(self).items() for part in (_option(name), str(value))]


def add_workload(parser: argparse.ArgumentParser, names: Sequence[str] | None = None) -> None:
    """Adds an option for each field of the workload, or for those named."""
    for field in fields(Workload):
        if names is None or field.name in names:
            choices = ("fp32", "bf16") if field.name == "policy" else None
            kind = type(field.default)
            parser.add_argument(_option(field.name), type=kind, default=field.default, choices=choices)


def read_workload(options: argparse.Namespace) -> Workload:
    return Workload(**{f.name: getattr(options, f.name) for f in fields(Workload) if hasattr(options, f.name)})


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
