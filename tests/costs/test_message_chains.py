"""The messages for which a schedule waits, next to a run of its instructions in which each message takes a time."""

import pytest

from parallel3d.costs.pipeline_facts import pipeline_facts
from parallel3d.pipeline.instructions import Op
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import plan_pipeline
from parallel3d.pipeline.request import PlanRequest

MESSAGE = 2**-10
"""Of the unit in which passes are counted: exact in binary."""


def plan_of(schedule, stages, chunks, count):
    return plan_pipeline(
        PlanRequest(
            replicas=((0,),) * stages,
            num_micro_batches=count,
            schedule=schedule,
            costs=StageCosts.equal(stages * chunks),
            virtual_stages=chunks,
        )
    )


def run_time(plan, message):
    """The end of the plan's instructions, each in its stage's order and `message` after what another stage sends."""
    layout = plan.request.layout
    free, ends = [0.0] * len(layout.virtual_stages), {}
    for event in plan.events:
        stage = event.replica[0]
        place, start = layout.virtual_stages[stage][event.chunk], free[stage]
        source = place - 1 if event.op is Op.FORWARD else place + 1
        if event.op is not Op.BACKWARD_WEIGHT and 0 <= source < len(layout.stages):
            arrival = ends[event.op, event.micro_batch, source] + message * (layout.stages[source] != stage)
            start = max(start, arrival)
        free[stage] = ends[event.op, event.micro_batch, place] = start + event.end - event.start
    return max(free)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)]
)
def test_a_step_takes_longer_by_the_messages_of_its_chain(schedule, chunks, stages):
    """With fewer micro-batches than are simulated, as many, and more of which the rest follows."""
    for count in (stages, 2 * stages, 5 * stages, 9 * stages, 9 * stages + (schedule != "interleaved")):
        plan = plan_of(schedule, stages, chunks, count)
        assert run_time(plan, 0.0) == plan.makespan
        waited = (run_time(plan, MESSAGE) - plan.makespan) / MESSAGE
        assert pipeline_facts(schedule, stages, chunks, count).chain_length == waited, count


def test_known_chains():
    """GPipe waits while its pipeline fills and drains; 1f1b once more for each round, as its stages hold no more
    micro-batches than cover the passes of a round trip."""
    for stages, count in ((2, 8), (4, 16), (4, 64), (8, 64)):
        ends = 2 * (stages - 1)
        assert pipeline_facts("gpipe", stages, 1, count).chain_length == ends
        assert pipeline_facts("1f1b", stages, 1, count).chain_length == ends * count / stages + 2 * (stages - 2)
    assert pipeline_facts("1f1b", 1, 1, 8).chain_length == 0
