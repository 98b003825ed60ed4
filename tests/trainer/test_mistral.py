"""Mistral with a sliding window: equal to one process on other layouts, through a death, and resumed on another layout.

Logits and gradients against transformers are in tests/models/test_hf.py, both directions of the conversion there and in
test_convert.py.
"""

import pytest
import torch

from parallel3d.comparison.compare_runs import compare_runs
from tests.support import cells, tiny_runs
from tests.support.cells import Cell
from tests.support.saved_layouts import run_layout as run_saved_layout
from tests.support.saved_layouts import save

MODEL = dict(architecture="mistral", num_key_value_heads=2, sliding_window=5)
LAYOUTS = {
    "tp2-pp2-dp2-sp": dict(tp_size=2, pp_size=2, dp_size=2, sequence_parallel=True),
    "tp4-copied-heads": dict(tp_size=4, pp_size=2, sequence_parallel=True, zero_stage=0),
    "pp4-gpipe": dict(pp_size=4, schedule="gpipe"),
    "pp2-dp2-interleaved": dict(pp_size=2, dp_size=2, schedule="interleaved", virtual_stages=2),
    "pp2-dp2-zb-h1": dict(pp_size=2, dp_size=2, schedule="zb-h1"),
    "stages-1-2": dict(pp_size=2, stage_replicas=[1, 2]),
    "stages-1-3-2-1": dict(pp_size=4, stage_replicas=[1, 3, 2, 1]),
    "dp4": dict(dp_size=4),
    "tp2-full": dict(tp_size=2, dp_size=2, recompute="full"),
    "tp2-selective": dict(tp_size=2, pp_size=2, recompute="selective"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(layout, reference):
    cell = Cell(name=layout, changes=dict(model=MODEL, parallel=LAYOUTS[layout]))
    assert compare_runs(cells.run_cell(cell), reference(cell), cell.tolerance).findings == ()


def test_a_window_ends_with_its_document_on_every_stage(reference):
    changes = dict(model=MODEL, parallel=dict(tp_size=2, pp_size=2, dp_size=2), data=dict(document_mask=True))
    cell = Cell(name="documents", changes=changes)
    ours, right = cells.run_cell(cell), reference(cell)
    assert compare_runs(ours, right, cell.tolerance).findings == ()
    open_window = Cell(name="open", changes=dict(changes, model=dict(MODEL, sliding_window=None)))
    assert ours.losses != pytest.approx(reference(open_window).losses, rel=1e-6)  # the window hides something


def test_without_a_window_it_is_llama():
    mistral = tiny_runs.train_in_threads(model=dict(MODEL, sliding_window=None))
    llama = tiny_runs.train_in_threads(model=dict(num_key_value_heads=2))
    assert mistral.losses == llama.losses
    assert all(torch.equal(mistral.weights[name], weight) for name, weight in llama.weights.items())


def test_a_resume_on_another_layout_changes_no_bit(tmp_path):
    def config(**parallel):
        return tiny_runs.make_config(model=MODEL, precision=dict(policy="fp32", sums="exact"), parallel=parallel)

    first, other = config(pp_size=2, dp_size=2), config(pp_size=4, dp_size=1)
    _, snapshots, runtimes = run_saved_layout(first, steps=1)
    folder = save(tmp_path, snapshots, runtimes[0])
    resumed, _, _ = run_saved_layout(other, start=folder, steps=2)
    right, _, _ = run_saved_layout(first, steps=3)
    assert resumed.keys() == right.keys()
    assert all(torch.equal(resumed[name], weight) for name, weight in right.items())
