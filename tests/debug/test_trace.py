"""Traces of some steps: the file, its labels, and nothing where nothing is asked for."""

import json

import torch

from parallel3d.config.schema import ProfileConfig
from parallel3d.debug.trace import NoTrace, make_trace
from parallel3d.pipeline.executor import NO_LABEL
from parallel3d.pipeline.instructions import Instruction, Op

STEPS = [Instruction(Op.FORWARD, 3), Instruction(Op.SEND_ACTIVATION, 3, (1, 0))]
CPU = torch.device("cpu")


def run_steps(trace, steps):
    for step in steps:
        trace.begin_step(step)
        for instruction in STEPS:
            with trace.label(instruction):
                torch.ones(4) + step
    trace.close()


def names_in(path):
    return [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]


def test_the_steps_asked_for_are_recorded(tmp_path):
    trace = make_trace(ProfileConfig(steps=[2, 3]), rank=0, directory=tmp_path, device=CPU)
    run_steps(trace, range(1, 6))
    names = names_in(tmp_path / "rank-0.json")
    assert {"step 2", "step 3", "forward 3", "send activation 3 -> (1, 0)", "aten::add"} <= set(names)
    assert not {"step 1", "step 4"} & set(names)
    assert names.count("forward 3") == 2


def test_a_run_that_ends_within_leaves_what_there_is(tmp_path):
    trace = make_trace(ProfileConfig(steps=[2, 9], ranks=[4]), rank=4, directory=tmp_path, device=CPU)
    run_steps(trace, range(1, 3))
    assert "step 2" in names_in(tmp_path / "rank-4.json")


def test_others_record_nothing(tmp_path):
    for config in (ProfileConfig(), ProfileConfig(steps=[1, 2], ranks=[1])):
        trace = make_trace(config, rank=0, directory=tmp_path, device=CPU)
        assert type(trace) is NoTrace and trace.label(STEPS[0]) is NO_LABEL
        run_steps(trace, range(1, 4))
    assert list(tmp_path.iterdir()) == []
