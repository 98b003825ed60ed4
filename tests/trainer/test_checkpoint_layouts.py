"""Any layout saves, any other loads: every parameter and every moment, bit for bit."""

import random

import pytest
import torch
from safetensors.torch import load_file

from parallel3d.checkpoint.directory import verify_checkpoint
from parallel3d.errors import CheckpointError
from tests.support import tiny_runs
from tests.support.saved_layouts import assert_equal, read_all, run_layout, save

NUM_PAIRS = 40
MANY_PAIRS = 200


def random_layout(numbers):
    tp, pp = numbers.choice((1, 2, 4)), numbers.choice((1, 1, 2, 4))
    parallel = dict(tp_size=tp, pp_size=pp, zero_stage=numbers.choice((0, 1, 1, 1)))
    parallel["bucket_mib"] = numbers.choice((0.001, 0.01, 100.0))
    parallel["sequence_parallel"] = numbers.random() < 0.5
    parallel["order"] = numbers.choice(("pp_dp_tp", "dp_pp_tp"))
    if numbers.random() < 0.3:
        parallel["stage_replicas"] = [numbers.randint(1, 3) for _ in range(pp)]
    else:
        parallel["dp_size"] = numbers.choice((1, 2, 3)) if tp * pp <= 4 else 1
    if pp == 2 and numbers.random() < 0.5:
        parallel |= dict(schedule="interleaved", virtual_stages=2)
    return dict(parallel=parallel, elastic=dict(zero_backups=numbers.choice((0, 1))))


def random_model(numbers):
    return dict(
        hidden_size=16,
        intermediate_size=24,
        architecture=numbers.choice(("llama", "gpt2")),
        num_key_value_heads=numbers.choice((1, 2, 4)),
        tie_word_embeddings=numbers.random() < 0.4,
    )


def config_of(layout, model, policy="fp32"):
    batch = dict(global_batch_size=6, micro_batch_size=1, sequence_length=8)
    return tiny_runs.make_config(model=model, precision=dict(policy=policy), batch=batch, **layout)


def round_trip(folder, seed):
    numbers = random.Random(seed)
    model = random_model(numbers)
    weights, snapshots, runtimes = run_layout(config_of(random_layout(numbers), model), steps=1)
    first = save(folder / "first", snapshots, runtimes[0])
    loaded, again, others = run_layout(config_of(random_layout(numbers), model), start=first)
    assert_equal(loaded, weights)
    second = save(folder / "second", again, others[0])
    assert_equal(read_all(second), read_all(first))
    assert others[0].state == runtimes[0].state


@pytest.mark.sample(2, rest=10)
@pytest.mark.parametrize("seed", range(NUM_PAIRS))
def test_any_layout_to_any_other(tmp_path, seed):
    round_trip(tmp_path, seed)


@pytest.mark.full
@pytest.mark.sample(0, rest=10)
@pytest.mark.parametrize("seed", range(NUM_PAIRS, MANY_PAIRS))
def test_many_more_pairs(tmp_path, seed):
    round_trip(tmp_path, seed)


CUBE = dict(parallel=dict(tp_size=2, pp_size=2, dp_size=2))
SMALL = dict(hidden_size=16, intermediate_size=24)


def test_what_is_on_disk_is_the_model_in_plain_safetensors(tmp_path):
    """Read by the library itself: names without ranks, fused weights apart, no padding, each element once."""
    weights, snapshots, runtimes = run_layout(config_of(CUBE, SMALL), steps=1)
    folder = save(tmp_path, snapshots, runtimes[0])
    index = verify_checkpoint(folder)
    fused = torch.cat([read_all(folder)["weight", f"layers.0.attention.{name}.weight"] for name in "qkv"])
    assert torch.equal(fused, weights["layers.0.attention.qkv.weight"])
    assert index.tensors["embedding.weight"].shape == (257, 16)
    files = [load_file(folder / file.name) for file in index.files]
    stored = sum(tensor.numel() for file in files for tensor in file.values())
    assert stored == 3 * sum(weight.numel() for weight in weights.values())
    assert len(files) == 8  # each rank has written a part
    sizes = [file.size for file in index.files]
    assert max(sizes) < 2 * sum(sizes) / len(sizes)


@pytest.mark.sample(3)
@pytest.mark.parametrize("here", ["fp32", "fp64", "bf16", "bf16_sr", "fp16"])
@pytest.mark.parametrize("there", ["fp32", "bf16", "bf16_sr"])
def test_formats_are_widened_exactly_and_narrowed_to_the_nearest(tmp_path, here, there):
    _, snapshots, runtimes = run_layout(config_of(CUBE, SMALL, here), steps=1)
    first = read_all(save(tmp_path / "first", snapshots, runtimes[0]))
    other = dict(parallel=dict(tp_size=1, pp_size=1, dp_size=3))
    weights, again, others = run_layout(config_of(other, SMALL, there), start=tmp_path / "first" / "step-00000001")
    second = read_all(save(tmp_path / "second", again, others[0]))
    wide = {"fp32": torch.float32, "bf16": torch.float32, "bf16_sr": torch.bfloat16}[there]
    assert_equal(second, {key: value.to(wide) for key, value in first.items()})
    compute = torch.float32 if there == "fp32" else torch.bfloat16
    assert torch.equal(weights["final_norm.weight"], first["weight", "final_norm.weight"].to(wide).to(compute))


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(model=dict(num_hidden_layers=2)), "model.num_hidden_layers was 4, it is 2"),
        (dict(run=dict(seed=5)), "run.seed was 1234, it is 5"),
        (dict(batch=dict(global_batch_size=12)), "batch.global_batch_size was 6, it is 12"),
    ],
)
def test_another_run_is_refused_with_what_differs(tmp_path, change, named):
    _, snapshots, runtimes = run_layout(config_of({}, SMALL), steps=1)
    folder = save(tmp_path, snapshots, runtimes[0], step=1)
    config = config_of({}, SMALL).model_dump()
    for section, values in change.items():
        config[section] |= values
    config["batch"]["num_micro_batches"] = None
    changed = tiny_runs.make_config(**{name: config[name] for name in ("model", "batch", "precision", "run")})
    with pytest.raises(CheckpointError, match=named):
        run_layout(changed, start=folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_a_v_of_chunks_and_other_layouts_resume_each_other(tmp_path, is_tied):
    """Under ZB-V the first stage holds both ends of the model."""
    model = SMALL | dict(num_hidden_layers=6, tie_word_embeddings=is_tied)
    v_of_chunks = dict(pp_size=3, dp_size=2, schedule="zb-v", virtual_stages=2)
    configs = [config_of(dict(parallel=parallel), model) for parallel in (v_of_chunks, dict(pp_size=2), {})]
    start = None
    for number, config in enumerate(configs):
        weights, snapshots, contexts = run_layout(config, start=start, steps=1)
        start = save(tmp_path / str(number), snapshots, contexts[0])
        for other in configs:
            loaded, again, others = run_layout(other, start=start)
            assert_equal(loaded, weights)
            assert others[0].state == contexts[0].state
            assert_equal(read_all(save(tmp_path / "again", again, others[0])), read_all(start))
