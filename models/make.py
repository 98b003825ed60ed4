"""From a configuration to the modules of one stage."""

from __future__ import annotations

import torch

from models.decoder import DecoderStage
from models.gpt2 import Gpt2
from models.llama import Llama
from parallel3d.backends import choose_backend
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.layers import apex_norm
from parallel3d.layers.parameter import parameters_of
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.group import SoloGroup
from parallel3d.parallel.sharding import ParamSharding
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.precision.policy import POLICIES, policy_of
from parallel3d.recompute import Recompute

FAMILIES = {"llama": Llama, "gpt2": Gpt2}


def make_stage(config: Config, layers: range, tp: TensorParallel, device: torch.device) -> DecoderStage:
    """The model's constructor as the trainer asks for it."""
    module, name = apex_norm.SYMBOL
    asked = config.model.norm_backend
    context = LayerContext(
        tp=tp,
        policy=policy_of(config.precision),
        device=device,
        compiles=config.run.compile == "elementwise",
        norm_backend=choose_backend("model.norm_backend", asked, module=module, name=name, device_type=device.type),
    )
    num_positions, recompute = config.batch.sequence_length, config.parallel.recompute
    return make_decoder(config.model, layers, num_positions=num_positions, context=context, recompute=recompute)


def make_decoder(
    config: ModelConfig, layers: range, *, num_positions: int, context: LayerContext, recompute: Recompute = "none"
) -> DecoderStage:
    """Layers `layers` of the model, for sequences of up to `num_positions` tokens."""
    family = FAMILIES[config.architecture](config, num_positions=num_positions, context=context)
    return DecoderStage(family, layers, recompute=recompute)


def shardings_of(config: ModelConfig) -> tuple[ParamSharding, ...]:
    """All parameters of the whole model, a tied one once, in its order; nothing is allocated.

    gpt2 needs max_position_embeddings resolved.
    """
    context = LayerContext(tp=TensorParallel(group=SoloGroup()), policy=POLICIES["fp32"], device="meta")
    model = make_decoder(config, range(config.num_hidden_layers), num_positions=1, context=context)
    return tuple(parameter.sharding for parameter in parameters_of(model))
