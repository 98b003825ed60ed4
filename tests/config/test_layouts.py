"""Layout strings."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config.layouts import current_layout, default_layouts, parse_layout, parse_layouts
from parallel3d.config.load import load_config, resolve
from parallel3d.errors import UserError
from parallel3d.pipeline.schedules import SCHEDULES

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.json"
ONE_STAGE = {"schedule": "1f1b", "virtual_stages": 1}
GRID = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "stage_replicas": None, "layers_per_stage": None}


def test_parts_in_any_order_and_what_they_leave_out():
    assert parse_layout("dp2.tp4").fields == {**GRID, **ONE_STAGE, "tp_size": 4, "dp_size": 2}
    assert parse_layout("zb-h1.pp2.sp.zero0").fields == {
        **GRID,
        "pp_size": 2,
        "sequence_parallel": True,
        "zero_stage": 0,
        "schedule": "zb-h1",
        "virtual_stages": 1,
    }
    chunks = {"pp_size": 2, "schedule": "interleaved", "virtual_stages": 3}
    assert parse_layout("pp2.v3").fields == parse_layout("v3.interleaved.pp2").fields == GRID | chunks
    assert parse_layout(" pp2.dp2/1 ").fields == {**GRID, "pp_size": 2, "dp_size": None, "stage_replicas": [2, 1]}
    assert [layout.name for layout in parse_layouts("tp2, pp4.1f1b")] == ["tp2", "pp4.1f1b"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("tp2..dp2", "''"),
        ("tp0", "'tp0'"),
        ("tpp2", "'tpp2'"),
        ("tp2.pp2.gpip", "'gpip'"),
        ("tp-2", "'tp-2'"),
        ("dp2/", "'dp2/'"),
        ("tp2.tp4", "twice what parallel.tp_size"),
        ("gpipe.1f1b", "twice what parallel.schedule"),
        ("pp2.v0", "'v0'"),
    ],
)
def test_a_mistake_is_named(text: str, named: str):
    with pytest.raises(UserError, match=named):
        parse_layout(text)


@given(
    tp=st.integers(1, 64),
    replicas=st.lists(st.integers(1, 64), min_size=1, max_size=6),
    schedule=st.sampled_from([None, *SCHEDULES]),
)
def test_every_layout_has_a_string(tp: int, replicas: list[int], schedule: str | None):
    widths = replicas[:1] if len(set(replicas)) == 1 else replicas
    text = ".".join(
        [f"pp{len(replicas)}", "dp" + "/".join(map(str, widths)), f"tp{tp}", *([schedule] if schedule else [])]
    )
    fields = parse_layout(text).fields
    assert (fields["tp_size"], fields["pp_size"]) == (tp, len(replicas))
    assert (fields["stage_replicas"] or [fields["dp_size"]] * len(replicas)) == replicas
    assert fields.get("schedule") == (schedule or ("1f1b" if len(replicas) == 1 else None))


def test_overrides_lead_to_the_layout():
    layout = parse_layout("pp2.dp2/1.gpipe")
    config = resolve(load_config(QUICKSTART, layout.overrides), config_path=QUICKSTART)
    assert config.parallel.stage_replicas == [2, 1] and config.parallel.schedule == "gpipe"
    assert current_layout(config).name == "tp1.pp2.dp2/1" and not current_layout(config).overrides
    assert current_layout(resolve(load_config(QUICKSTART), config_path=QUICKSTART)).name == "tp1.pp2.dp2"


def test_the_one_process_of_a_run_with_virtual_stages_has_none():
    chunks = ["parallel.schedule=interleaved", "parallel.virtual_stages=2"]
    own = load_config(QUICKSTART, chunks)
    one = load_config(QUICKSTART, [*chunks, *parse_layout("tp1").overrides])
    assert (own.parallel.virtual_stages, one.parallel.virtual_stages, one.parallel.schedule) == (2, 1, "1f1b")


def test_usual_layouts_are_the_first_that_fit():
    assert [layout.name for layout in default_layouts(lambda layout: True)] == [
        "tp2.sp",
        "pp2",
        "dp2",
        "tp2.pp2.dp2.sp",
    ]
    odd = [layout.name for layout in default_layouts(lambda layout: not layout.fields.get("sequence_parallel"))]
    assert odd == ["tp2", "pp2", "dp2", "tp2.pp2.dp2"]
    no_tp = [layout.name for layout in default_layouts(lambda layout: layout.fields["tp_size"] == 1)]
    assert no_tp == ["pp2", "dp2", "pp2.dp2"]
