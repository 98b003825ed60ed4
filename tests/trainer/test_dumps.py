"""Dumps of a step: any layout's equals one process', and a broken layer is the first to be named."""

import contextlib
import importlib
import json

import pytest
import torch

from parallel3d.debug.compare_dumps import SECTIONS, compare_tensors, dumped_tensors, mean_loss
from parallel3d.debug.dump import read_step
from parallel3d.debug.recorder import name_modules
from parallel3d.layers.linear import RowParallelLinear
from tests.support.kill_cells import kill_fault
from tests.support.kill_layouts import config_of
from tests.support.thread_kills import run
from tests.support.tiny_runs import make_config, train_in_threads

STEP = 2
TOLERANCE = 1e-10


def dump_run(folder, *, names=("*",), steps=(STEP,), **changes):
    """Runs a layout in threads with a dump of its second step; returns the run."""
    asked = dict(steps=list(steps), names=list(names), directory=str(folder))
    return train_in_threads(steps=STEP, **{**changes, "debug": dict(dump_tensors=asked)})


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The dump of one process, put together; by model section."""
    known = {}

    def dump(**model):
        key = json.dumps(model, sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("alone")
            known[key] = folder, dump_run(folder, model=model)
        return known[key]

    return dump


def global_tensors(folder):
    return dumped_tensors(read_step(folder / f"step-{STEP}"))


CUBE = dict(tp_size=2, pp_size=2, dp_size=2)
LAYOUTS = {
    "cube": (dict(parallel=CUBE), {}),
    "cube-sp-dropout-micro2": (
        dict(parallel=dict(sequence_parallel=True, **CUBE), batch=dict(micro_batch_size=2)),
        dict(hidden_dropout=0.2),
    ),
    "tp4-padded-vocabulary": (dict(parallel=dict(tp_size=4, sequence_parallel=True)), {}),
    "pp4-zb-h1": (dict(parallel=dict(pp_size=4, schedule="zb-h1")), {}),
    "stages-2-1-zero0": (dict(parallel=dict(pp_size=2, stage_replicas=[2, 1], zero_stage=0)), {}),
    "exact-sums-grouped-queries": (
        dict(parallel=dict(dp_size=4), precision=dict(policy="fp64", sums="exact")),
        dict(num_key_value_heads=2),
    ),
    "shared-key-heads": (
        dict(parallel=dict(tp_size=4, dp_size=2, sequence_parallel=True)),
        dict(num_key_value_heads=2),
    ),
    "interleaved-recomputed": (
        dict(parallel=dict(pp_size=2, schedule="interleaved", virtual_stages=2, recompute="full")),
        {},
    ),
    "cube-recomputed-selectively": (
        dict(parallel=dict(recompute="selective", sequence_parallel=True, **CUBE)),
        dict(hidden_dropout=0.2),
    ),
    "gpt2": (dict(parallel=CUBE), dict(architecture="gpt2")),
    "tied-stages-1-2": (dict(parallel=dict(pp_size=2, stage_replicas=[1, 2])), dict(tie_word_embeddings=True)),
}


@pytest.mark.sample(2, rest=5)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_dumps_what_one_process_does(name, alone, tmp_path):
    layout, model = LAYOUTS[name]
    reference_folder, reference = alone(**model)
    done = dump_run(tmp_path, model=model, **layout)
    ours, theirs = global_tensors(tmp_path), global_tensors(reference_folder)
    assert set(ours) == set(theirs)
    found = list(compare_tensors(ours, theirs))
    assert len(found) == len(theirs) and {each.section for each in found} == set(SECTIONS)
    assert [each.name for each in found if not each.is_same(TOLERANCE)] == []
    assert mean_loss(read_step(tmp_path / f"step-{STEP}")) == pytest.approx(reference.losses[-1], rel=1e-12)
    for parameter, gradient in done.gradients.items():  # what an independent way says of the same step
        dumped = ours[f"{parameter}.grad"].assemble().values.view(gradient.shape)
        assert torch.allclose(dumped, gradient.double(), rtol=1e-12, atol=1e-15)


@pytest.mark.full
def test_gradients_are_dumped_without_the_loss_scale(tmp_path):
    """fp16 multiplies the loss by 65536; a dump has the gradients of the mean loss, to fp16's three digits."""
    dump_run(tmp_path, parallel=CUBE, precision=dict(policy="fp16"), steps=[1])
    dump_run(tmp_path / "wide", steps=[1])
    wide, narrow = (dumped_tensors(read_step(folder / "step-1")) for folder in (tmp_path / "wide", tmp_path))
    far = [each.name for each in compare_tensors(narrow, wide) if each.relative > 0.05]
    assert far == []


def test_everything_has_a_name_that_says_what_it_is(alone):
    folder, _ = alone()
    found = global_tensors(folder)
    names = list(found)
    assert {"embedding.input", "embedding.output", "final_norm.output", "head.input", "head.logits"} <= set(names)
    for layer in range(4):
        parts = ["", ".attention_norm", ".attention", ".attention.qkv", ".attention.output", ".mlp_norm", ".mlp"]
        for part in parts:
            for what in ("input", "output", "input.grad", "output.grad"):
                assert f"layers.{layer}{part}.{what}" in names
    assert found["embedding.output"].assemble().values.shape == (8 * 16, 32)
    assert found["head.logits"].assemble().values.shape == (8 * 16, 257)
    assert found["embedding.input"].section == "forward"
    forward = [name for name in names if found[name].section == "forward"]
    assert forward[0] == "embedding.input" and forward[-1] == "head.logits"
    assert forward.index("layers.0.mlp.output") < forward.index("layers.1.attention.output")
    backward = [name for name in names if found[name].section == "backward"]
    assert backward[0] == "head.input.grad" and backward[-1].startswith("embedding.output")


def test_names_choose(tmp_path):
    dump_run(tmp_path, names=["layers.1.*.grad", "head.logits"], parallel=CUBE)
    found = set(global_tensors(tmp_path))
    assert "head.logits" in found and "layers.1.mlp.down.weight.grad" in found
    assert all(name == "head.logits" or (name.startswith("layers.1.") and name.endswith(".grad")) for name in found)


def test_nothing_is_left_of_the_hooks_and_nothing_changes(tmp_path, alone):
    """The dumped step and those after it are bitwise as without."""
    parallel = dict(sequence_parallel=True, **CUBE)
    plain = train_in_threads(steps=3, parallel=parallel)
    asked = dict(dump_tensors=dict(steps=[2], directory=str(tmp_path)))
    dumped = train_in_threads(steps=3, parallel=parallel, debug=asked)
    assert dumped.entries == plain.entries
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2"]
    assert len(list((tmp_path / "step-2").iterdir())) == 8


def break_forward(monkeypatch, name, ranks):
    """The output of one product gets a little too large, on these tensor-parallel ranks of two."""
    forward = RowParallelLinear.forward

    def wrong(self, *arguments):
        product = forward(self, *arguments)
        is_it = self.weight.sharding.name == f"{name}.weight" and self.tp.group.rank in ranks
        return product * 1.001 if is_it else product

    monkeypatch.setattr(RowParallelLinear, "forward", wrong)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all-ranks", "one-rank"])
def test_a_broken_layer_is_the_first_to_be_named(ranks, alone, tmp_path, monkeypatch, capsys):
    reference, _ = alone()
    script = importlib.import_module("parallel3d.commands.compare_dumps")
    dump_run(tmp_path / "whole", parallel=CUBE, steps=[1])
    break_forward(monkeypatch, "layers.2.mlp.down", ranks)
    with contextlib.suppress(AssertionError):  # what is compared at the end of a run differs within it
        dump_run(tmp_path / "broken", parallel=CUBE, steps=[1])
    assert script.main([str(tmp_path / "broken"), str(tmp_path / "whole"), "--tolerance", "1e-10"]) == 1
    out = capsys.readouterr().out
    assert "the first in the order of computation: layers.2.mlp.down.output\n" in out
    assert ("copies within a dump differ" in out) == (len(ranks) == 1)
    assert "weights: 0 of " in out
    assert script.main([str(tmp_path / "whole"), str(tmp_path / "whole")]) == 0
    assert script.main([str(tmp_path / "whole"), str(reference)]) == 2
    assert "no step in both: [1] in" in capsys.readouterr().err


def test_a_folder_without_dumps_is_one_clear_error(tmp_path, capsys):
    script = importlib.import_module("parallel3d.commands.compare_dumps")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dumps" / "step-3").mkdir(parents=True)
    for name, problem in (("missing", "is not a directory"), ("empty", "holds no step-N folder")):
        assert script.main([str(tmp_path / name), str(tmp_path / "dumps")]) == 2
        assert script.main([str(tmp_path / "dumps"), str(tmp_path / name)]) == 2
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 2 and all(f"{tmp_path / name} {problem}" in line for line in told)


def test_a_missing_part_is_no_agreement(alone, tmp_path, capsys):
    reference, _ = alone()
    script = importlib.import_module("parallel3d.commands.compare_dumps")
    dump_run(tmp_path, parallel=dict(pp_size=2, dp_size=2))
    assert script.main([str(tmp_path), str(reference), "--tolerance", "1e-10"]) == 0
    (tmp_path / f"step-{STEP}" / "rank-1.safetensors").unlink()
    assert script.main([str(tmp_path), str(reference), "--tolerance", "1e-10"]) == 1
    assert "parts are missing" in capsys.readouterr().out


def test_what_a_larger_layout_has_left_in_the_folder_does_not_count(alone, tmp_path):
    reference, _ = alone()
    dump_run(tmp_path, parallel=CUBE, optimizer=dict(learning_rate=1.0))  # other tensors
    dump_run(tmp_path, parallel=dict(pp_size=2))
    assert len(list((tmp_path / f"step-{STEP}").iterdir())) == 8
    assert all(each.is_same(TOLERANCE) for each in compare_tensors(global_tensors(tmp_path), global_tensors(reference)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("phase", ["forward", "reduce_scatter", "all_reduce"])
def test_a_step_repeated_after_a_loss_is_dumped_completely(phase, tmp_path):
    """Once its entry is held it is not run again: then a dump lacks what the lost rank had not written."""
    dumps = {}
    for name, faults in (("undisturbed", []), ("lost", [kill_fault(5, phase)])):
        config = config_of("pp2-dp4")
        asked = config.debug.dump_tensors.model_copy(update=dict(steps=[STEP], directory=str(tmp_path / name)))
        debug = config.debug.model_copy(update=dict(dump_tensors=asked))
        assert not run(config.model_copy(update=dict(debug=debug)), faults).abort_reason
        dumps[name] = read_step(tmp_path / name / f"step-{STEP}")
    found = list(compare_tensors(dumped_tensors(dumps["lost"]), dumped_tensors(dumps["undisturbed"])))
    assert len(found) > 100 and all(each.largest == 0 for each in found)
    assert phase == "all_reduce" or all(each.complete for each in found)


def test_modules_are_named_by_the_model_not_by_the_stage():
    config = make_config(parallel=dict(pp_size=2))
    names = {}

    def record_names(rank, runtime):
        names[rank] = [(named.name, named.depth) for named in name_modules(runtime.chunks)]

    run(config, watch=record_names)
    assert names[0][0] == ("embedding", -1) and ("layers.1.mlp.down", 1) in names[0]
    assert ("layers.3.attention.qkv", 3) in names[1] and names[1][-1][0] == "head"
    assert not {name for name, _ in names[0]} & {name for name, _ in names[1]}
