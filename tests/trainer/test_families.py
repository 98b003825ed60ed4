"""Each kind of block that a family brings: equal to one process on other layouts, in all modes of recomputation, and
resumed on another layout bit for bit.

Logits and gradients against transformers are in tests/models/test_hf.py, both directions of the conversion there and in
test_convert.py; tests/trainer/test_mistral.py has sliding windows.
"""

import pytest
import torch

from parallel3d.comparison.compare_runs import compare_runs
from parallel3d.config.derived import num_parameters, resolved_model
from parallel3d.models.make import shardings_of
from tests.support import cells, tiny_runs
from tests.support.cells import Cell
from tests.support.family_shapes import FAMILY_SHAPES
from tests.support.saved_layouts import run_layout as run_saved_layout
from tests.support.saved_layouts import save

LAYOUTS = {
    "tp2-pp2-dp2-sp": dict(tp_size=2, pp_size=2, dp_size=2, sequence_parallel=True),
    "tp4-copied-heads": dict(tp_size=4, zero_stage=0),
    "pp2-dp2-zb-h1": dict(pp_size=2, dp_size=2, schedule="zb-h1"),
    "tp2-interleaved": dict(tp_size=2, pp_size=2, schedule="interleaved", virtual_stages=2),
    "tp2-full": dict(tp_size=2, dp_size=2, recompute="full"),
    "tp2-selective-sp": dict(tp_size=2, pp_size=2, recompute="selective", sequence_parallel=True),
    "tp4-selective": dict(tp_size=4, recompute="selective"),
}


@pytest.mark.each_value(rest=10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILY_SHAPES)
def test_a_layout_equals_one_process(name, layout, reference):
    cell = Cell(name=f"{name}-{layout}", changes=dict(model=FAMILY_SHAPES[name], parallel=LAYOUTS[layout]))
    assert compare_runs(cells.run_cell(cell), reference(cell), cell.tolerance).findings == ()


@pytest.mark.each_value
@pytest.mark.parametrize("name", FAMILY_SHAPES)
def test_a_resume_on_another_layout_changes_no_bit(tmp_path, name):
    def config(**parallel):
        return tiny_runs.make_config(
            model=FAMILY_SHAPES[name], precision=dict(policy="fp32", sums="exact"), parallel=dict(tp_size=2, **parallel)
        )

    first, other = config(pp_size=2, dp_size=2), config(pp_size=4, dp_size=1)
    _, snapshots, runtimes = run_saved_layout(first, steps=1)
    folder = save(tmp_path, snapshots, runtimes[0])
    resumed, _, _ = run_saved_layout(other, start=folder, steps=2)
    right, _, _ = run_saved_layout(first, steps=3)
    assert resumed.keys() == right.keys()
    assert all(torch.equal(resumed[name], weight) for name, weight in right.items())


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_kernels_in_c_norm_queries_and_keys_like_torchs(name):
    """fp32, with one key head on each rank; the loss of the second step is one after an update."""
    torchs, in_c = (
        tiny_runs.train_in_threads(
            steps=2,
            model=FAMILY_SHAPES[name],
            parallel=dict(tp_size=2),
            precision=dict(policy="fp32"),
            run=dict(kernels=kernels),
        ).losses
        for kernels in ("torch", "c")
    )
    assert in_c == pytest.approx(torchs, rel=1e-6)


@pytest.mark.parametrize("name", ["qwen3", "olmo2"])
def test_weights_of_norms_decide_the_losses(name):
    """Of queries and keys: a norm that is not applied, or whose weight is not trained, would be seen here."""
    weights = tiny_runs.train_in_threads(model=FAMILY_SHAPES[name], parallel=dict(tp_size=4)).weights
    for part in "qk":
        weight = weights[f"layers.0.attention.{part}_norm.weight"]
        assert (weight != 1).all()


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_window_in_some_layers_ends_with_its_document(name, reference):
    changes = dict(
        model=FAMILY_SHAPES[name], parallel=dict(tp_size=2, pp_size=2, dp_size=2), data=dict(document_mask=True)
    )
    cell = Cell(name=f"{name}-documents", changes=changes)
    ours = cells.run_cell(cell)
    assert compare_runs(ours, reference(cell), cell.tolerance).findings == ()
    for other in (dict(sliding_window=None), dict(sliding_window_pattern=1), dict(sliding_window_pattern=99)):
        changed = Cell(name=f"{name}-{other}", changes=dict(changes, model=dict(FAMILY_SHAPES[name], **other)))
        assert ours.losses != pytest.approx(reference(changed).losses, rel=1e-7)


@pytest.mark.parametrize("name", FAMILY_SHAPES)
def test_the_numbers_of_parameters_are_those_of_the_modules(name):
    model = resolved_model(tiny_runs.make_config(model=dict(FAMILY_SHAPES[name], max_position_embeddings=16)).model)
    assert num_parameters(model) == sum(sharding.num_elements for sharding in shardings_of(model))
