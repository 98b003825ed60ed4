"""What benchmarks/slw.py makes of runs: counts, both readings of a win, and the cost model. No run is trained here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import slw
from parallel3d.config.load import check_config, resolve
from parallel3d.config.schema import Config


def result_of(folder: Path, recipe: str, losses: list[float | None], evaluations: list[float], **changes) -> slw.Result:
    """A run of these training losses, evaluated at equal distances."""
    folder.mkdir()
    share = slw.TOKENS // len(losses)
    lines = [
        {
            "step": step,
            "tokens": step * share,
            "loss": loss,
            "sequence_length": 8 * min(step, 6),
            "step_s": 0.1 + 0.01 * 8 * min(step, 6) + 1e-4 * (8 * min(step, 6)) ** 2,
            "variance_norm": 1.0 + step,
            "variance_max": 2.0,
        }
        for step, loss in enumerate(losses, start=1)
    ]
    every = len(losses) // len(evaluations)
    lines += [{"event": "evaluation", "step": every * n, "loss": loss} for n, loss in enumerate(evaluations, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return slw.read(recipe, 1, folder, diverged=changes.get("diverged", False))


def test_tables_of_two_runs(tmp_path):
    noisy = result_of(tmp_path / "a", "baseline", [5, 4, 5, 3, 3.5, 3.3, 3, None, 3, 2.9, 2.8, 2.7], [4.0, 3.5, 3.2])
    calm = result_of(tmp_path / "b", "slw", [5 - step / 6 for step in range(12)], [3.6, 3.1, 3.0])
    assert (noisy.num_steps, noisy.num_unstable, noisy.max_ratio) == (12, 2, 1.25)
    assert (calm.num_unstable, calm.maximum) == (0, None)  # a constant has no correlation
    assert calm.norm is not None
    stability = slw.stability_table([noisy, calm]).splitlines()
    assert [cell.strip() for cell in stability[2].split("|")[1:6]] == ["baseline", "12", "2", "16.7%", "1.25"]
    quality = slw.quality_table([noisy, calm]).splitlines()
    assert "3.2000" in quality[2] and quality[2].endswith("| 100% |")
    assert "-0.2000" in quality[3] and quality[3].endswith("| 67% |")


def test_a_diverged_run_has_no_final_loss(tmp_path):
    lost = result_of(tmp_path / "a", "baseline", [5, 4, None], [9.0], diverged=True)
    assert lost.final_loss is None
    assert "diverged" in slw.stability_table([lost])
    assert "never" in slw.quality_table([lost])


def test_the_cost_model_finds_what_the_steps_were_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr(slw, "WARMUP_STEPS", 0)
    text = slw.cost_model([result_of(tmp_path / "a", "slw", [3.0] * 8, [3.0])])
    assert "100.0 ms + 10.000 ms L + 100.00 us L^2" in text


@pytest.mark.parametrize("recipe", slw.RECIPES)
def test_every_recipe_is_a_configuration(recipe):
    raw = json.loads(json.dumps(slw.CONFIG))
    for name, value in slw.RECIPES[recipe].items():
        section, field = name.split(".")
        raw.setdefault(section, {})[field] = value
    config = resolve(Config.model_validate(raw), config_path="slw.json")
    check_config(config)
    assert config.run.num_tokens == slw.TOKENS
