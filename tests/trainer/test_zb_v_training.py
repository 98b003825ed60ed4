"""Training with ZB-V: one process bit for bit, with an embedding tied on one stage, through a kill, from any layout."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from parallel3d.comparison.run_result import RunResult
from parallel3d.trainer.plans import build_grid
from tests.support import cells, tiny_runs
from tests.support.saved_layouts import assert_equal, read_all, run_layout, save
from tests.support.thread_cells import assert_same_run, kill_fault, run

ZB_V = dict(schedule="zb-v", virtual_stages=2)
LAYOUTS = {
    "pp2": dict(pp_size=2, **ZB_V),
    "pp3-dp2": dict(pp_size=3, dp_size=2, **ZB_V),
    "pp2-dp2-zero0": dict(pp_size=2, dp_size=2, zero_stage=0, **ZB_V),
    "stages-1-3": dict(pp_size=2, stage_replicas=[1, 3], **ZB_V),
    "stages-3-1-2": dict(pp_size=3, stage_replicas=[3, 1, 2], **ZB_V),
}
MODELS = {
    "llama": dict(hidden_dropout=0.1),
    "tied": dict(tie_word_embeddings=True),
    "gpt2-tied": dict(architecture="gpt2", tie_word_embeddings=True),
}


def config_of(parallel: dict[str, object], model: dict[str, object], **changes):
    sections = dict(
        model=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=6, num_attention_heads=2) | model,
        parallel=dict(bucket_mib=0.003) | parallel,
        batch=dict(global_batch_size=6, micro_batch_size=1, sequence_length=8),
        precision=dict(policy="fp32", sums="exact"),
        run=dict(num_steps=4, evaluate_every=2, evaluate_batches=1, timeout_s=60.0),
    )
    return tiny_runs.make_config(**{**sections, **changes})


@cache
def trained(layout: str | None, model: str, document_mask: bool = False) -> RunResult:
    config = config_of(LAYOUTS[layout] if layout else {}, MODELS[model])
    changes = {name: getattr(config, name).model_dump() for name in ("model", "parallel", "batch", "precision", "run")}
    return tiny_runs.train_in_threads(**changes, data=dict(document_mask=document_mask))


def assert_equal_runs(ours: RunResult, one: RunResult) -> None:
    assert ours.entries == one.entries and ours.evaluation == one.evaluation
    for name in one.weights:
        assert torch.equal(ours.gradients[name], one.gradients[name]), name
        assert torch.equal(ours.weights[name], one.weights[name]), name


@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_it_is_one_process_bit_for_bit(layout, model):
    assert_equal_runs(trained(layout, model), trained(None, model))


def test_documents_are_kept_apart():
    """Their borders stay on a stage with the activation that it keeps."""
    assert_equal_runs(trained("pp3-dp2", "llama", True), trained(None, "llama", True))


def test_tensor_parallel_ranks():
    """With sums as floats: other tensor-parallel sizes round differently."""
    parallel = dict(tp_size=2, pp_size=2, dp_size=2, sequence_parallel=True, **ZB_V)
    for model in ({}, dict(tie_word_embeddings=True)):
        cell = cells.Cell(name="zb-v", changes=dict(parallel=parallel, model=model))
        ours, one = cells.run_cell(cell), cells.run_cell(cell.reference)
        assert ours.losses == pytest.approx(one.losses, rel=1e-10)
        for name, weight in one.weights.items():
            torch.testing.assert_close(ours.weights[name], weight, rtol=1e-8, atol=1e-10)


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", ["llama", "tied"])
@pytest.mark.parametrize(("rank", "phase"), [(0, "forward"), (1, "load"), (3, "backward"), (2, "reduce_scatter")])
def test_a_kill_changes_nothing(model, rank, phase):
    config = config_of(LAYOUTS["pp2-dp2-zero0"] | dict(zero_stage=1), MODELS[model])
    assert len(build_grid(config).ranks) == 4
    assert_same_run(run(config, [kill_fault(rank, phase)]), run(config))


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["llama", "tied"])
def test_it_resumes_on_other_layouts_and_they_on_it(tmp_path, model):
    layouts = [dict(pp_size=3, dp_size=2, **ZB_V), dict(pp_size=2), {}]
    start = None
    for number, parallel in enumerate(layouts):
        config = config_of(parallel, MODELS[model])
        weights, snapshots, contexts = run_layout(config, start=start, steps=1)
        kept = save(tmp_path / str(number), snapshots, contexts[0])
        for other in layouts:
            loaded, again, runtimes = run_layout(config_of(other, MODELS[model]), start=kept)
            assert_equal(loaded, weights)
            assert runtimes[0].state == contexts[0].state
            assert_equal(read_all(save(tmp_path / "again", again, runtimes[0])), read_all(kept))
        start = kept
