"""DeepSpeed's rule for the three sizes of a batch: train_batch_size = micro x accumulation x replicas."""

from __future__ import annotations

import json
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from parallel3d.commands import train
from parallel3d.config.deepspeed_batch import BATCH, own_replicas, own_sizes
from parallel3d.config.deepspeed_json import map_deepspeed
from parallel3d.config.deepspeed_values import DeepSpeedSettings, OwnConfig
from parallel3d.errors import ConfigError

QUICKSTART = {"batch": {"global_batch_size": 16, "micro_batch_size": 2}, "parallel": {"pp_size": 2, "dp_size": 2}}


def sizes(total: object = None, micro: object = None, steps: object = None) -> dict[str, object]:
    """The sizes as a file has them; None is a key that it lacks."""
    return {name: value for name, value in zip(BATCH, (total, micro, steps)) if value is not None}


def own(world_size: int | None = None, **sections: dict[str, Any]) -> OwnConfig:
    """Two stages and replicas, 16 = 2 x 4 x 2; with other sections in place of these."""
    return OwnConfig(raw=QUICKSTART | sections, world_size=world_size)


def batch_of(settings: DeepSpeedSettings) -> tuple[int, int]:
    assert settings.fields["batch.num_micro_batches"] is None  # it follows
    return settings.fields["batch.global_batch_size"], settings.fields["batch.micro_batch_size"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (sizes(16, 2), (16, 2)),
        (sizes(None, 2, 3), (12, 2)),
        (sizes(24, None, 3), (24, 4)),
        (sizes(12, 2, 3), (12, 2)),
        (sizes(16, 4, "auto"), (16, 4)),  # accumulation follows
        (sizes(None, "auto", 3), (12, 2)),  # the configuration's micro-batch
        (sizes("auto", None, 2), (16, 4)),  # the configuration's batch
        (sizes("auto", "auto", 4), (16, 2)),
        (sizes("auto", 4), (16, 4)),
        (sizes("auto", 4, "auto"), (16, 4)),
        (sizes(32, "auto"), (32, 2)),
        (sizes(32, "auto", "auto"), (32, 2)),
    ],
)
def test_two_sizes_of_the_batch_give_the_third(given: dict[str, object], expected: tuple[int, int]):
    settings = map_deepspeed(given, own())
    assert (batch_of(settings), settings.notices) == (expected, [])


@pytest.mark.parametrize(
    ("given", "expected", "steps"),
    [
        (sizes(None, 4), (8, 4), "1 (DeepSpeed's default)"),
        (sizes(32), (32, 16), "1 (DeepSpeed's default)"),
        (sizes(None, 4, "auto"), (32, 4), "4 (the configuration's)"),
        (sizes(32, None, "auto"), (32, 4), "4 (the configuration's)"),
    ],
)
def test_one_size_alone(given: dict[str, object], expected: tuple[int, int], steps: str):
    settings = map_deepspeed(given, own())
    assert batch_of(settings) == expected
    parts = f"train_micro_batch_size_per_gpu {expected[1]} x gradient_accumulation_steps {steps}"
    assert settings.notices == [f"train_batch_size {expected[0]} = {parts} x 2 replicas (parallel.dp_size)"]


@pytest.mark.parametrize("given", [sizes("auto"), sizes("auto", "auto", "auto"), sizes(None, None, "auto"), {}])
def test_a_batch_that_is_auto_is_the_configurations(given: dict[str, object]):
    settings = map_deepspeed(given, own())
    assert (settings.fields, settings.notices) == ({}, [])


UNEVEN = {"parallel": {"stage_replicas": [2, 3]}}
OWN_TOTAL = "train_batch_size = 'auto (16 in the configuration)'"
THIRD = "gradient_accumulation_steps (3) x 2 replicas (parallel.dp_size)"


@pytest.mark.parametrize(
    ("given", "sections", "message"),
    [
        (sizes("8"), {}, "train_batch_size = '8': must be a positive integer"),
        (sizes(True), {}, "train_batch_size = True: must be a positive integer"),
        (sizes(False), {}, "train_batch_size = False: must be a positive integer"),
        (sizes(None, 0), {}, "train_micro_batch_size_per_gpu = 0: must be a positive integer"),
        (sizes(None, 2, 1.5), {}, "gradient_accumulation_steps = 1.5: must be a positive integer"),
        (sizes(None, None, 3), {}, "gradient_accumulation_steps = 3: says nothing without train_batch_size or"),
        (sizes(15, None, 3), {}, f"train_batch_size = 15: must be a multiple of {THIRD}"),
        (sizes(64, 2, 3), {}, f"train_batch_size = 64: must be train_micro_batch_size_per_gpu (2) x {THIRD}"),
        (sizes(24, 2, 3), {}, f"train_batch_size = 24: must be train_micro_batch_size_per_gpu (2) x {THIRD}"),
        (sizes(6, 2), {}, "must be a multiple of train_micro_batch_size_per_gpu (2) x 2 replicas"),
        (sizes(7), {}, "must be a multiple of gradient_accumulation_steps (1) x 2 replicas"),
        (sizes("auto", "auto", 3), {}, f"{OWN_TOTAL}: must be train_micro_batch_size_per_gpu (2) x {THIRD}"),
        (sizes("auto", 3), {}, f"{OWN_TOTAL}: must be a multiple of train_micro_batch_size_per_gpu (3) x 2 replicas"),
        (sizes("auto", 3), {"batch": {}}, "train_batch_size = 'auto': needs batch.global_batch_size"),
        (sizes(16, "auto"), {"batch": {}}, "train_micro_batch_size_per_gpu = 'auto': needs batch.micro_batch_size"),
        (sizes(None, 4, "auto"), {"batch": {"global_batch_size": 6, "micro_batch_size": 2}}, "they are 6 and 2"),
        (sizes(None, 4), UNEVEN, "train_micro_batch_size_per_gpu = 4: is a product with the number of replicas"),
    ],
)
def test_sizes_that_contradict_are_one_error(given: dict[str, object], sections: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        map_deepspeed(given, own(**sections))
    assert message in str(error.value) and len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("parallel", "world_size", "number"),
    [
        ({"dp_size": 3}, 16, 3),
        ({"stage_replicas": [4, 4]}, None, 4),
        ({"stage_replicas": [4, 3]}, None, None),
        ({"tp_size": 2, "pp_size": 2}, 16, 3),  # one of the ranks is a spare
        ({"pp_size": 2}, None, 1),
        ({"dp_size": "x"}, None, 1),
        ({"stage_replicas": [[]]}, None, None),
    ],
)
def test_the_replicas_are_those_of_the_layout(parallel: dict[str, Any], world_size: int | None, number: int | None):
    assert own_replicas(own(world_size, parallel=parallel, elastic={"spares": 1})).number == number


def test_three_sizes_give_the_replicas_that_nothing_else_sets():
    settings = map_deepspeed(sizes(12, 2, 3), own(parallel={}))
    assert (batch_of(settings), settings.fields["parallel.dp_size"]) == ((12, 2), 2)
    assert "parallel.dp_size" not in map_deepspeed(sizes(12, 2, 3), own(2, parallel={})).fields  # the launcher's
    with pytest.raises(ConfigError, match="must be train_micro_batch_size_per_gpu"):
        map_deepspeed(sizes(12, 2, 5), own(parallel={}))


@pytest.mark.parametrize(
    "batch",
    [
        {"global_batch_size": 16, "micro_batch_size": 2},
        {"global_batch_size": 16, "num_micro_batches": 8},
        {"micro_batch_size": 2, "num_micro_batches": 8},
    ],
)
def test_the_configurations_sizes(batch: dict[str, int]):
    assert own_sizes(own(batch=batch)) == (16, 2)


@pytest.mark.full
def test_the_rule_is_deepspeeds():
    """Its own code, for all small sizes: the same batch, and a refusal where it fails."""
    pytest.importorskip("deepspeed")
    theirs: Any = import_module("deepspeed.runtime.config").DeepSpeedConfig
    for given in product((None, 4, 6, 8, 12), (None, 1, 2, 3), (None, 1, 2, 3)):
        if given == (None, None, None):
            continue  # nothing is said: the configuration's
        expected = object.__new__(theirs)
        for name, value in zip(BATCH, given):
            setattr(expected, name, value)
        expected.world_size = 2
        try:
            expected._configure_train_batch_size()
        except AssertionError:
            with pytest.raises(ConfigError):
                map_deepspeed(sizes(*given), own())
            continue
        found = batch_of(map_deepspeed(sizes(*given), own()))
        assert found == (expected.train_batch_size, expected.train_micro_batch_size_per_gpu), given


def test_a_launchers_ranks_and_a_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    """Of the command itself: 4 ranks in 2 stages leave 2 replicas."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(sizes(None, 3)))
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    words = ["--config", "quickstart", "--deepspeed_config", str(file), "--print-config", "parallel.dp_size=null"]
    assert train.main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["batch"]["global_batch_size"] == 6
    assert "train_batch_size 6 = " in err and "2 replicas (of the launcher's 4 ranks)" in err
