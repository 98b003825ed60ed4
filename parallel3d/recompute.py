"""Recomputes layers in the backward pass instead of keeping their activations (Chen et al. 2016, "Training deep nets
with sublinear memory cost"; Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models").

Kept of a layer between its forward and its backward pass, for hidden size h and a gated MLP of width f::

    none        everything that a backward pass reads           8 h + 2 f   numbers a token
    selective   the layer's input, the results of its products
                and of attention                                6 h + 2 f
    full        the layer's input                               h

torch's selective checkpoint policy keeps SDPA's results, since its backward pass belongs to torch. Those of attention
in blocks (layers/block_attention.py) and of the products are kept by `parallel/recompute_context.py`, products after
their collectives: a policy sees the single operators of a product, but not the sum over the ranks that follows, and
would keep the summands, which are larger under sequence parallelism and are overwritten by the sum. A policy also costs
time for every operator that it is asked about, so it applies to attention only.

In all modes the layer's last product and its sum are not repeated: no backward pass reads their result, unless the
family norms it (`reads_last`). Dropout needs
no random state: its masks are functions of the element's coordinates (layers/dropout.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from parallel3d.parallel.recompute_context import ContextPair, RecomputeContext, SavedProducts

Recompute = Literal["none", "selective", "full"]

_aten = torch.ops.aten
ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Fused attention on all devices. Without a fused kernel the scores (tokens x tokens) exist and are recomputed;
varlen_attn, which is not an aten operator, is recomputed too."""


def run_layer(
    layer: nn.Module,
    *args: Any,
    recompute: Recompute,
    recompute_context: RecomputeContext,
    reads_last: bool = False,
) -> Tensor:
    """Returns `layer(*args)` and keeps for its backward pass what `recompute` asks for. `reads_last`: what follows the
    layer's last product needs its value, as a norm does.

    The second run is part of the layer's backward pass, on the same thread. It repeats the forward collectives before
    the last product (selective: none) in their order, which is the same on all ranks of a replica.
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return layer(*args)
    return checkpoint(
        layer,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=partial(_contexts, recompute, recompute_context, reads_last),
    )


def _contexts(recompute: Recompute, recompute_context: RecomputeContext, reads_last: bool) -> ContextPair:
    """The contexts of one layer's two runs for one micro-batch."""
    keeps = recompute == "selective"
    saved = SavedProducts(
        keeps=keeps,
        reads_last=reads_last,
        attention=create_selective_checkpoint_contexts(_keep_attention) if keeps else None,
    )
    return recompute_context.first_pass(saved), recompute_context.recompute_pass(saved)


def _keep_attention(_context: object, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE
