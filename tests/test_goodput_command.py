"""`launch/goodput.py` in this process: scenarios and their mistakes, a run's own seconds, the chart, the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel3d.commands import goodput, plan
from parallel3d.commands.completion import complete
from parallel3d.config.load import load_config, resolve
from parallel3d.errors import ConfigError
from parallel3d.goodput.scenario import Scenario, load_scenario, parse_scenario
from parallel3d.goodput.strategies import compare_strategies

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted((ROOT / "configs/goodput").glob("*.json"))
Captured = pytest.CaptureFixture[str]
FAST = ["num_runs=1", "days=3", "failures.multiples=[1, 10]"]


# --- scenarios --------------------------------------------------------------------------------------------------------


def test_the_default_scenario():
    scenario = load_scenario(None)
    assert scenario == Scenario()
    assert scenario.failures_per_hour(64, 10) == pytest.approx(8192 * 1.5e-4)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_scenario(path: Path):
    assert load_scenario(path).name


def test_opts_observed_failures():
    scenario = load_scenario(ROOT / "configs/goodput/opt.json")
    assert scenario.failures_per_hour(124, 1) == pytest.approx(100 / 61 / 24)


MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"days": 0}, "days = 0", "greater than 0"),
    ({"days": "many"}, "days = 'many'", "number"),
    ({"dayz": 3}, "dayz = 3", "Did you mean days?"),
    ({"cluster": {"dp_size": 3}}, "cluster.dp_size = 3", "no such field exists"),
    ({"cluster": {"num_replicas": 64}}, "cluster.num_replicas = 64", "list"),
    ({"cluster": {"num_replicas": []}}, "cluster.num_replicas = []", "at least 1 item"),
    ({"cluster": {"num_replicas": [8, 8]}}, "cluster.num_replicas = [8, 8]", "twice"),
    ({"cluster": {"num_replicas": [10**6]}}, "cluster.num_replicas = [1000000]", "128,000,000 devices"),
    ({"cluster": {"pp_size": 2**200}}, "cluster.pp_size", "at most 2**128"),
    ({"failures": {"multiples": [1, 0]}}, "failures.multiples.1 = 0", "greater than 0"),
    ({"failures": {"multiples": [2, 2]}}, "failures.multiples = [2.0, 2.0]", "twice"),
    ({"failures": {"per_device_hour": 10.0}}, "days = 30.0", "would simulate"),
    ({"failures": {"observed": {"num_failures": 1, "days": 1}}}, "failures.observed.num_devices", "is required"),
    (
        {"failures": {"per_device_hour": 1e-5, "observed": {"num_failures": 1, "num_devices": 9000, "days": 9}}},
        "failures.per_device_hour = 1e-05",
        "is given twice",
    ),
    ({"restarts": {"interval_s": 0}}, "restarts.interval_s = 0", "greater than or equal to 0.001"),
    ({"restarts": 3}, "restarts = 3", "section"),
    ({"recoveries": {"rejoin_s": [-1]}}, "recoveries.rejoin_s.0 = -1", "greater than or equal to 0.001"),
    ({"recoveries": {"pause_s": float("nan")}}, "recoveries.pause_s = nan", "finite"),
]


@pytest.mark.parametrize(
    ("raw", "where", "rule"),
    MISTAKES,
    ids=[f"{number}-{where.partition(' ')[0]}" for number, (_, where, _) in enumerate(MISTAKES)],
)
def test_one_clear_error_for_a_mistake(raw: dict[str, Any], where: str, rule: str):
    with pytest.raises(ConfigError) as caught:
        parse_scenario(raw)
    assert len(caught.value.problems) == 1
    assert where in str(caught.value) and rule in str(caught.value)


def test_all_mistakes_at_once(tmp_path: Path):
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps({"days": -1, "restarts": {"save_s": "x"}, "seeds": 3}))
    with pytest.raises(ConfigError) as caught:
        load_scenario(path, ["num_runs=0"])
    assert {problem.field for problem in caught.value.problems} == {"days", "restarts.save_s", "seeds", "num_runs"}


@pytest.mark.parametrize("text", ["", "[]", '{"days": 1, "days": 2}', "\xff"])
def test_a_file_that_is_not_a_scenario(text: str, tmp_path: Path, capsys: Captured):
    path = tmp_path / "scenario.json"
    path.write_text(text, encoding="latin-1")
    assert goodput.main(["--scenario", str(path)]) == 2
    assert "file = " in capsys.readouterr().err


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_table(capsys: Captured):
    assert goodput.main([*FAST, "cluster.num_replicas=[8, 16]", "restarts.human_s=60"]) == 0
    text = capsys.readouterr().out
    assert "1,024 devices: % of the fault-free throughput" in text and "2,048 devices" in text
    rows = ["restart by hand", "restart", "restart, best interval", "rank drop", "replica drop, back after 1200 s"]
    for name in [*rows, "reroute", "reroute, back after 40 s", "reroute, back after 1200 s"]:
        assert sum(line.startswith(f"{name} ") for line in text.splitlines()) >= 2, name


def test_json_and_chart(tmp_path: Path, capsys: Captured):
    assert goodput.main([*FAST, "--json", "--chart", str(tmp_path / "chart.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["multiple"] for row in found["rows"]] == [1, 10]
    assert 0 < found["rows"][1]["estimates"]["restart"]["goodput"] < 1
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["missing/chart.png", "chart.no"])
def test_a_chart_that_cannot_be_written(name: str, tmp_path: Path, capsys: Captured):
    assert goodput.main([*FAST, "--chart", str(tmp_path / name)]) == 2
    assert "can't be written" in capsys.readouterr().err


def test_the_papers_numbers(capsys: Captured):
    assert goodput.main(["--paper"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (wrong,) = [line for line in lines if "the paper's words" in line]
    assert "99.63" in wrong and "99.85" in wrong and " NO " in wrong and "z +5." in wrong
    assert any("75.41" in line for line in lines) and any("79.21 unrounded" in line for line in lines)


# --- a run ------------------------------------------------------------------------------------------------------------


def write_run(folder: Path, *overrides: str) -> Path:
    """A run's folder with a configuration and metrics of two changes of membership."""
    config = resolve(
        load_config(ROOT / "configs/quickstart.json", ["checkpoint.every=50", *overrides]), config_path="run.json"
    )
    (folder / "config.json").write_text(config.model_dump_json())
    times = {"agree_s": 0.01, "repair_s": 0.02, "regroup_s": 0.03}
    lines = [
        *({"step": step, "loss": 5.0, "step_s": 0.2} for step in range(1, 4)),
        {"event": "membership", "step": 2, "who": [{"rank": 1}], "joined": [], "detect_s": 0.04, **times},
        {"event": "membership", "step": 3, "who": [], "joined": [{"rank": 4}], "detect_s": None, **times},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "config.json"


SAVES_AND_RESTART = [
    *({"step": step, "step_s": 0.2} for step in range(4, 51)),
    {"step": 51, "step_s": 0.3},  # it is written during this step
    {"event": "notice", "text": "saved step 50: runs/a/step-00000050, 1.0 MB", "snapshot_s": 0.05, "time": 20.0},
    *({"step": step, "step_s": 0.2} for step in range(52, 60)),
    {"event": "failure", "text": "worker lost", "time": 30.0},
    {"event": "ended", "exit_code": 74, "attempt_start_step": 0, "last_step": 59, "text": "", "time": 31.0},
    {"event": "restart", "step": 50, "lost_steps": 9, "skips_data": False, "time": 32.0},
    {"step": 51, "step_s": 0.2, "time": 42.2},
]
"""Lines of a run with a save that costs 0.15 s and a restart that takes 12 s."""


def scenario_of(path: Path, *overrides: str) -> Scenario:
    config = load_config(path)
    return parse_scenario(
        goodput.scenario_of_run(config, path, goodput.measured_seconds(config, path)), list(overrides)
    )


def add_lines(folder: Path, lines: list[dict[str, Any]]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_what_a_runs_own_saves_and_restarts_cost(tmp_path: Path):
    """All strategies save at the run's interval and pay the same for it: what they don't share is what they lose."""
    path = write_run(tmp_path)
    add_lines(tmp_path, SAVES_AND_RESTART)
    scenario = scenario_of(path, "failures.per_device_hour=1e-9")
    assert scenario.restarts.save_s == pytest.approx(0.15)
    assert scenario.restarts.restart_s == pytest.approx(12.0)
    assert scenario.recoveries.save_interval_s == scenario.restarts.interval_s == pytest.approx(10.0)
    (row,) = compare_strategies(scenario)
    assert row.estimates["restart"].num_restarts == 0
    for name in ("restart", "rank drop", "replica drop, back after 1200 s", "reroute", "reroute, back after 40 s"):
        assert row.estimates[name].goodput == pytest.approx(10 / 10.15, abs=1e-5), name


def test_measured_and_assumed_numbers_are_told_apart(tmp_path: Path, capsys: Captured):
    path = write_run(tmp_path)
    add_lines(tmp_path, SAVES_AND_RESTART)
    assert goodput.main(["--config", str(path), "recoveries.step_s=0.5", "recoveries.repair_interval_s=60"]) == 0
    lines = capsys.readouterr().out.splitlines()
    measured = [line.removeprefix("measured: ") for line in lines if line.startswith("measured: ")]
    assert measured == [
        "restarts.interval_s 10 s (50 steps of the configuration)",
        "recoveries.save_interval_s 10 s (50 steps of the configuration)",
        "restarts.save_s 0.15 s (1 save: 0.05 s between two steps, 0.1 s by slower steps while it is written)",
        "restarts.restart_s 12 s (1 restart)",
        "recoveries.pause_s 0.1 s (1 loss)",
        "recoveries.join_pause_s 0.06 s (1 return)",
    ]
    assert lines[-1] == (
        "assumed: failures.per_device_hour 1.5e-05, recoveries.replace_s 1,200, recoveries.rejoin_s 40 and 1,200"
    )


def test_a_run_without_saves_says_what_is_assumed_for_them(tmp_path: Path, capsys: Captured):
    path = write_run(tmp_path)
    assert goodput.main(["--config", str(path), "failures.per_device_hour=0.01", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"restarts.save_s", "restarts.restart_s"} <= set(found["assumed"])
    assert "failures.per_device_hour" not in found["assumed"] and "recoveries.step_s" not in found["assumed"]
    assert set(found["measured"]).isdisjoint(found["assumed"]) and "recoveries.step_s" in found["measured"]


def test_a_runs_own_seconds(tmp_path: Path):
    path = write_run(tmp_path)
    scenario = scenario_of(path, "days=5")
    assert scenario.cluster.model_dump() == {"tp_size": 1, "pp_size": 2, "num_replicas": [2]}
    assert scenario.restarts.interval_s == pytest.approx(50 * 0.2)
    assert scenario.restarts.save_s == 300 and scenario.restarts.restart_s == 1200  # it has neither saved nor restarted
    recoveries = scenario.recoveries
    assert recoveries.step_s == pytest.approx(0.2)
    assert recoveries.pause_s == pytest.approx(0.1) and recoveries.join_pause_s == pytest.approx(0.06)


def test_what_a_run_loses(tmp_path: Path, capsys: Captured):
    path = write_run(tmp_path)
    assert goodput.main(["--config", str(path), "failures.per_device_hour=0.01", "days=10"]) == 0
    text = capsys.readouterr().out
    assert "planned throughput by lost replicas of one stage: 1: " in text
    assert "With a failure every 25 hours on 4 devices you lose" in text
    assert goodput.main(["--config", str(path), "cluster.num_replicas=[3]", "days=10"]) == 0
    assert "planned throughput" not in capsys.readouterr().out  # it was planned for another layout


def test_planned_speeds(tmp_path: Path):
    """Losses fill the idle time of a pipeline: more is kept than the share of replicas that are left."""
    layout = ["parallel.pp_size=4", "parallel.dp_size=4", "batch.global_batch_size=32", "batch.micro_batch_size=1"]
    path = write_run(tmp_path, *layout, "model.num_hidden_layers=8")
    speeds = goodput.planned_speeds(load_config(path))
    assert len(speeds) == 4 and speeds[0] == 1.0
    assert list(speeds) == sorted(speeds, reverse=True)
    assert speeds[1] > 3 / 4 and speeds[2] > 2 / 4 and speeds[3] > 1 / 4


def test_uneven_stages_are_refused(tmp_path: Path, capsys: Captured):
    path = write_run(tmp_path, "parallel.dp_size=null", "parallel.stage_replicas=[2, 1]")
    assert goodput.main(["--config", str(path)]) == 2
    assert "equally many of each stage" in capsys.readouterr().err


def test_damaged_metrics(tmp_path: Path, capsys: Captured):
    path = write_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('not JSON\n{"step": 1}\n')
    assert goodput.main(["--config", str(path)]) == 2
    assert "metrics.jsonl can't be read" in capsys.readouterr().err


def test_config_takes_what_plan_takes(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch):
    """A file, a shipped name, or a Hugging Face folder; anything else is named with what to give instead."""
    monkeypatch.setenv("HOME", str(tmp_path))  # the configuration for the folder is made below it
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **layers}))
    for config, layout in (("quickstart", "2 stages"), ("llama", "1 stage")):
        assert plan.main(["--config", config]) == 0
        capsys.readouterr()
        assert goodput.main(["--config", config, *FAST, "failures.multiples=[1]"]) == 0
        assert f"{layout}, replicas of 1 device" in capsys.readouterr().out
    assert goodput.main(["--config", "quickstrat"]) == 2
    assert "Did you mean quickstart" in capsys.readouterr().err


def test_config_completes_as_in_other_commands():
    assert complete(["goodput", "--config", "quickstart_l"]) == ["quickstart_lion"]
