"""The planned pipeline on the page is the plan that training executes."""

import re
from xml.etree import ElementTree

import pytest

from parallel3d.config.schema import Config
from parallel3d.report_page.html_page import render_page
from parallel3d.report_page.page_data import make_page
from parallel3d.report_page.timeline_chart import MAX_WIDTH, draw_timeline, plan_timeline
from tests.report_page.test_page_data import run_files

MODEL = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=8, num_attention_heads=2)


def config(*, micro=8, **parallel):
    batch = {"micro_batch_size": 1, "num_micro_batches": micro, "sequence_length": 16}
    others = {"optimizer": {"learning_rate": 1e-3}, "run": {"num_steps": 1}}
    return Config.model_validate({"model": MODEL, "parallel": parallel, "batch": batch, **others})


def boxes(plan):
    """The class and the area in pixels of each path of boxes."""
    root = ElementTree.fromstring(draw_timeline(plan, "x"))
    return root, {each.get("class"): each.get("d").count("M") for each in root.iter("path")}


def test_replicas_that_run_alike_are_one_row():
    plan = plan_timeline(config(pp_size=2, dp_size=2))
    root, counts = boxes(plan)
    assert counts == {"idle": 2, "box f": 8, "box b": 8} and plan.bubble == pytest.approx(0.2)
    texts = [each.text for each in root.iter("text")]
    assert texts[:2] == ["stage 0", "stage 1"] and sorted(texts[2:]) == sorted(["0", "1", "2", "3"] * 4)
    assert "idle share: stage 0 20.0%, stage 1 20.0%" in root.findtext("desc")


def test_stages_of_unequal_width_have_a_row_for_each_replica():
    plan = plan_timeline(config(pp_size=2, stage_replicas=[2, 1]))
    root, counts = boxes(plan)
    assert counts["idle"] == 3 and counts["box f"] == 16
    assert [each.text for each in root.iter("text")][:3] == ["stage 0.0", "stage 0.1", "stage 1.0"]


def test_the_picture_is_bounded():
    plan = plan_timeline(config(pp_size=8, micro=150))
    svg = draw_timeline(plan, "x")
    assert float(re.search(r'width="(\d+)"', svg)[1]) <= MAX_WIDTH + 70 and len(svg) < 200_000
    assert plan_timeline(config(pp_size=8, micro=400)) is None
    assert plan_timeline(config(pp_size=1, dp_size=2)) is None


def test_the_page_has_it_with_both_bubbles():
    plan = plan_timeline(config(pp_size=2, schedule="zb-h1"))
    summary = {"bubble": 0.25, "planned_bubble": plan.bubble}
    page = render_page(make_page([run_files(plan=plan, summary=summary)]), now_s=0.0)
    assert f"bubble measured 25.0%, bubble planned {plan.bubble:.1%}" in page and 'class="box w"' in page
    assert "backward, weights" in page
    assert "Planned pipeline" not in render_page(make_page([run_files(summary=summary)]), now_s=0.0)
