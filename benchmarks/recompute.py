"""Measures recomputation: step time and peak memory of one stage's forward and backward pass.

`python benchmarks/recompute.py [--policy bf16] [--device cuda] [--rounds 5]`: the modes take turns, round after round,
so that noise hits all alike. Memory is that of the tensors that operators make (inprocess/live_bytes.py), in a run of
its own, without compiled kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parallel3d.config.schema import ModelConfig
from parallel3d.inprocess.live_bytes import LiveBytes
from parallel3d.kernels.layer_kernels import LayerKernels, layer_kernels
from parallel3d.layers.gemm import Gemm
from parallel3d.layers.gradient_sink import GradientSink
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.parameter import parameters_of
from parallel3d.layers.placement import LayerContext
from parallel3d.models.decoder import DecoderStage
from parallel3d.models.make import make_decoder
from parallel3d.parallel.tensor_parallel import solo_region
from parallel3d.precision.policy import POLICIES
from parallel3d.recompute import Recompute

MODES: tuple[Recompute, ...] = get_args(Recompute)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="fp32", choices=sorted(POLICIES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    for name, size in [
        ("hidden-size", 512),
        ("intermediate-size", 1376),
        ("num-hidden-layers", 8),
        ("num-attention-heads", 8),
        ("vocab-size", 8192),
        ("sequence-length", 512),
        ("micro-batch-size", 4),
    ]:
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--compile", action="store_true", help="times with run.compile elementwise")
    parser.add_argument("--hidden-dropout", type=float, default=0.0)
    return parser.parse_args(arguments)


def build(
    options: argparse.Namespace,
    recompute: Recompute,
    *,
    compiles: bool,
    kernels: LayerKernels | None = None,
    gemm: Gemm | None = None,
) -> DecoderStage:
    """The whole model on one rank, with main gradients; torch's kernels and default products if none are given."""
    config = ModelConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=options.num_attention_heads,
        hidden_dropout=options.hidden_dropout,
    )
    device, policy = torch.device(options.device), POLICIES[options.policy]
    context = LayerContext(
        tp=solo_region(),
        policy=policy,
        device=device,
        kernels=kernels or layer_kernels("torch", compiles=compiles),
        gemm=gemm or Gemm(),
    )
    layers, num_positions = range(config.num_hidden_layers), options.sequence_length
    stage = make_decoder(config, layers, num_positions=num_positions, context=context, recompute=recompute)
    for parameter in parameters_of(stage):
        parameter.data.normal_(std=0.02)
        parameter.attach(GradientSink.with_own_buffer(parameter, gemm=gemm))
    return stage


def step(stage: DecoderStage, tokens: Tensor, options: argparse.Namespace) -> None:
    slots = tuple(range(options.micro_batch_size))
    micro_batch = MicroBatch(seed=1, iteration=1, slots=slots, sequence_length=options.sequence_length)
    stage(tokens, micro_batch, tokens).backward()
    if tokens.is_cuda:
        torch.cuda.synchronize()


def step_s(stage: DecoderStage, tokens: Tensor, options: argparse.Namespace) -> float:
    started = time.perf_counter()
    step(stage, tokens, options)
    return time.perf_counter() - started


def peak_bytes(stage: DecoderStage, tokens: Tensor, options: argparse.Namespace) -> int:
    """Of one step, beyond weights and main gradients."""
    with torch.autograd.set_multithreading_enabled(False), LiveBytes() as memory:
        step(stage, tokens, options)
    return memory.peak


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    tokens = torch.randint(options.vocab_size, (options.micro_batch_size * options.sequence_length,))
    tokens = tokens.to(options.device)
    peaks = {mode: peak_bytes(build(options, mode, compiles=False), tokens, options) for mode in MODES}
    stages = {mode: build(options, mode, compiles=options.compile) for mode in MODES}
    for stage in stages.values():
        step(stage, tokens, options)  # kernels are made
    times: dict[Recompute, list[float]] = {mode: [] for mode in MODES}
    for _ in range(options.rounds):
        for mode, stage in stages.items():
            times[mode].append(step_s(stage, tokens, options))
    print("| recompute | peak, MiB | of none | step, s (median; best) | of none |\n|---|---|---|---|---|")
    for mode in MODES:
        median, base = statistics.median(times[mode]), statistics.median(times["none"])
        print(
            f"| {mode} | {peaks[mode] / 2**20:,.0f} | {peaks[mode] / peaks['none']:.2f} "
            f"| {median:.3f}; {min(times[mode]):.3f} | {median / base:.2f} |"
        )


if __name__ == "__main__":
    main()
