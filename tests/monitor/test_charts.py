from __future__ import annotations

import math

import pytest
from matplotlib.image import imread

from parallel3d.monitor.charts import CHANGED, EVALUATED, REFERENCE, draw_loss, smooth


def colours(path) -> set[str]:
    pixels = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    return {"#{:02x}{:02x}{:02x}".format(*pixel) for pixel in set(map(tuple, pixels))}


def test_the_chart_shows_what_it_is_given(tmp_path):
    training = [(step, 8.0 * math.exp(-step / 50)) for step in range(100)] + [(100, math.nan)]
    draw_loss(tmp_path / "plain.png", title="plain", training=training)
    draw_loss(
        tmp_path / "all.png",
        title="all",
        training=training,
        evaluations=[(50, 3.0)],
        membership_changes=[20, 70],
        unigram_entropy=5.0,
    )
    plain, everything = colours(tmp_path / "plain.png"), colours(tmp_path / "all.png")
    extras = {EVALUATED, REFERENCE, CHANGED}
    assert not plain & extras and everything >= extras


def test_smoothing_keeps_a_constant_and_calms_noise():
    assert smooth([2.0] * 50) == pytest.approx([2.0] * 50)
    noise = [(-1.0) ** step for step in range(1000)]
    assert max(map(abs, smooth(noise)[100:-100])) < 0.1


def test_smoothing_does_not_lag():
    line = [float(step) for step in range(1000)]
    assert smooth(line)[200:-200] == pytest.approx(line[200:-200], abs=0.05)
