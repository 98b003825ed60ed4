"""NVIDIA apex's kernels as far as that goes without them: stand-ins, called as apex is, that do what it documents."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

import pytest
import torch

from parallel3d import backends
from parallel3d.backends import choose_backend, find_symbol
from parallel3d.errors import ConfigError
from parallel3d.layers.gradient_sink import GradientSink
from parallel3d.layers.norm import LayerNorm, RMSNorm
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import LayerContext
from parallel3d.optim.update_rules import default_settings
from parallel3d.optim.update_rules.adamw import AdamW
from parallel3d.optim.update_rules.update_rule import UpdateStep
from parallel3d.optim.updater import build_updater
from parallel3d.parallel.tensor_parallel import solo_region
from parallel3d.precision.policy import POLICIES
from tests.support.tiny_runs import make_config


class FusedAdam(torch.optim.Optimizer):
    """AdamW as apex's class documents it, one group; the step count is the group's."""

    num_steps = 0

    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0
    ):
        assert bias_correction and adam_w_mode
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        FusedAdam.num_steps += 1
        (group,) = self.param_groups
        group["step"] += 1
        beta1, beta2 = group["betas"]
        for weight in group["params"]:
            first, second = self.state[weight]["exp_avg"], self.state[weight]["exp_avg_sq"]
            first.copy_(beta1 * first + (1 - beta1) * weight.grad)
            second.copy_(beta2 * second + (1 - beta2) * weight.grad * weight.grad)
            denominator = (second / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
            update = first / (1 - beta1 ** group["step"]) / denominator + group["weight_decay"] * weight
            weight.sub_(group["lr"] * update)


def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6):
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight).to(input.dtype)


def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6):
    return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)


@pytest.fixture
def apex(monkeypatch):
    """A stand-in for apex that runs on CPUs."""
    modules = {name: ModuleType(name) for name in ("apex", "apex.optimizers", "apex.normalization")}
    functions = ModuleType("apex.normalization.fused_layer_norm")
    functions.fused_rms_norm_affine = fused_rms_norm_affine
    functions.fused_layer_norm_affine = fused_layer_norm_affine
    modules["apex.optimizers"].FusedAdam = FusedAdam
    for name, module in {**modules, functions.__name__: functions}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(backends, "APEX_DEVICES", ("cuda", "cpu"))
    FusedAdam.num_steps = 0


def choose(asked: str, device_type: str) -> str:
    return choose_backend(
        "optimizer.backend", asked, module="apex.optimizers", name="FusedAdam", device_type=device_type
    )


def test_without_apex():
    assert choose("torch", "cuda") == choose("auto", "cuda") == choose("auto", "cpu") == "torch"
    with pytest.raises(ConfigError, match="apex.optimizers.FusedAdam is not installed"):
        choose("apex", "cuda")


def test_another_project_of_that_name_is_not_apex(monkeypatch):
    for name in ("apex", "apex.optimizers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert find_symbol("apex.optimizers", "FusedAdam") is None and choose("auto", "cuda") == "torch"


def test_apex_is_for_cuda(apex, monkeypatch):
    monkeypatch.setattr(backends, "APEX_DEVICES", ("cuda",))
    assert choose("auto", "cuda") == choose("apex", "cuda") == "apex" and choose("auto", "cpu") == "torch"
    with pytest.raises(ConfigError, match="the run is on cpu, and apex's kernels are for CUDA"):
        choose("apex", "cpu")


@pytest.mark.parametrize("section", ["optimizer", "model"])
def test_a_run_that_asks_for_what_is_not_there_says_so_once(run_layout, section):
    name = {"optimizer": "backend", "model": "norm_backend"}[section]
    with pytest.raises(ConfigError, match=f"{section}.{name} = 'apex': the run is on cpu"):
        run_layout(**{section: {name: "apex"}}, precision=dict(policy="fp32"))


def test_a_policy_without_fp32_weights_excludes_apex():
    with pytest.raises(ConfigError, match="optimizer.backend = 'apex'.*precision.policy bf16_sr doesn't have"):
        make_config(optimizer=dict(backend="apex"), precision=dict(policy="bf16_sr"))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_the_update_is_torchs(apex, dtype, tolerance):
    """fp32: w - lr (u + decay w) in place of w (1 - lr decay) - lr u rounds in other places."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(1000, dtype=dtype, generator=generator)
    runs = [(start.clone(), torch.zeros(2, 1000, dtype=dtype)) for _ in range(2)]
    updaters = [build_updater(AdamW, default_settings("adamw"), backend=backend) for backend in ("apex", "torch")]
    for number in range(1, 6):
        grads = torch.randn(1000, dtype=dtype, generator=generator)
        step = UpdateStep(number=number, learning_rate=1e-2, peak_learning_rate=1e-2, grad_scale=0.5)
        for (weights, states), updater in zip(runs, updaters):
            updater.update(weights, states, grads, step, weight_decay=0.1)
    for ours, theirs in zip(*runs):
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * 0.1)
    assert not torch.equal(runs[0][0], start) and runs[0][0].grad is None


@pytest.mark.parametrize(("policy", "tolerance"), [("fp64", 1e-13), ("fp32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_norms_are_ours(apex, norm, policy, tolerance):
    """Output, gradient of the input, main gradients of two micro-batches."""
    results = []
    for backend in ("torch", "apex"):
        generator = torch.Generator().manual_seed(5)
        context = LayerContext(tp=solo_region(), policy=POLICIES[policy], norm_backend=backend)
        layer = norm("norm", 24, eps=1e-5, context=context)
        added: list[ShardedParameter] = []
        for parameter in layer.parameters():
            parameter.data = (1 + torch.rand(24, dtype=torch.float64, generator=generator)).to(parameter.dtype)
            parameter.attach(GradientSink.with_own_buffer(parameter, on_added=partial(added.append, parameter)))
        for _ in range(2):
            x, grad = torch.randn(2, 6, 24, dtype=torch.float64, generator=generator).to(context.policy.compute)
            x.requires_grad_()
            _, y = layer(x)
            y.backward(grad)
        assert all(sum(each is parameter for each in added) == 2 for parameter in layer.parameters())
        results.append([y.detach(), x.grad, *(parameter.main_grad for parameter in layer.parameters())])
    for ours, theirs in zip(*results):
        assert ours.dtype == theirs.dtype
        distance = (ours - theirs).double().norm() / theirs.double().norm()
        assert distance < tolerance


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_run_on_eight_ranks_is_torchs(apex, run_layout, architecture):
    """Everything wired: 3 steps in fp32, sequence parallelism, recomputed layers."""
    layout = dict(tp_size=2, pp_size=2, dp_size=2, sequence_parallel=True, recompute="full")
    torchs, apexs = (
        run_layout(
            model=dict(norm_backend=backend, architecture=architecture),
            optimizer=dict(backend=backend),
            parallel=layout,
            precision=dict(policy="fp32"),
        )
        for backend in ("torch", "auto")
    )
    assert apexs.losses == pytest.approx(torchs.losses, rel=1e-5) and FusedAdam.num_steps > 0
