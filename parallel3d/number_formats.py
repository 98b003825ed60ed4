"""The number formats of weights, gradients and optimizer state: one row each, with its names elsewhere. Pure.

A new format is one row here. Precision policies (`config/specs/policies.py`) refer to rows; messages between ranks,
checkpoints, Hugging Face folders and data-sheet peaks derive from them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """One floating-point format."""

    name: str
    """In configurations, messages and data sheets."""
    torch_name: str
    stored_name: str
    """In safetensors files."""
    num_bytes: int
    """Of one element."""


FP32 = NumberFormat(name="fp32", torch_name="float32", stored_name="F32", num_bytes=4)
FP64 = NumberFormat(name="fp64", torch_name="float64", stored_name="F64", num_bytes=8)
BF16 = NumberFormat(name="bf16", torch_name="bfloat16", stored_name="BF16", num_bytes=2)
FP16 = NumberFormat(name="fp16", torch_name="float16", stored_name="F16", num_bytes=2)

NUMBER_FORMATS = (FP32, FP64, BF16, FP16)
"""A format's place is its code in messages between ranks."""
