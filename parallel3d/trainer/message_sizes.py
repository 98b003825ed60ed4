"""Estimates the bytes that a micro-batch takes in messages and in memory, for the plan checker. Pure."""

from __future__ import annotations

from parallel3d.config.derived import family_of, head_size, key_value_size, num_mlp_matrices, query_size
from parallel3d.config.schema import Config
from parallel3d.config.specs.policies import POLICY_SPECS
from parallel3d.pipeline.check import MessageSizes


def estimate_message_sizes(config: Config, partition: tuple[range, ...]) -> MessageSizes:
    """Returns the bytes of one micro-batch on one rank, with `partition[s]` the layers of stage s.

    Counts the inputs and results of a layer's weight products per token. Outside of the tensor-parallel region they
    have the hidden size (results of norms; sharded under sequence parallelism); inside they are sharded: q, k, v (with
    at least one key-value head per rank), the attention's result, the MLP's intermediate results. recompute.py defines
    which of them are kept. A split backward pass keeps all of them between its halves.
    """
    model, parallel, batch, family = config.model, config.parallel, config.batch, family_of(config.model)
    assert batch.micro_batch_size is not None
    num_tokens = batch.micro_batch_size * batch.sequence_length
    width = POLICY_SPECS[config.precision.policy].compute.num_bytes
    hidden = model.hidden_size // (parallel.tp_size if parallel.sequence_parallel else 1)
    queries = query_size(model) // parallel.tp_size
    keys = max(key_value_size(model) // parallel.tp_size, head_size(model))
    qkv = queries + 2 * keys
    attention = qkv + queries
    mlp = num_mlp_matrices(model) * model.intermediate_size // parallel.tp_size
    mlp_input = model.intermediate_size // parallel.tp_size
    everything = (2 + family.num_layer_norms) * hidden + attention + mlp + (qkv if family.qk_norm else 0)
    # a CPU keeps the gathered inputs of column-parallel products, see layers/linear.py
    on_device = config.run.device.startswith("cuda")
    gathered = 0 if on_device else 2 * (model.hidden_size - hidden)
    # see kernels/torch_activations.py; kernels for devices compute GELU again, too
    recomputed = mlp_input if family.mlp.num_matrices > 2 or on_device else 0
    repeated = 2 * (queries - keys) if on_device and width > 2 else 0  # grouped heads, see layers/attention.py
    kept = {
        "none": everything - recomputed + gathered + repeated,
        "selective": (2 + family.norms_outputs) * hidden + attention + mlp - mlp_input,
        "full": hidden,
    }
    token_bytes = num_tokens * width
    return MessageSizes(
        activation_bytes=token_bytes * hidden,
        targets_bytes=num_tokens * 8,
        stash_bytes=tuple(token_bytes * kept[parallel.recompute] * len(layers) for layers in partition),
        deferred_bytes=tuple(token_bytes * everything * len(layers) for layers in partition),
    )
