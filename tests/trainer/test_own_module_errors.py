"""Mistakes in a user's own layers that show in a call of ours, in torch's backward pass, or nowhere: each is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel3d.errors import UserCodeError, UserError
from parallel3d.user_code import backward_errors_named
from tests.support.tiny_runs import train_in_threads

BLOCK = """
import torch
from parallel3d import Column, ModelParts, Whole
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, grad):
        return {gradient}
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)
        self.drop = torch.nn.Dropout(0.1)
        {hook}
    def {forward}:
        y = self.linear(x)
        {call}
        return Twice.apply(y)
def build(model):
    return ModelParts(block={block}, shardings={shardings})
"""


def train(tmp_path: Path, **parts: str) -> None:
    """One step with a file of the user's that has these parts."""
    usual = dict(
        gradient="2 * grad",
        hook="pass",
        forward="forward(self, x)",
        call="pass",
        block="lambda index: Block()",
        shardings="{}",
    )
    file = tmp_path / "mine.py"
    file.write_text(BLOCK.format(**(usual | parts)))
    with backward_errors_named("model.module mine.py:build"):  # as a worker does
        train_in_threads(model=dict(module=f"{file}:build"), steps=1)


def test_the_usual_file_trains(tmp_path: Path) -> None:
    train(tmp_path)


@pytest.mark.parametrize(
    "parts, words",
    [
        (dict(block="lambda: Block()"), r"build: block: .*mine\.py, line 22: .* with 1 argument, and <lambda>\(\)"),
        (dict(block="None"), "build: block: it is of type NoneType, which can't be called"),
        (dict(forward="forward(self)"), r"layers.0: .*mine\.py, line 17: .* and Block.forward\(\) takes others"),
        (dict(forward="forward(self, x, mask)"), r"Block.forward\(x, mask\) takes .*a required argument: 'mask'"),
        (dict(forward="forwards(self, x)"), r"layers.0 \(Block\) has no method forward"),
    ],
    ids=["no-index", "none", "no-input", "two-inputs", "no-forward"],
)
def test_what_cannot_be_called_as_it_is(tmp_path: Path, parts: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(tmp_path, **parts)


@pytest.mark.parametrize(
    "parts, words",
    [
        (dict(gradient="grad.no_such_method()"), r"mine\.py, line 10, in backward .*: AttributeError"),
        (dict(call="y.register_hook(lambda grad: grad.no_such)"), r"mine\.py, line 19, in <lambda> .*AttributeError"),
        (dict(call="y.register_hook(lambda: 1)"), r"in the backward pass: TypeError: Block.forward.*takes 0"),
        (dict(gradient="(grad, grad)"), "in the backward pass: RuntimeError: .*incorrect number of gradients"),
        (dict(gradient="grad[..., 1:]"), "in the backward pass: RuntimeError: .*invalid gradient"),
        (dict(gradient="'none'"), r"in the backward pass: RuntimeError: expected Variable or None \(got str"),
        (dict(call="y = y.exp(); y += 1"), "in the backward pass: RuntimeError: .*modified by an inplace"),
        (dict(gradient="None"), r"model.module: layers.\d.linear.* has got no gradient: .*returns None"),
    ],
    ids=["function", "hook", "hook-call", "count", "shape", "kind", "in-place", "none"],
)
def test_an_error_in_the_backward_pass_is_the_users(tmp_path: Path, parts: dict[str, str], words: str) -> None:
    with pytest.raises(UserCodeError, match=words):
        train(tmp_path, **parts)


def test_other_errors_of_a_run_with_own_layers_stay_what_they_are(tmp_path: Path) -> None:
    """A lost connection is not the user's mistake, even if a package has raised the error."""
    scope = {"__name__": "package"}
    exec(compile("def fail(*_):\n    raise ConnectionError('lost')\n", str(tmp_path / "package.py"), "exec"), scope)
    with pytest.raises(ConnectionError), backward_errors_named("model.module mine.py:build"):
        scope["fail"]()


@pytest.mark.parametrize(
    "hook, shardings, words",
    [
        ("self.linear.weight.register_hook(print)", "{}", "layers.0.linear.weight has a hook, which would be lost"),
        ("self.linear.bias.register_post_accumulate_grad_hook(print)", "{}", "layers.0.linear.bias has a hook"),
        ("self.linear.register_forward_hook(print)", "dict(linear=Column())", r"layers.0.linear \(Linear\) has a hook"),
        ("self.drop.register_forward_hook(print)", "{}", r"layers.0.drop \(Dropout\) has a hook, which would be lost"),
        ("self.linear.register_full_backward_hook(lambda *_: None)", "{}", None),
    ],
    ids=["weight", "after", "linear", "dropout", "kept"],
)
def test_a_hook_that_would_be_lost_is_refused(tmp_path: Path, hook: str, shardings: str, words: str | None) -> None:
    if words is None:
        train(tmp_path, hook=hook, shardings=shardings)
        return
    with pytest.raises(UserError, match=words):
        train(tmp_path, hook=hook, shardings=shardings)
