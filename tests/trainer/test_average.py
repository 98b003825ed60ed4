"""The mean of checkpoints of whatever layouts and formats is that of their tensors; so is what comes of it."""

import math
from functools import partial

import pytest
import torch

from parallel3d.checkpoint import average as module
from parallel3d.checkpoint.average import average
from parallel3d.checkpoint.directory import CheckpointDirectory, verify_checkpoint
from parallel3d.checkpoint.index import WEIGHT
from parallel3d.checkpoint.read import CheckpointReader, load_shard
from parallel3d.checkpoint.weights import FILE
from parallel3d.commands import average as script
from parallel3d.errors import CheckpointError
from parallel3d.inprocess.world import ThreadWorld
from parallel3d.parallel.sharding import UNSHARDED
from parallel3d.trainer.context import Transports
from parallel3d.trainer.generation import start_rank
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.step import evaluate
from tests.support import tiny_runs
from tests.support.saved_layouts import read_all, run_layout, save
from tests.trainer.test_checkpointing import config_of, train

SMALL = dict(hidden_size=16, intermediate_size=24)
MIXED = (
    (dict(tp_size=2, pp_size=2, dp_size=2), "fp32"),
    (dict(dp_size=3), "bf16_sr"),
    (dict(pp_size=2, stage_replicas=[2, 1]), "fp64"),
    (dict(), "bf16"),
)


def saved(folder, parallel=(), policy="fp32", model=(), steps=1):
    config = tiny_runs.make_config(
        model=SMALL | dict(model),
        parallel=dict(bucket_mib=0.003, **dict(parallel)),
        precision=dict(policy=policy),
        batch=dict(global_batch_size=6, micro_batch_size=1, sequence_length=8),
    )
    _, snapshots, runtimes = run_layout(config, steps=steps)
    return save(folder, snapshots, runtimes[0])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Checkpoints of one model, each on a layout and in a format of its own."""
    folder = tmp_path_factory.mktemp("mixed")
    return [saved(folder / str(n), *kind, steps=n + 1) for n, kind in enumerate(MIXED)]


@pytest.mark.parametrize("block_elements", [10**9, 100, 1])
def test_the_mean_is_that_of_the_tensors(tmp_path, mixed, monkeypatch, block_elements):
    sizes, mean_of = [], module.mean_of
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", block_elements)
    monkeypatch.setattr(module, "mean_of", lambda *block: sizes.append(math.prod(block[-1])) or mean_of(*block))
    index = average(mixed, tmp_path / "mean")
    assert max(sizes) <= max(block_elements, 24)  # the longest row is that of an MLP
    assert (
        verify_checkpoint(tmp_path / "mean") == index
        and not index.has_optimizer_state
        and len(index.facts.averaged) == 4
    )
    assert index.step == 4
    mean, parts = read_all(tmp_path / "mean"), [read_all(folder) for folder in mixed]
    assert {kind for kind, _ in mean} == {WEIGHT}
    for key, values in mean.items():
        right = torch.stack([part[key].double() for part in parts]).mean(0).float()
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, right, rtol=0, atol=0)
    assert {name for _, name in mean} == {name for _, name in parts[0]}


def test_the_order_changes_no_bit(tmp_path, mixed):
    average(mixed, tmp_path / "a")
    average(mixed[::-1], tmp_path / "b")
    assert (tmp_path / "a" / FILE).read_bytes() == (tmp_path / "b" / FILE).read_bytes()


def evaluation_of(config, folder):
    """The validation loss with a checkpoint's weights, on one process."""
    world, grid = ThreadWorld(1), build_grid(config)
    rank = tiny_runs.prepare(config, grid, 0)
    reader = CheckpointReader(folder, verify_checkpoint(folder))
    rank.optimizer.start_from(0, partial(load_shard, reader, tp=UNSHARDED, kinds=(WEIGHT,)))
    start_rank(rank, grid, Transports(make_group=world.make_group(0), links=world.links(0), token=world.tokens[0]))
    return evaluate(rank).loss


def test_the_average_of_a_run_validates_no_worse_than_the_worse_of_its_checkpoints(tmp_path):
    config = config_of("pp2-dp2", num_steps=12, every=None)
    train(config, tmp_path / "run", stop_at=9)
    done = train(config, tmp_path / "run", start=tmp_path / "run" / "latest")
    assert script.main(["--last", "2", "--checkpoints", str(tmp_path / "run"), "--out", str(tmp_path / "mean")]) == 0
    one = config_of("one")
    parts = [evaluation_of(one, CheckpointDirectory(tmp_path / "run").path_of(step)) for step in (9, 12)]
    assert parts[-1] == pytest.approx(done.run.evaluation, rel=1e-5)
    mean = evaluation_of(one, tmp_path / "mean")
    assert 0 < mean <= max(parts) and mean not in parts


@pytest.mark.parametrize(
    "model, named",
    [
        (dict(num_hidden_layers=2), "model.num_hidden_layers is 4 in"),
        (dict(num_attention_heads=2, num_key_value_heads=2), "model.num_attention_heads is 4 in"),
    ],
)
def test_another_model_is_refused_with_what_differs(tmp_path, mixed, model, named):
    other = saved(tmp_path / "other", model=model)
    with pytest.raises(CheckpointError, match=f"different models: {named} .* in {other}"):
        average([mixed[0], other], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_damage_is_found_before_anything_is_written(tmp_path, mixed):
    other = saved(tmp_path / "other")
    shard = next(other.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged"):
        average([mixed[0], other], tmp_path / "mean")
    assert not list(tmp_path.glob("mean*"))


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--last", "3", "--checkpoints", "HERE"], "holds fewer than 3 checkpoints: step-00000001"),
        (["--last", "1", "--checkpoints", "HERE/none"], "fewer than 1 checkpoints: none"),
        (["HERE/step-00000001", "HERE/../0/step-00000001"], "the same checkpoint twice"),
        (["HERE"], "index.json can't be read"),
    ],
)
def test_mistakes_get_one_message(tmp_path, mixed, capsys, arguments, named):
    here = str(mixed[0].parent)
    arguments = [argument.replace("HERE", here) for argument in arguments]
    assert script.main([*arguments, "--out", str(tmp_path / "mean")]) == 2
    assert named in capsys.readouterr().err and not (tmp_path / "mean").exists()


def test_what_is_there_is_not_overwritten(tmp_path, mixed, capsys):
    (tmp_path / "mean").mkdir()
    assert script.main([str(mixed[0]), "--out", str(tmp_path / "mean")]) == 2
    assert "mean exists: nothing is overwritten" in capsys.readouterr().err
    for wrong in ([], ["a", "--last", "2"], ["--last", "0", "--checkpoints", "a"], ["--last", "2"]):
        with pytest.raises(SystemExit, match="2"):
            script.main([*wrong, "--out", "b"])
