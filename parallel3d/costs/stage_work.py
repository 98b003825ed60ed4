"""The kernels of one stage for one micro-batch, from the model's sizes alone. Pure.

Products, attention and bytes are those that a rehearsed step counts (`rehearsal/meta_rank.py`), written as formulas, so
that thousands of layouts take a second; tests/costs compares the two. Times are those of `rehearsal/roofline.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from parallel3d.config.derived import attention_window, family_of, head_size, key_value_size, query_size
from parallel3d.config.schema import Config
from parallel3d.config.specs.policies import POLICY_SPECS
from parallel3d.costs.rank_memory import MicroBatchSizes
from parallel3d.costs.state_bytes import StateBytes, StateFormats
from parallel3d.rehearsal.device_rows import DeviceRow
from parallel3d.rehearsal.ideal_counts import CROSS_ENTROPY_BYTES, HEAD_BLOCK_BYTES, ideal_layer
from parallel3d.rehearsal.kernel_counts import KernelCounts, KernelWork
from parallel3d.rehearsal.roofline import UPDATE_KERNEL, estimate_phase

ALIGNMENT = 8
"""Elements of 16 bits to which the rows of a fast product's matrices are aligned."""


@dataclass(frozen=True, kw_only=True)
class PassSeconds:
    """A stage's passes over one micro-batch, without communication."""

    forward: float
    backward: float
    layer_products: tuple[float, float]
    """Of the products for a layer's inputs, and for its weights, which collectives may overlap."""
    num_kernels: int

    @property
    def total(self) -> float:
        return self.forward + self.backward


def layer_counts(config: Config, sizes: MicroBatchSizes) -> tuple[KernelCounts, KernelCounts]:
    """The kernels of one layer's forward and backward pass, recomputation included."""
    model, parallel = config.model, config.parallel
    tokens, tp = sizes.num_tokens, parallel.tp_size
    products = Counter(_layer_products(config, sizes))
    scores, scores_backward = _attention(config, sizes)
    forward, backward = (
        _elementwise("elementwise", ideal.num_bytes * sizes.itemsize // 2, max(1, ideal.num_kernels - others))
        for ideal, others in zip(ideal_layer(model, tokens, tp, sizes.local_tokens), (5, 9))
    )
    first = KernelCounts(works=products + Counter([scores]) + forward)
    twice = Counter({work: 2 * count for work, count in products.items()})
    second = KernelCounts(works=twice + Counter([scores_backward]) + backward)
    if parallel.recompute == "full":
        again = first - KernelCounts(works=Counter([_last_product(config, sizes)]))
        second = second + again
    elif parallel.recompute == "selective":
        second = second + KernelCounts(works=forward)
    return first, second


def _layer_products(config: Config, sizes: MicroBatchSizes) -> Iterator[KernelWork]:
    """The products of one layer's forward pass."""
    model, tp = config.model, config.parallel.tp_size
    queries = query_size(model) // tp
    keys = max(key_value_size(model) // tp, head_size(model))
    width = model.intermediate_size // tp
    num_inputs = family_of(model).mlp.num_matrices - 1
    yield product(sizes, model.hidden_size, queries + 2 * keys)
    yield product(sizes, queries, model.hidden_size)
    yield product(sizes, model.hidden_size, num_inputs * width)
    yield product(sizes, width, model.hidden_size)


def _last_product(config: Config, sizes: MicroBatchSizes) -> KernelWork:
    return product(sizes, config.model.intermediate_size // config.parallel.tp_size, config.model.hidden_size)


def product(sizes: MicroBatchSizes, width_in: int, width_out: int, *, num_tokens: int | None = None) -> KernelWork:
    """(tokens, in) x (in, out)."""
    tokens = num_tokens or sizes.num_tokens
    return KernelWork(
        name="mm",
        kind="product",
        num_bytes=sizes.itemsize * (tokens * (width_in + width_out) + width_in * width_out),
        flops=2 * tokens * width_in * width_out,
        narrowest=min(tokens, width_in, width_out),
        is_aligned=width_in % ALIGNMENT == 0 and width_out % ALIGNMENT == 0,
        itemsize=sizes.itemsize,
    )


def _attention(config: Config, sizes: MicroBatchSizes) -> tuple[KernelWork, KernelWork]:
    """Forward and backward; causal, so half of the scores, and the layers' mean where some have a window."""
    model, length = config.model, config.batch.sequence_length
    layers = range(model.num_hidden_layers)
    seen = sum(min(length, attention_window(model, layer) or length) for layer in layers) / len(layers)
    queries = query_size(model) // config.parallel.tp_size
    flops = int(4 * sizes.num_tokens * seen * queries / 2)
    num_bytes = 4 * sizes.num_tokens * queries * sizes.itemsize
    forward = KernelWork(name="attend", kind="attention", num_bytes=num_bytes, flops=flops, itemsize=sizes.itemsize)
    backward = KernelWork(
        name="attend",
        kind="attention_backward",
        num_bytes=2 * num_bytes,
        flops=flops * 5 // 2,
        itemsize=sizes.itemsize,
    )
    return forward, backward


def _elementwise(name: str, num_bytes: int, num_kernels: int) -> Counter[KernelWork]:
    work = KernelWork(name=name, kind="elementwise", num_bytes=num_bytes // num_kernels)
    return Counter({work: num_kernels})


def head_counts(config: Config, sizes: MicroBatchSizes) -> KernelCounts:
    """The final norm, the head and its gradients, which the forward pass computes."""
    model = config.model
    vocab = -(-model.vocab_size // config.parallel.tp_size)
    rows = min(sizes.num_tokens, max(1, HEAD_BLOCK_BYTES // (vocab * sizes.itemsize)))
    blocks = -(-sizes.num_tokens // rows)
    padded = -(-vocab // ALIGNMENT) * ALIGNMENT  # rows of logits begin at multiples of 64 numbers
    one = product(sizes, model.hidden_size, padded, num_tokens=rows)
    works = Counter({one: 3 * blocks})
    logits = CROSS_ENTROPY_BYTES * sizes.itemsize // 2 * sizes.num_tokens * vocab
    works += _elementwise("cross_entropy", logits + 8 * sizes.local_tokens * model.hidden_size, 4 * blocks)
    return KernelCounts(works=works)


def embedding_counts(config: Config, sizes: MicroBatchSizes) -> KernelCounts:
    """A look-up and its gradient."""
    num_bytes = 6 * sizes.num_tokens * config.model.hidden_size * sizes.itemsize
    return KernelCounts(works=_elementwise("embedding", num_bytes, 8))


def pass_seconds(
    config: Config, sizes: MicroBatchSizes, device: DeviceRow, num_layers: int, *, is_first: bool, is_last: bool
) -> PassSeconds:
    """The passes of a stage over one micro-batch."""
    forward, backward = layer_counts(config, sizes)
    first, second = forward.times(num_layers), backward.times(num_layers)
    if is_first:
        first = first + embedding_counts(config, sizes)
    if is_last:
        first = first + head_counts(config, sizes)
    products = KernelCounts(works=Counter(_layer_products(config, sizes)))
    products_s = estimate_phase(products, device).device_s
    return PassSeconds(
        forward=estimate_phase(first, device).total_s,
        backward=estimate_phase(second, device).total_s,
        layer_products=(products_s, products_s),
        num_kernels=first.num_kernels + second.num_kernels,
    )


def update_seconds(config: Config, state: StateBytes, device: DeviceRow) -> float:
    """The norm of the owned gradients and the update of all ranges that a rank holds."""
    formats, spec = StateFormats.of(config), POLICY_SPECS[config.precision.policy]
    held = (formats.num_states + formats.has_master) * formats.state
    kept = 2 * held + (formats.weight if formats.has_master else 2 * formats.weight)
    num_bytes = (kept + spec.grad.num_bytes) * state.updated_elements
    norms = spec.grad.num_bytes * state.updated_elements
    buckets = max(1, state.num_buckets)
    works = _elementwise(UPDATE_KERNEL, num_bytes, buckets) + _elementwise("norm", norms, buckets)
    return estimate_phase(KernelCounts(works=works, num_waits=1), device).total_s
