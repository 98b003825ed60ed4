"""The worked example of docs/extending.md: a schedule in one file, which trains like one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallel3d.config.layouts import parse_layout
from parallel3d.errors import ConfigError
from parallel3d.pipeline.check import check_plan
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import plan_pipeline
from parallel3d.pipeline.request import PlanRequest
from parallel3d.pipeline.schedules import SCHEDULES
from tests.extending.eager_1f1b import SCHEDULE
from tests.support import tiny_runs

FILE = Path(__file__).with_name("eager_1f1b.py")
DOCS = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the schedule, as its file in parallel3d/pipeline/schedules/ would."""
    monkeypatch.setitem(SCHEDULES, SCHEDULE.name, SCHEDULE)


def test_the_docs_show_this_file() -> None:
    assert f"```python\n{FILE.read_text()}```\n" in DOCS.read_text()


@pytest.mark.usefixtures("registered")
def test_its_plans_are_proven() -> None:
    request = PlanRequest(replicas=((0,),) * 3, num_micro_batches=8, schedule="eager-1f1b", costs=StageCosts.equal(3))
    report = check_plan(plan_pipeline(request), slots=3)
    assert report.makespan == (8 + 2) * 3  # without a time for messages it is 1F1B's
    assert [report.peak_in_flight[stage, 0] for stage in range(3)] == [5, 3, 1]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("replicas", [[2, 2], [1, 2]])
def test_it_trains_like_one_process(replicas: list[int]) -> None:
    precision = dict(policy="fp32", sums="exact")
    parallel = dict(pp_size=2, stage_replicas=replicas, schedule="eager-1f1b")
    ours = tiny_runs.train_in_threads(parallel=parallel, precision=precision)
    one = tiny_runs.train_in_threads(precision=precision)
    assert ours.entries == one.entries
    assert all(torch.equal(ours.weights[name], weight) for name, weight in one.weights.items())


@pytest.mark.usefixtures("registered")
def test_layouts_and_messages_know_it() -> None:
    assert parse_layout("pp2.eager-1f1b").fields["schedule"] == "eager-1f1b"
    with pytest.raises(ConfigError, match="parallel.schedule eager-1f1b needs 1"):
        tiny_runs.make_config(parallel=dict(pp_size=2, virtual_stages=2, schedule="eager-1f1b"))


def test_before_it_is_added_it_is_unknown() -> None:
    with pytest.raises(ValueError, match="should be '1f1b', 'interleaved', 'gpipe', 'zb-h1' or 'zb-v'"):
        tiny_runs.make_config(parallel=dict(pp_size=2, schedule="eager-1f1b"))
