"""Peers on one GPU: the models of torchtitan and of transformers with liger-kernel, each in its usual loop.

Their packages are imported where they are called; what lacks one says so in the visit's file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.device.nanogpt_shaped import nanogpt_shaped
from parallel3d.config.schema import Config

Contestant = Callable[[Config, torch.device, bool], tuple[int, Callable[[], object]]]
"""(configuration, device, whether sizes are tiny) -> micro-batch size and a training step."""

_aten = torch.ops.aten
_LARGE = 4e9
"""Parameters from which on peers recompute and take half of the micro-batch."""


def torchtitan(config: Config, device: torch.device, is_smoke: bool) -> tuple[int, Callable[[], object]]:
    """torchtitan's Llama (0.2), its blocks compiled; fp32 weights and bf16 autocast, as its trainer does on one GPU.

    Large models keep every second product and attention, its "selective op" recomputation.
    """
    names = import_module("torchtitan.models.llama3.model.args"), import_module("torchtitan.models.llama3.model.model")
    sizes, length = config.model, config.batch.sequence_length
    arguments = names[0].TransformerModelArgs(
        dim=sizes.hidden_size,
        n_layers=sizes.num_hidden_layers,
        n_heads=sizes.num_attention_heads,
        vocab_size=sizes.vocab_size,
        multiple_of=256,
        max_seq_len=length,
    )
    with torch.device("meta"):
        model = names[1].Transformer(arguments)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    large = sum(parameter.numel() for parameter in model.parameters()) > _LARGE
    for name, block in list(model.layers.items()):
        kept = Recomputed(block) if large else block
        model.layers[name] = kept if is_smoke else torch.compile(kept, fullgraph=True)
    size = micro_batch_size(config, large)
    return size, loop(model, lambda ids: model(ids), config, device, size)


def liger(config: Config, device: torch.device, is_smoke: bool) -> tuple[int, Callable[[], object]]:
    """transformers' Llama in bf16 with liger-kernel's norms, rotary, SwiGLU and fused linear cross-entropy."""
    kernels, hf = import_module("liger_kernel.transformers"), import_module("transformers")
    kernels.apply_liger_kernel_to_llama()
    sizes = config.model
    settings = hf.LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        max_position_embeddings=config.batch.sequence_length,
        attn_implementation="sdpa",
    )
    with device:
        model = hf.LlamaForCausalLM(settings).bfloat16()
    size = micro_batch_size(config, large=False)
    ids = torch.randint(sizes.vocab_size, (size, config.batch.sequence_length), device=device)
    optimizer = adamw(model)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return size, step


class Recomputed(nn.Module):
    """A block that keeps attention and every second product for its backward pass."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        options: dict[str, Any] = dict(use_reentrant=False, context_fn=_contexts, preserve_rng_state=False)
        return checkpoint(self.block, *args, **options, **kwargs)


def _contexts() -> Any:
    numbers = {True: 0, False: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is _aten.mm.default:
            numbers[context.is_recompute] += 1
            keeps = numbers[context.is_recompute] % 2 == 1
        else:
            keeps = "scaled_dot_product" in str(operator)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def micro_batch_size(config: Config, large: bool) -> int:
    size = config.batch.micro_batch_size
    assert size is not None
    return max(1, size // 2) if large else size


def loop(
    model: nn.Module, logits_of: Callable[[Any], Any], config: Config, device: torch.device, size: int
) -> Callable[[], None]:
    """A training step: autocast, the mean loss in fp32, clipping, fused AdamW."""
    vocab, length = config.model.vocab_size, config.batch.sequence_length
    ids = torch.randint(vocab, (size, length + 1), device=device)
    optimizer = adamw(model)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            logits = logits_of(ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


PEERS: Mapping[str, tuple[Contestant, ...]] = MappingProxyType(
    {"gpt2_124m": (nanogpt_shaped,), "llama_1.26b": (torchtitan, liger), "hlat_7b": (torchtitan,)}
)
"""Contestants by workload."""
