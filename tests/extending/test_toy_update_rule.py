"""The worked example of docs/extending.md: an update rule in one file, with states and settings of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallel3d.kernels.launch_kernel import launch_triton
from parallel3d.kernels.range_kernels import triton_range_kernels
from parallel3d.kernels.update_table import Piece, UpdateTable
from parallel3d.optim.update_rules.update_rule import UpdateStep
from parallel3d.optim.updater import Updater
from parallel3d.random_keys import bits, key_of
from tests.extending.ademamix import RULE
from tests.extending.copies import DOCS, make_copy, run_module
from tests.support import tiny_runs

FILE = Path(__file__).with_name("ademamix.py")
TRITON_FILE = FILE.with_name("triton_ademamix.py")


def test_the_docs_show_these_files() -> None:
    for file in (FILE, TRITON_FILE):
        assert f"```python\n{file.read_text()}```\n" in DOCS.read_text()


def test_it_is_the_papers_algorithm() -> None:
    numbers = torch.Generator().manual_seed(1)
    weight, first, slow, grad = (torch.randn(50, dtype=torch.float64, generator=numbers) for _ in range(4))
    second = torch.rand(50, dtype=torch.float64, generator=numbers)
    weights, states = weight.clone(), torch.stack([first, second, slow])
    step = UpdateStep(number=3, learning_rate=0.01, peak_learning_rate=0.01, grad_scale=0.5)
    Updater(rule=RULE(alpha=2.0)).update(weights, states, grad, step, weight_decay=0.3)
    g = 0.5 * grad
    m1, v, m2 = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2, 0.9999 * slow + 0.0001 * g
    change = (m1 / (1 - 0.9**3) + 2.0 * m2) / ((v / (1 - 0.999**3)).sqrt() + 1e-8)
    assert torch.allclose(weights, weight - 0.01 * (change + 0.3 * weight), rtol=1e-12, atol=0)
    assert torch.allclose(states, torch.stack([m1, v, m2]), rtol=1e-12, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU")
def test_its_formula_in_triton_has_the_same_bits() -> None:
    pytest.importorskip("triton")
    from tests.extending.triton_ademamix import update_values

    numbers = torch.Generator().manual_seed(1)
    weights, grads = (torch.randn(3000, generator=numbers).bfloat16() for _ in range(2))
    states = torch.rand(3, 3000, generator=numbers).bfloat16()
    step, key = UpdateStep(number=3, learning_rate=0.01, peak_learning_rate=0.01, grad_scale=0.5), key_of("w")
    piece = Piece(start=0, stop=3000, origin=0, width=3000, stride=3000, shift=0, name="w")
    tensors = weights.clone(), states.clone(), grads
    kernels, table = triton_range_kernels(launch_triton), UpdateTable.build([piece], [key], 4096)
    scalars = RULE().scalars(step, weight_decay=0.3)
    assert kernels.update_range is not None
    kernels.update_range(update_values, scalars, tensors, table, grad_scale=0.5, rounding="stochastic")
    Updater(rule=RULE()).update(
        weights,
        states,
        grads,
        step,
        weight_decay=0.3,
        noise=lambda span: bits(key, torch.arange(span.start, span.stop)),
    )
    assert torch.equal(tensors[0], weights) and torch.equal(tensors[1], states)


@pytest.mark.slow
@pytest.mark.full
def test_in_its_folder_it_is_found_and_trains_like_one_process(tmp_path: Path) -> None:
    folder = "parallel3d/optim/update_rules"
    copy = make_copy(tmp_path / "copy", {f"{folder}/{file.name}": file.read_text() for file in (FILE, TRITON_FILE)})
    report = run_module(copy, "tests.extending.train_ademamix")
    assert report.splitlines() == [f"check_{name} passed" for name in ("settings", "layouts", "death", "resume")]


def test_before_it_is_added_it_is_unknown() -> None:
    with pytest.raises(ValueError, match="should be 'adamw', 'lion' or 'muon'"):
        tiny_runs.make_config(optimizer=dict(kind="ademamix"))
