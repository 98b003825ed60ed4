"""Builds the modules of one stage from a configuration."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.backends import choose_backend
from parallel3d.config.derived import resolved_model
from parallel3d.config.schema import Config, ModelConfig, PrecisionConfig
from parallel3d.kernels.choice import choose_kernels
from parallel3d.kernels.layer_kernels import layer_kernels
from parallel3d.layers import apex_norm
from parallel3d.layers.gemm import Gemm
from parallel3d.layers.parameter import parameters_of
from parallel3d.layers.placement import LayerContext
from parallel3d.models.blocks import BlockBuilder
from parallel3d.models.decoder import DecoderStage
from parallel3d.models.user_stage import UserStage
from parallel3d.parallel.group import SoloGroup
from parallel3d.parallel.sharding import ParamSharding
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.precision.policy import policy_of
from parallel3d.recompute import Recompute


def make_stage(
    config: Config, layers: range, tp: TensorParallel, device: torch.device, *, gemm: Gemm | None = None
) -> DecoderStage | UserStage:
    """Builds layers `layers` of the configuration's model, for the trainer; `gemm` computes their products."""
    module, name = apex_norm.SYMBOL
    asked, gemm = config.model.norm_backend, gemm or Gemm()
    form = choose_kernels(config.run.kernels, device, agreed=gemm.kernels)
    context = LayerContext(
        tp=tp,
        policy=policy_of(config.precision),
        device=device,
        kernels=layer_kernels(form, compiles=config.run.compile == "elementwise"),
        norm_backend=choose_backend("model.norm_backend", asked, module=module, name=name, device_type=device.type),
        gemm=gemm,
    )
    num_positions, recompute = config.batch.sequence_length, config.parallel.recompute
    model, seed = config.model, config.run.seed
    stage = make_decoder(model, layers, num_positions=num_positions, context=context, recompute=recompute, seed=seed)
    if config.data.document_mask and isinstance(stage, UserStage):
        stage.check_documents()
    return stage


def make_decoder(
    config: ModelConfig,
    layers: range,
    *,
    num_positions: int,
    context: LayerContext,
    recompute: Recompute = "none",
    seed: int = 0,
) -> DecoderStage | UserStage:
    """Builds layers `layers` of the model, for sequences of up to `num_positions` tokens; a user's own under `seed`."""
    build = BlockBuilder(resolved_model(config), num_positions=num_positions, context=context)
    if config.module is not None:
        return UserStage(build, layers, recompute=recompute, seed=seed)
    return DecoderStage(build, layers, recompute=recompute)


def shardings_of(config: ModelConfig) -> tuple[ParamSharding, ...]:
    """All parameters of the whole model in definition order, a tied one once; nothing is allocated.

    A user's own block whose code computes with values is built with them, one at a time. Learned positions need
    max_position_embeddings resolved.
    """
    context = LayerContext(tp=TensorParallel(group=SoloGroup()), policy=policy_of(PrecisionConfig()), device="meta")
    model = make_decoder(config, range(config.num_hidden_layers), num_positions=1, context=context)
    return tuple(parameter.sharding for parameter in parameters_of(model))


def saved_buffers(config: ModelConfig, layer: int, *, seed: int, device: str) -> dict[str, Tensor]:
    """The buffers of a user's own block `layer` that its state_dict holds, by global name, as the constructor makes
    them under run.seed; with the first block those of the embedding, with the last one those of the head.

    On the device "meta" they have no values, and none is computed.
    """
    context = LayerContext(tp=TensorParallel(group=SoloGroup()), policy=policy_of(PrecisionConfig()), device=device)
    stage = make_decoder(config, range(layer, layer + 1), num_positions=1, context=context, seed=seed)
    assert isinstance(stage, UserStage), "our own layers have none"
    return stage.saved_buffers()
