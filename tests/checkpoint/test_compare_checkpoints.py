"""How far two checkpoints are apart: the right tensor, the right number, noise left out, and nothing hidden by NaNs."""

import math

import pytest
import torch

from parallel3d.checkpoint import compare_checkpoints as module
from parallel3d.checkpoint.compare_checkpoints import compare_checkpoints
from tests.support.small_checkpoints import save


def apart(tmp_path, change, noise=0.0, before=lambda snapshot: None):
    """Returns the differences of a checkpoint with `change` from one without it, by (kind, tensor)."""
    ours = save(tmp_path / "ours", 1, change=lambda snapshot: (before(snapshot), change(snapshot)))
    theirs = save(tmp_path / "theirs", 1, change=before)
    return {(d.kind, d.tensor): d.relative for d in compare_checkpoints(ours, theirs, noise=noise) if d.relative}


def state(snapshot, kind):
    """The elements of a rank's range: 15 of a, on the second rank of b from 15 to 21."""
    return list(snapshot.ranges[0].states.values())[kind]


def is_second(snapshot):
    return "b.bias" in snapshot.shapes


def test_equal_ones_are_not_apart(tmp_path):
    assert apart(tmp_path, lambda snapshot: None) == {}


@pytest.mark.parametrize("block_elements", [1, 7, 10**6])
@pytest.mark.parametrize("kind, name", list(enumerate(("weight", "moment1", "moment2"))))
def test_one_element_is_found_with_its_distance(tmp_path, monkeypatch, kind, name, block_elements):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", block_elements)

    def change(snapshot):
        if is_second(snapshot):
            state(snapshot, kind)[3] += 0.5

    first, second = (torch.arange(15.0) + 1000 + 100 * kind + 50 * rank for rank in (0, 1))
    size = torch.cat([first, second]).double().norm().item()
    assert apart(tmp_path, change) == {(name, "a.weight"): pytest.approx(0.5 / size)}


def test_elements_without_a_gradient_but_noise_are_left_out(tmp_path):
    """Elements of b with the second moment of rounding noise are left out, but only on request."""

    def before(snapshot):
        state(snapshot, 2).fill_(1.0)
        if is_second(snapshot):
            state(snapshot, 2)[15:18] = 1e-8

    def change(snapshot):
        if is_second(snapshot):
            state(snapshot, 0)[15] += 1.0  # noise
            state(snapshot, 0)[19] += 1.0

    both, one = apart(tmp_path / "a", change, 0.0, before), apart(tmp_path / "b", change, 1e-3, before)
    assert both["weight", "b.bias"] == pytest.approx(math.sqrt(2) * one["weight", "b.bias"])


@pytest.mark.parametrize("noise", [0.0, 1e-3])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_what_is_not_finite_is_never_near(tmp_path, noise, kind):
    def change(snapshot):
        state(snapshot, kind)[2] = math.nan

    found = apart(tmp_path / "ours", change, noise)
    assert found[("weight", "moment1", "moment2")[kind], "a.weight"] == math.inf
    in_both = apart(tmp_path / "both", lambda snapshot: None, noise, before=change)
    assert in_both[("weight", "moment1", "moment2")[kind], "a.weight"] == math.inf


def test_a_keys_bias_is_judged_beside_the_querys():
    names = [f"layers.3.attention.{part}.bias" for part in "qkv"]
    assert {module._parameter_of(name) for name in names} == {".layers.3.attention.qkv.bias"}
    assert module._parameter_of("layers.3.mlp.gate.weight") == ".layers.3.mlp.gate.weight"
