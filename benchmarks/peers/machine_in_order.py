"""Measures what is left of the machine's limit in a step's order: the model's products and attention, nothing else.

`benchmarks/peers/machine.py` repeats one kernel on the same tensors, which a cache holds. Here each layer has weights
and results of its own, and a step runs them as training does: all layers forward, then all backward, for each
micro-batch. Each kernel takes the way that was the fastest there. A result is the next product's factor where the
sizes fit. What training computes in between (norms, rotary positions, activations, the loss, sums of gradients, the
update) is left out, so this is a limit as well, and a lower one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.machine import CUT_TOKENS, DTYPES, LAYOUTS, kernels, time_s, without_slow_ways
from benchmarks.peers.steps import report_step
from benchmarks.peers.training import parse_arguments
from benchmarks.peers.workload import Workload
from parallel3d.kernels.c_loops import has_c_loops
from parallel3d.kernels.c_weight_grad import add_weight_grad
from parallel3d.kernels.layer_kernels import layer_kernels
from parallel3d.layers.block_attention import attend_in_blocks
from parallel3d.layers.gemm import add_matmul, matmul

TRIES = 3
"""Of each way to run a kernel; the shortest counts."""
LAYER_PRODUCTS = ("qkv", "attention output", "gate and up", "down")


def main() -> None:
    workload, options = parse_arguments(__doc__, kinds=("single", "dp2", "tp2"))
    tp_size, dp_size = LAYOUTS[options.kind]
    if tp_size * dp_size > 1:
        dist.init_process_group("gloo")
    model = Model(workload, tp_size, fastest_ways(workload, tp_size))
    for _ in range(options.steps):
        if dist.is_initialized():
            dist.barrier()
        started = time.perf_counter()
        for _ in range(workload.num_micro_batches // dp_size):
            model.run()
        report_step(time.perf_counter() - started)
    if dist.is_initialized():
        dist.destroy_process_group()


def fastest_ways(workload: Workload, tp_size: int) -> dict[str, str]:
    """The name of the fastest way to run each kernel of the machine's limit."""
    found = {}
    for kernel in map(without_slow_ways, kernels(workload, tp_size)):
        times = {way: min(time_s(run, kernel.count) for _ in range(TRIES)) for way, run in kernel.ways.items()}
        found[kernel.name] = min(times, key=times.__getitem__)
    return found


@dataclass
class Layer:
    """Weights and sums of gradients by product, and what a forward pass leaves for the backward pass."""

    weights: dict[str, Tensor]
    sums: dict[str, Tensor]
    factors: dict[str, Tensor] = field(default_factory=dict)
    attended: Tensor | None = None
    heads: tuple[Tensor, ...] = ()


class Model:
    """The products and the attention of one micro-batch on one tensor-parallel rank."""

    def __init__(self, workload: Workload, tp_size: int, ways: dict[str, str]):
        self.ways = ways
        self.batch, self.length = workload.micro_batch_size, workload.sequence_length
        self.num_heads = workload.num_attention_heads // tp_size
        hidden, self.inner = workload.hidden_size, workload.intermediate_size // tp_size
        self.dtype, tokens = DTYPES[workload.policy], self.batch * self.length
        shapes = dict(zip(LAYER_PRODUCTS, ((3 * hidden // tp_size, hidden), (hidden, hidden // tp_size))))
        shapes |= {"gate and up": (2 * self.inner, hidden), "down": (hidden, self.inner)}
        self.layers = [self._layer(shapes) for _ in range(workload.num_hidden_layers)]
        self.head = self._layer({"head": (workload.vocab_size // tp_size, hidden)})
        self.x = torch.randn(tokens, hidden).to(self.dtype)
        self.grads = {name: torch.randn(tokens, shape[0]).to(self.dtype) for name, shape in shapes.items()}
        """Of the results that training changes in between, of one layer: they are written shortly before."""
        self.kernels = layer_kernels("c" if has_c_loops() else "torch").attention

    def _layer(self, shapes: dict[str, tuple[int, int]]) -> Layer:
        weights = {name: (torch.randn(shape) * shape[1] ** -0.5).to(self.dtype) for name, shape in shapes.items()}
        return Layer(weights=weights, sums={name: torch.zeros(shape) for name, shape in shapes.items()})

    def run(self) -> None:
        x = self.x
        for layer in self.layers:
            attended = self._attend(layer, self._forward(layer, "qkv", x))
            gate_up = self._forward(layer, "gate and up", self._forward(layer, "attention output", attended))
            x = self._forward(layer, "down", gate_up.view(-1)[: gate_up.shape[0] * self.inner].view(-1, self.inner))
        logits = self._forward(self.head, "head", x)
        grad = self._backward(self.head, "head", logits)
        for layer in reversed(self.layers):
            self._backward(layer, "down", grad)
            grad = self._backward(layer, "gate and up", self.grads["gate and up"])
            mixed_grad = self._backward(layer, "attention output", grad)
            assert layer.attended is not None
            torch.autograd.grad(layer.attended, layer.heads, mixed_grad.view_as(layer.attended))
            grad = self._backward(layer, "qkv", self.grads["qkv"])

    def _attend(self, layer: Layer, qkv: Tensor) -> Tensor:
        """(tokens, q + k + v) -> (tokens, heads)."""
        parts = qkv.view(self.batch, self.length, 3, self.num_heads, -1).unbind(2)
        layer.heads = tuple(part.detach().requires_grad_() for part in parts)
        q, k, v = (part.transpose(1, 2) for part in layer.heads)
        if self.ways["attention"] == "ours":
            mixed = attend_in_blocks(q, k, v, kernels=self.kernels)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        layer.attended = mixed.transpose(1, 2)
        return layer.attended.detach().reshape(qkv.shape[0], -1)

    def _forward(self, layer: Layer, name: str, x: Tensor) -> Tensor:
        layer.factors[name] = x
        found = product(self.ways[f"{name} forward"], x, layer.weights[name].t())
        assert found is not None
        return found

    def _backward(self, layer: Layer, name: str, grad: Tensor) -> Tensor:
        found = product(self.ways[f"{name} input gradient"], grad, layer.weights[name])
        product(self.ways[f"{name} weight gradient"], grad.t(), layer.factors.pop(name), layer.sums[name])
        assert found is not None
        return found


def product(way: str, a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor | None:
    """a b in one of the ways of `machine.product_kernels`; None where it goes into `total` or is cut along the sum."""
    if way == "widened" and total is not None:
        add_matmul(total, a, b, "widened", overwrite=True)
        return None
    if way == "by tiles":
        assert total is not None and add_weight_grad(total, a.t(), b, overwrite=True)
        return None
    if way == "ours, cut" and total is None:
        out = a.new_empty((a.shape[0], b.shape[1]))
        for start in range(0, a.shape[0], CUT_TOKENS):
            matmul(a[start : start + CUT_TOKENS], b, out=out[start : start + CUT_TOKENS])
        return out
    if way == "ours, cut":
        for start in range(0, b.shape[0], CUT_TOKENS):
            matmul(a[:, start : start + CUT_TOKENS], b[start : start + CUT_TOKENS])
        return None
    return torch.mm(a, b) if way == "torch" else matmul(a, b, "widened" if way == "widened" else "onednn")


if __name__ == "__main__":
    main()
