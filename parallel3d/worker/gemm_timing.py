"""Chooses the library for each product of a run on CPUs, by timing both at the run's shapes.

Which one is faster depends on the vendor and the role, much less on the shape: on two cores of an AMD EPYC oneDNN
computes fp32 products up to twice as fast as MKL; on an Intel processor with AMX MKL computes weight gradients 1.5
times as fast as oneDNN, and in bf16 a loop of our own is twice as fast as oneDNN (docs/experiments.md). So in fp32 the
costliest shape decides for all. Without instructions for bf16 no timing is needed: products of widened factors are
about three times as fast. One rank measures and all take over its choices, because last bits depend on them; with them
go the form of attention (`worker/attention_timing.py`) and that of all other kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn

from parallel3d.checkpoint.directory import read_index
from parallel3d.compiled_loops import multiplies_bf16
from parallel3d.config.schema import Config
from parallel3d.elastic.protocol.restart_policy import StartInstruction
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.kernels.c_loops import has_c_loops, has_tiles, timed_loops
from parallel3d.kernels.choice import KernelForm, choose_kernels
from parallel3d.layers.cross_entropy import LinearCrossEntropy, block_rows, gradient_rows
from parallel3d.layers.gemm import Gemm, Library, ProductKey, Role
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.monitor.environment import describe_cpu
from parallel3d.parallel.group import AbsentGroup
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.precision.policy import policy_of
from parallel3d.trainer.build import MakeStage
from parallel3d.worker.attention_timing import (
    AttentionShape,
    attention_shape,
    choose_form,
    describe_form,
    is_attention_measured,
    time_attention,
)

MIN_GAIN = 1.1
"""The default stays unless the other library is this many times as fast: timings scatter."""
TIMED_MULTIPLICATIONS: Mapping[torch.dtype, int] = {torch.float32: 1 << 28, torch.bfloat16: 1 << 26}
"""Of one product, at most, if its timed part has more than OUTPUTS_UNIT outputs: in fp32 some ms."""
TIMED_TOKENS: Mapping[torch.dtype, int] = {torch.float32: 1024, torch.bfloat16: 256}
"""At most. With 64 a weight gradient waits for memory, which says nothing of one of more tokens; of fp32 products on
several threads a part that takes a ms has other ratios than the whole (docs/experiments.md)."""
OUTPUTS_UNIT = 64
MAX_ROUNDS = 4
"""Of each shape; the first one, in which libraries prepare themselves, does not count."""
BUDGET_S = 0.12
"""After that each shape is timed once."""
CACHE_FORMAT = 10
"""Grows when the way of measuring or a form of torch changes: choices are measured again, as after a change in C."""

CANDIDATES: Mapping[torch.dtype, Mapping[Role, tuple[Library, ...]]] = {
    torch.float32: {role: ("mkl", "onednn") for role in get_args(Role)},
    torch.bfloat16: {"weight_grad": ("onednn", "tiles")},
}
"""What is timed, by the format of the factors."""

Timings = Mapping[ProductKey, Mapping[Library, float]]
"""Seconds of each product on each library."""


@dataclass(frozen=True, order=True)
class LinearShape:
    """A rank's share of a weight (out, in), and the tokens of one product with it."""

    out_features: int
    in_features: int
    num_tokens: int


def is_choice_measured(config: Config, device: torch.device) -> bool:
    """Whether the leader's machine decides: on CPUs, for products in fp32, and in bf16 for weight gradients if it has
    AMX, and for all products if it has no instructions for bf16; last bits depend on it."""
    is_timed = policy_of(config.precision).compute in (torch.float32, torch.float16, torch.bfloat16)
    is_free = config.run.cpu_gemm == "auto" and config.precision.sums != "exact"
    return device.type == "cpu" and is_timed and is_free and torch.backends.mkldnn.is_available()


def is_form_chosen(config: Config, device: torch.device) -> bool:
    """Whether the leader's machine decides on C forms of kernels: on CPUs, unless bits must not depend on it."""
    is_free = config.run.kernels == "auto" and config.run.compile == "never" and config.precision.sums != "exact"
    return device.type == "cpu" and is_free and policy_of(config.precision).compute in (torch.bfloat16, torch.float32)


def _timed_dtype(config: Config) -> torch.dtype:
    """The format of the factors; products of fp16 ones are computed in fp32."""
    compute = policy_of(config.precision).compute
    return torch.float32 if compute is torch.float16 else compute


def linear_shapes(stage: nn.Module, num_tokens: int) -> set[LinearShape]:
    """The shapes of all products in `stage` (it may be on the meta device), for micro-batches of `num_tokens`."""
    return set(_linear_shapes(stage, num_tokens))


def _linear_shapes(stage: nn.Module, num_tokens: int) -> Iterator[LinearShape]:
    for module in stage.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            out_features, in_features = module.weight.shape
            yield LinearShape(out_features, in_features, num_tokens)
        elif isinstance(module, LinearCrossEntropy) and module.num_valid:
            num_valid, dtype = module.num_valid, module.weight.dtype
            rows = min(num_tokens, gradient_rows(block_rows(num_valid, dtype, "cpu"), num_valid, dtype, "cpu"))
            yield LinearShape(module.num_valid, module.weight.shape[1], rows)


@torch.no_grad()
def time_products(
    shapes: Iterable[LinearShape],
    clock: Callable[[], float] = time.perf_counter,
    *,
    dtype: torch.dtype = torch.float32,
) -> Timings:
    """Times the products with each shape on all candidates for `dtype`, in turn; the shortest of some runs counts."""
    timings: dict[ProductKey, dict[Library, float]] = {}
    begun = clock()
    for shape in sorted(shapes):
        timed = timed_part(shape, dtype)
        x, grad = (torch.ones(timed.num_tokens, size, dtype=dtype) for size in (timed.in_features, timed.out_features))
        size = (timed.out_features, timed.in_features)
        weight, total = torch.ones(size, dtype=dtype), torch.ones(size)
        for number in range(MAX_ROUNDS):
            if number > 1 and clock() - begun > BUDGET_S:
                break
            for library in get_args(Library):
                for role, product in _products(Gemm(default=library), x, grad, weight, total).items():
                    if library not in CANDIDATES[dtype].get(role, ()):
                        continue
                    started = clock()
                    product()
                    seconds = clock() - started if number else float("inf")
                    known = timings.setdefault(ProductKey(role, shape.out_features, shape.in_features), {})
                    known[library] = min(known.get(library, float("inf")), seconds)
    return timings


def timed_part(shape: LinearShape, dtype: torch.dtype) -> LinearShape:
    """The part of a product that is timed in its place: fewer tokens and outputs, all inputs."""
    num_tokens = min(shape.num_tokens, TIMED_TOKENS[dtype])
    out_features = TIMED_MULTIPLICATIONS[dtype] // (num_tokens * shape.in_features) // OUTPUTS_UNIT * OUTPUTS_UNIT
    return LinearShape(min(shape.out_features, max(OUTPUTS_UNIT, out_features)), shape.in_features, num_tokens)


def _products(gemm: Gemm, x: Tensor, grad: Tensor, weight: Tensor, total: Tensor) -> dict[Role, Callable[[], object]]:
    return {
        "forward": lambda: gemm.forward(x, weight),
        "input_grad": lambda: gemm.input_grad(grad, weight),
        "weight_grad": lambda: gemm.add_weight_grad(total, grad, x),
    }


def choose_libraries(timings: Timings, default: Library = "onednn") -> Gemm:
    """The faster library for each product; the default unless the other gains enough."""
    choices: dict[ProductKey, Library] = {}
    for key, seconds in timings.items():
        best = min(seconds, key=lambda library: seconds[library])
        if seconds[best] * MIN_GAIN <= seconds[default]:
            choices[key] = best
    return Gemm(default=default, choices=choices)


def costliest(shapes: Iterable[LinearShape]) -> LinearShape:
    """The shape of the most multiplications; of equal ones the largest weight."""
    return max(shapes, key=lambda shape: (shape.out_features * shape.in_features * shape.num_tokens, shape))


def spread_by_role(choices: Mapping[ProductKey, Library], shapes: Iterable[LinearShape]) -> Gemm:
    """The choices that were made for the roles of one shape, for all `shapes`."""
    by_role, sizes = {key.role: library for key, library in choices.items()}, _sizes(shapes)
    return Gemm(choices={ProductKey(role, *size): library for role, library in by_role.items() for size in sizes})


def _sizes(shapes: Iterable[LinearShape]) -> list[tuple[int, int]]:
    return sorted({(shape.out_features, shape.in_features) for shape in shapes})


def widened_products(shapes: Iterable[LinearShape]) -> Gemm:
    """All products of bf16 factors that are widened to fp32."""
    sizes = _sizes(shapes)
    return Gemm(choices={ProductKey(role, *size): "widened" for role in get_args(Role) for size in sizes})


def describe_choices(gemm: Gemm, timings: Timings) -> str:
    """One line for the log."""
    has_tiles_timed = any("tiles" in each for each in timings.values())
    subject = "bf16 weight gradients" if has_tiles_timed else "fp32 products of each role"
    gains = [timings[key][gemm.default] / timings[key][library] for key, library in gemm.choices.items()]
    if not gains:
        return f"{subject}: {gemm.default} is the fastest library for all {len(timings)}"
    (other,) = set(gemm.choices.values())
    gain = f"where it is up to {max(gains):.1f} times as fast"
    return f"{subject}: {gemm.default}, and {other} for {len(gains)} of {len(timings)}, {gain}"


def agree_on_gemm(
    config: Config,
    context: WorkerContext,
    device: torch.device,
    start: StartInstruction,
    make_stage: MakeStage,
    *,
    is_leader: bool,
) -> Gemm:
    """Returns what computes the products, attention and all else on all ranks: as configured, as in the checkpoint that
    the run resumes from, or as the leader has measured and found on its machine."""
    configured, is_measured = _configured(config, device), is_choice_measured(config, device)
    has_attention, has_form = is_attention_measured(config, device), is_form_chosen(config, device)
    if not (is_measured or has_attention or has_form):
        return configured
    if start.checkpoint is not None:
        chosen = Gemm.from_json(read_index(Path(start.checkpoint)).facts.cpu_gemm)
    elif is_leader:
        form = choose_kernels(config.run.kernels, device, agreed="c" if has_form and has_c_loops() else "torch")
        shapes, attention = _shapes_of_the_run(config, make_stage, device, form)
        cache, dtype = Path(str(config.data.cache_directory)), _timed_dtype(config)
        chosen, text = known_or_measured(shapes, cache, attention, dtype) if shapes or attention else (Gemm(), "")
        chosen = replace(chosen, kernels=form if has_form else Gemm.kernels)
        context.control.set(f"cpu_gemm/{start.attempt}", json.dumps(chosen.to_json()).encode())
        if text:
            context.control.publish({"kind": "notice", "text": text})
        context.control.publish({"kind": "environment", "cpu_gemm": chosen.to_json()})
    else:
        published = context.control.get(f"cpu_gemm/{start.attempt}", context.control.token)
        chosen = Gemm.from_json(json.loads(published))
    return Gemm(
        default=configured.default,
        choices=chosen.choices if is_measured else {},
        attention=chosen.attention if has_attention else configured.attention,
        kernels=chosen.kernels if has_form else configured.kernels,
    )


def _configured(config: Config, device: torch.device) -> Gemm:
    """The configured libraries and form, or the defaults."""
    library, form = config.run.cpu_gemm, config.run.cpu_attention
    return Gemm(
        default="onednn" if library == "auto" else library,
        attention="sdpa" if form == "auto" or device.type != "cpu" else form,
    )


def known_or_measured(
    shapes: Iterable[LinearShape],
    cache: Path,
    attention: AttentionShape | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Gemm, str]:
    """Returns the choices for this machine and text for the log. A file in the folder `cache` keeps them, so that a
    run that is repeated gives the same bits, as long as the code that was timed is the same."""
    shapes, num_threads = sorted(shapes), torch.get_num_threads()
    facts = (CACHE_FORMAT, timed_loops(), describe_cpu(), torch.__version__, num_threads, shapes, attention, dtype)
    file = cache / f"cpu_gemm-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(file.read_text())
        return Gemm.from_json(known["choices"]), known["text"]
    gemm, text = measured_forms(shapes, attention, dtype)
    with contextlib.suppress(OSError):  # without a cache the next run measures again
        cache.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"choices": gemm.to_json(), "text": text}))
        os.replace(scratch, file)
    return gemm, text


def measured_forms(
    shapes: Iterable[LinearShape], attention: AttentionShape | None, dtype: torch.dtype
) -> tuple[Gemm, str]:
    """Returns the choices for these products and this attention as measured now, and text for the log."""
    gemm, lines = Gemm(), []
    if shapes and dtype is torch.bfloat16 and not multiplies_bf16():
        gemm = widened_products(shapes)
        lines.append("bf16 products: of factors widened to fp32, as this processor has no instructions for bf16")
    elif shapes:
        is_spread = dtype is torch.float32  # of one long timing: several short ones scatter by more than shapes differ
        timings = time_products([costliest(shapes)] if is_spread else shapes, dtype=dtype)
        gemm = choose_libraries(timings)
        lines.append(describe_choices(gemm, timings))
        gemm = spread_by_role(gemm.choices, shapes) if is_spread else gemm
    if attention is not None:
        seconds = time_attention(attention)
        gemm = replace(gemm, attention=choose_form(seconds))
        lines.append(describe_form(seconds))
    return gemm, "; ".join(lines)


def _shapes_of_the_run(
    config: Config, make_stage: MakeStage, device: torch.device, form: KernelForm = "torch"
) -> tuple[set[LinearShape], AttentionShape | None]:
    """The shapes of all products and of attention, as far as measurements decide."""
    assert config.batch.micro_batch_size is not None, "needs a resolved configuration"
    tp = TensorParallel(group=AbsentGroup(name="none", rank=0, ranks=tuple(range(config.parallel.tp_size))))
    only_shapes = config.model_copy(update={"run": config.run.model_copy(update={"kernels": "auto"})})  # C's need a CPU
    stage = make_stage(only_shapes, range(config.model.num_hidden_layers), tp, torch.device("meta"), gemm=None)
    num_tokens = config.batch.micro_batch_size * config.batch.sequence_length
    has_candidates = _timed_dtype(config) is torch.float32 or has_tiles() or not multiplies_bf16()
    return (
        linear_shapes(stage, num_tokens) if is_choice_measured(config, device) and has_candidates else set(),
        attention_shape(config, stage, form) if is_attention_measured(config, device) else None,
    )
