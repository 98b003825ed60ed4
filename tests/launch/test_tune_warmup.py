"""launch/tune_warmup.py: its short runs, its output, reuse of an earlier search; one real search."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.commands.parsers import parse
from parallel3d.commands.tune_warmup import ShortRunner, describe_outcome, plan_search
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.errors import ConfigError
from parallel3d.monitor.tuning import SearchResult, ShortRun, ShortRunEvaluation

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs/quickstart.json"
TINY = [
    "model.hidden_size=48",
    "model.intermediate_size=64",
    "model.num_hidden_layers=1",
    "parallel.pp_size=1",
    "parallel.dp_size=1",
    "batch.global_batch_size=4",
    "batch.sequence_length=32",
    "lr_schedule.warmup_steps=2",
    "run.num_steps=40",
]


def config_of(*overrides: str) -> Config:
    return resolve(load_config(QUICKSTART, overrides), config_path=QUICKSTART)


def search_of(config: Config, *arguments: str):
    return plan_search(config, parse("tune-warmup", ["--config", str(QUICKSTART), *arguments]))


def test_durations_are_a_few_warmups_apart_up_to_half_of_the_run():
    search = search_of(config_of())
    assert list(search.starts) == [8, 16, 32, 64]
    assert list(search.durations) == [60, 120]
    assert (search.start_run_steps, search.duration_run_steps, search.max_short_runs) == (20, 60, 6)


def test_options_say_otherwise():
    search = search_of(config_of(), "--multiple", "2", "--max-duration", "100", "--starts", "24,16", "--tolerance", "2")
    assert (list(search.starts), list(search.durations), search.tolerance) == ([16, 24], [40, 80], 2.0)


@pytest.mark.parametrize("arguments", [["--multiple", "0"], ["--tolerance", "1"], ["--starts", "8,x"]])
def test_an_option_that_cannot_be_is_said_to_be_wrong(arguments: list[str], capsys):
    with pytest.raises(SystemExit) as ended:
        search_of(config_of(), *arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_warmup_by_tokens_counts_in_full_steps():
    config = config_of("lr_schedule.warmup_steps=0", "lr_schedule.warmup_tokens=20000")  # of 2048 tokens a step
    assert search_of(config).start_run_steps == 10


@pytest.mark.parametrize(
    ("override", "field"),
    [("lr_schedule.warmup_steps=0", "lr_schedule.warmup_steps"), ("batch.sequence_length=8", "batch.sequence_length")],
)
def test_what_it_cannot_search(override: str, field: str):
    with pytest.raises(ConfigError, match=field):
        search_of(config_of(override))


def test_the_conclusion_is_a_section_that_the_configuration_takes():
    text = describe_outcome(SearchResult(start=16, duration=120, reason="180 fluctuates"))
    section = json.loads(text[text.index("{") :])
    config = load_config(QUICKSTART, [f"warmup={json.dumps(section['warmup'])}"])
    assert (config.warmup.sequence_length.start, config.warmup.sequence_length.duration) == (16, 120)
    assert "lower the learning rate" in describe_outcome(
        SearchResult(start=8, duration=None, reason="even the shortest fluctuates")
    )


def test_a_finished_run_is_read_again_unless_the_question_is_another(tmp_path, monkeypatch):
    config, trained = config_of(), []
    monkeypatch.setattr(
        ShortRunner, "_train", lambda self, settings, folder, short_run: trained.append(short_run) or found
    )
    found = [ShortRunEvaluation(step=4, loss=3.0), ShortRunEvaluation(step=8, loss=None)]
    short_run = ShortRun(start=8, duration=60, num_steps=20)
    for overrides, count in ([], 1), ([], 1), (["run.seed=5"], 2):
        runner = ShortRunner(config, str(QUICKSTART), overrides, search_of(config), tmp_path)
        assert runner(short_run) == found
        assert len(trained) == count


def test_a_short_run_neither_uploads_nor_is_tracked(tmp_path, monkeypatch):
    own = ["checkpoint.upload=file:///somewhere", "checkpoint.upload_keep_last=3", 'monitor.trackers=["wandb"]']
    config, asked = config_of(*own), []
    monkeypatch.setattr(ShortRunner, "_train", lambda self, settings, folder, short_run: asked.append(settings) or [])
    ShortRunner(config, str(QUICKSTART), own, search_of(config), tmp_path)(ShortRun(start=8, duration=60, num_steps=20))
    short = config_of(*own, *(f"{name}={json.dumps(value)}" for name, value in asked[0].items()))
    assert (short.checkpoint.upload, short.checkpoint.upload_keep_last, short.monitor.trackers) == (None, None, [])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("CI"), reason="some short runs, half a minute: CI runs it")
def test_a_real_search_and_its_repetition(tmp_path):
    """The second time it has nothing to run."""
    command = [sys.executable, "launch/tune_warmup.py", "--config", str(QUICKSTART), "--out", str(tmp_path / "search")]
    command += ["--starts", "8,16", "--max-duration", "12", *TINY]
    first, second = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False) for _ in range(2)
    )
    assert first.returncode == 0, first.stdout + first.stderr
    assert '"duration"' in first.stdout
    assert second.stdout == first.stdout
