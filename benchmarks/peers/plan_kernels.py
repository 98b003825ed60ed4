"""Times what one rank's layers are made of, for plan_accuracy.py: products, attention, a sum over ranks.

    python -m benchmarks.peers.plan_kernels CONFIG STORE RANK NUM_PROCESSES

All processes run the same kernel at the same time. The last line is JSON.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
from torch.distributed import FileStore

from parallel3d.config.load import load_config, resolve
from parallel3d.kernels.c_loops import has_c_loops
from parallel3d.kernels.layer_kernels import layer_kernels
from parallel3d.layers.attention import attend
from parallel3d.layers.gemm import AttentionForm, Gemm
from parallel3d.models.make import make_stage
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.group import AbsentGroup
from parallel3d.parallel.shared_memory import share_memory
from parallel3d.parallel.shared_memory_group import SharedMemoryGroup
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.precision.policy import policy_of
from parallel3d.worker.attention_timing import AttentionShape, attention_shape
from parallel3d.worker.gemm_timing import LinearShape, linear_shapes, measured_forms

ROUNDS = 7
SIZES = (16 << 10, 1 << 20)
"""fp32 numbers of the two sums."""


def main() -> None:
    file, store_file, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    config = resolve(load_config(file, []), config_path=file)
    torch.set_num_threads(config.run.threads_per_rank or 1)
    sums, meet = _sums(Path(store_file), rank, size)
    tp = TensorParallel(group=AbsentGroup(name="none", rank=0, ranks=(0,)))
    stage = make_stage(config, range(config.model.num_hidden_layers), tp, torch.device("meta"), gemm=None)
    assert config.batch.micro_batch_size is not None
    num_tokens = config.batch.micro_batch_size * config.batch.sequence_length
    dtype = policy_of(config.precision).compute
    shapes = linear_shapes(stage, num_tokens)
    head = max(shapes, key=lambda shape: shape.out_features)  # its vocabulary is wider than any layer
    layer = sorted(shapes - {head})
    meet()
    attention = attention_shape(config, stage, "c" if has_c_loops() else "torch")
    assert attention is not None
    gemm, _ = measured_forms(shapes, attention, dtype)
    product_s = sum(_product_s(gemm, shape, dtype, meet) for shape in layer)
    flops = sum(6.0 * shape.num_tokens * shape.out_features * shape.in_features for shape in layer)
    forward_s, backward_s = _attention_s(attention, gemm.attention, meet)
    seen = 4.0 * num_tokens * attention.length * attention.num_query_heads * attention.head_size / 2
    rates = {
        "product": flops / product_s,
        "attention": seen / forward_s,
        "attention_backward": 2.5 * seen / backward_s,
        "all_reduce": sums,
    }
    print(json.dumps(rates))


def _sums(store_file: Path, rank: int, size: int) -> tuple[tuple[float, float], Callable[[], None]]:
    """Seconds of sums of both sizes, and a barrier."""
    if size == 1:
        return (math.nan, math.nan), lambda: None
    store = FileStore(str(store_file), size)
    memory = share_memory(store, "sums", rank=rank, size=size, timeout=timedelta(seconds=60))
    assert memory is not None, "this machine has no shared memory for groups"
    group = SharedMemoryGroup(
        name="sums", rank=rank, ranks=tuple(range(size)), memory=memory, token=AbortToken(), timeout_s=60.0
    )

    def meet() -> None:
        group.all_reduce(torch.zeros(1))

    seconds = []
    for count in SIZES:
        tensor = torch.ones(count)
        seconds.append(_median_s(lambda tensor=tensor: group.all_reduce(tensor), meet, repeats=5))
    return (seconds[0], seconds[1]), meet


def _median_s(run: Callable[[], object], meet: Callable[[], None], repeats: int = 1) -> float:
    times = []
    for _ in range(ROUNDS + 1):
        meet()
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        times.append((time.perf_counter() - started) / repeats)
    return median(times[1:])


def _product_s(gemm: Gemm, shape: LinearShape, dtype: torch.dtype, meet: Callable[[], None]) -> float:
    """Seconds of the three products with one weight."""
    x = torch.randn(shape.num_tokens, shape.in_features).to(dtype)
    grad = torch.randn(shape.num_tokens, shape.out_features).to(dtype)
    weight = torch.randn(shape.out_features, shape.in_features).to(dtype)
    total = torch.zeros(shape.out_features, shape.in_features)

    def run() -> None:
        gemm.forward(x, weight)
        gemm.input_grad(grad, weight)
        gemm.add_weight_grad(total, grad, x)

    return _median_s(run, meet, repeats=2)


def _attention_s(shape: AttentionShape, form: AttentionForm, meet: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass."""
    kernels = layer_kernels(shape.kernels).attention
    rows = (shape.num_sequences, shape.length)
    heads = (shape.num_query_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (torch.randn(*rows, each, shape.head_size).to(shape.dtype).requires_grad_() for each in heads)
    grad = torch.ones_like(q)

    def forward() -> torch.Tensor:
        return attend(q, k, v, form=form, kernels=kernels)

    forward_s = _median_s(forward, meet)
    both_s = _median_s(lambda: torch.autograd.grad(forward(), (q, k, v), grad), meet)
    return forward_s, both_s - forward_s


if __name__ == "__main__":
    main()
