from __future__ import annotations

import math

import pytest
from matplotlib.image import imread

from parallel3d.monitor.charts import (
    CHANGED,
    CLIPPED,
    EVALUATED,
    NUM_BANDS,
    REFERENCE,
    SECOND,
    bands,
    draw_all,
    draw_course,
    draw_instability,
    draw_loss,
    smooth,
)
from parallel3d.monitor.history import MetricsLog


def colours(path) -> set[str]:
    pixels = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    return {"#{:02x}{:02x}{:02x}".format(*pixel) for pixel in set(map(tuple, pixels))}


def history_of(num_steps=100, events=(), **figures) -> MetricsLog:
    lines = [{"step": step, "loss": 8.0 * math.exp(-step / 50), **figures} for step in range(num_steps)]
    return MetricsLog.of([*lines, {"step": num_steps, "loss": None, **figures}, *events])


EVENTS = (
    {"event": "evaluation", "step": 50, "loss": 3.0},
    {"event": "evaluation", "step": 100, "loss": 2.0},
    {"event": "membership", "step": 20},
    {"event": "membership", "step": 70},
)


def test_the_loss_shows_what_it_is_given(tmp_path):
    draw_loss(tmp_path / "plain.png", title="plain", history=history_of())
    draw_loss(tmp_path / "all.png", title="all", history=history_of(events=EVENTS), unigram_entropy=5.0)
    plain, everything = colours(tmp_path / "plain.png"), colours(tmp_path / "all.png")
    extras = {EVALUATED, REFERENCE, CHANGED}
    assert not plain & extras and everything >= extras


def test_the_course_has_a_panel_for_what_there_is(tmp_path):
    draw_course(tmp_path / "plain.png", title="plain", history=history_of())
    figures = dict(lr=0.1, grad_norm=2.0, variance_norm=3.0, variance_max=0.1, param_norm=9.0, sequence_length=8)
    draw_course(tmp_path / "all.png", title="all", history=history_of(**figures), max_grad_norm=1.0)
    plain, everything = imread(tmp_path / "plain.png"), imread(tmp_path / "all.png")
    assert everything.shape[0] > 2 * plain.shape[0]
    assert CLIPPED in colours(tmp_path / "all.png") and CLIPPED not in colours(tmp_path / "plain.png")


def test_the_sequence_length_has_a_panel_where_it_changes(tmp_path):
    lines = [{"step": step, "loss": 3.0, "sequence_length": 8} for step in range(10)]
    draw_course(tmp_path / "one.png", title="", history=MetricsLog.of(lines))
    draw_course(
        tmp_path / "two.png", title="", history=MetricsLog.of([*lines, {**lines[0], "step": 10, "sequence_length": 16}])
    )
    assert imread(tmp_path / "two.png").shape[0] > imread(tmp_path / "one.png").shape[0]


def test_the_widths_of_the_stages_have_a_panel_where_they_change(tmp_path):
    change = {"event": "membership", "step": 20, "widths_before": [3, 3], "widths": [3, 2]}
    back = {**change, "step": 40, "widths_before": [3, 2], "widths": [3, 3]}
    history = history_of(events=(change, back))
    assert history.widths == [(0, [3, 3]), (20, [3, 2]), (40, [3, 3])]
    draw_course(tmp_path / "changed.png", title="", history=history)
    draw_course(tmp_path / "plain.png", title="", history=history_of())
    assert imread(tmp_path / "changed.png").shape[0] > imread(tmp_path / "plain.png").shape[0]
    assert history_of(events=EVENTS).widths == []  # of a run before there were widths


def test_infinite_norms_are_drawn_at_the_edge(tmp_path):
    lines = [{"step": step, "loss": 3.0, "grad_norm": "inf" if step == 5 else 1.0} for step in range(30)]
    draw_course(tmp_path / "a.png", title="", history=MetricsLog.of(lines), max_grad_norm=1.0)
    assert CLIPPED in colours(tmp_path / "a.png")


def test_all_in_one_picture(tmp_path):
    draw_instability(tmp_path / "a.png", title="a", history=history_of(variance_norm=3.0, variance_max=0.0))
    found = colours(tmp_path / "a.png")
    assert SECOND in found and EVALUATED not in found  # a line that is zero has no share of its maximum


def test_a_run_of_one_step_has_no_charts(tmp_path):
    one = MetricsLog.of([{"step": 1, "loss": 3.0}])
    assert draw_all(tmp_path, one, title="", config={}, entropy=None) == [] and not list(tmp_path.iterdir())


def test_bands_hold_all_values():
    points = [(float(step), math.sin(step)) for step in range(1, 1234)]
    middles, lows, highs = bands(points)
    assert 0.9 * NUM_BANDS <= len(middles) <= NUM_BANDS and middles == sorted(middles)
    assert (middles[0], middles[-1]) == (1.0, 1233.0)
    assert min(lows) == min(value for _, value in points) and max(highs) == max(value for _, value in points)


def test_smoothing_keeps_a_constant_and_calms_noise():
    assert smooth([2.0] * 50) == pytest.approx([2.0] * 50)
    noise = [(-1.0) ** step for step in range(1000)]
    assert max(map(abs, smooth(noise)[100:-100])) < 0.1


def test_smoothing_does_not_lag():
    line = [float(step) for step in range(1000)]
    assert smooth(line)[200:-200] == pytest.approx(line[200:-200], abs=0.05)
