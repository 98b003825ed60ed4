"""The pictures: exact text, cut with a notice, and a PNG that is one."""

import struct

from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import plan_pipeline
from parallel3d.pipeline.request import PlanRequest
from parallel3d.pipeline.timeline import draw_png, draw_text


def make_plan(replicas, num_micro_batches, forward=1, backward=(1, 1), schedule="1f1b"):
    num_stages = len(replicas)
    costs = StageCosts(
        forward=(forward,) * num_stages,
        backward_input=(backward[0],) * num_stages,
        backward_weight=(backward[1],) * num_stages,
    )
    return plan_pipeline(
        PlanRequest(replicas=replicas, num_micro_batches=num_micro_batches, schedule=schedule, costs=costs)
    )


def test_the_text_shows_every_unit():
    assert draw_text(make_plan(((0,),) * 3, 4)).splitlines() == [
        "stage 0   0  1  2  .  .  .  . 0'  =  3 1'  =  . 2'  =  . 3'  =",
        "stage 1   .  0  1  .  . 0'  =  2 1'  =  3 2'  =  . 3'  =  .  .",
        "stage 2   .  .  0 0'  =  1 1'  =  2 2'  =  3 3'  =  .  .  .  .",
    ]


def test_forwards_and_backwards_are_carried_on():
    split = make_plan(((0,),), 1, forward=2, backward=(1, 3), schedule="zb-h1")
    assert draw_text(split) == "stage 0   0  - 0' 0\"  ~  ~"
    assert draw_text(make_plan(((0,),), 2)) == "stage 0   0 0'  =  1 1'  ="


def test_a_letter_says_which_chunk():
    request = PlanRequest(
        replicas=((0,), (0,)), num_micro_batches=2, schedule="interleaved", virtual_stages=2, costs=StageCosts.equal(4)
    )
    assert draw_text(plan_pipeline(request)).splitlines() == [
        "stage 0   0a  1a  0b  1b   .   . 0b'   =   . 1b'   = 0a'   = 1a'   =",
        "stage 1    .  0a  1a  0b 0b'   =  1b 1b'   = 0a'   = 1a'   =   .   .",
    ]


def test_replicas_are_named_where_there_are_several():
    rows = draw_text(make_plan(((0, 3), (3,)), 2)).splitlines()
    assert [row.split("  ")[0] for row in rows] == ["stage 0 replica 0", "stage 0 replica 3", "stage 1 replica 3"]


def test_fine_costs_are_scaled():
    plain, fine = make_plan(((0,),) * 3, 4), make_plan(((0,),) * 3, 4, forward=700, backward=(700, 700))
    assert draw_text(fine).splitlines() == [*draw_text(plain).splitlines(), "(a column is 700 time units)"]


def test_a_wide_plan_is_cut_with_a_notice():
    plan = make_plan(((0, 1),) * 4, 16)
    whole, cut = draw_text(plan, width=1000).splitlines(), draw_text(plan, width=60, max_rows=5).splitlines()
    assert len(whole) == 8 and len(cut) == 5  # the rows of replica 0 and the notice
    assert all(len(row) <= 60 and full.startswith(row) for row, full in zip(cut[:4], whole[::2]))
    columns_cut = (len(whole[0]) - len(cut[0])) // 4  # a column has two digits, a quote and a space
    left_out = "4 more replicas, which run like these or would not fit"
    assert cut[4] == f"({columns_cut} more columns to the right, {left_out})"


def test_the_picture_is_a_png_that_grows_with_the_plan(tmp_path):
    sizes = []
    for name, plan in (("small.png", make_plan(((0,),) * 2, 4)), ("large.png", make_plan(((0, 1), (0,)) * 3, 16))):
        draw_png(plan, tmp_path / name)
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        sizes.append(struct.unpack(">II", content[16:24]))
    assert sizes[0][0] < sizes[1][0] and sizes[0][1] < sizes[1][1]
