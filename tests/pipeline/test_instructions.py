"""The words of a schedule, and what a replica does for one micro-batch."""

import pytest

from parallel3d.pipeline.instructions import Instruction, Op, instructions_for


def test_an_instruction_reads_as_a_sentence():
    assert str(Instruction(Op.FORWARD, 3)) == "forward 3"
    assert str(Instruction(Op.SEND_ACTIVATION, 3, (1, 0))) == "send activation 3 -> (1, 0)"
    assert str(Instruction(Op.RECV_TARGETS, 2, (0, 4))) == "receive targets 2 <- (0, 4)"


@pytest.mark.parametrize(
    ("route", "stage", "expected"),
    [
        ((5,), 0, "load 7, forward 7, backward 7"),
        (
            (5, 6, 8),
            0,
            "load 7, send targets 7 -> (2, 8), forward 7, send activation 7 -> (1, 6), "
            "receive gradient 7 <- (1, 6), backward 7",
        ),
        (
            (5, 6, 8),
            1,
            "receive activation 7 <- (0, 5), forward 7, send activation 7 -> (2, 8), "
            "receive gradient 7 <- (2, 8), backward 7, send gradient 7 -> (0, 5)",
        ),
        (
            (5, 6, 8),
            2,
            "receive targets 7 <- (0, 5), receive activation 7 <- (1, 6), forward 7, backward 7, "
            "send gradient 7 -> (1, 6)",
        ),
    ],
)
def test_steps_of_a_stage(route, stage, expected):
    assert ", ".join(map(str, instructions_for(route, 7, stage, backward=True))) == expected


def test_a_split_backward_sends_before_its_second_half():
    steps = instructions_for((5, 6), 7, 1, split=True)
    assert ", ".join(map(str, steps[2:])) == (
        "forward 7, backward input 7, send gradient 7 -> (0, 5), backward weight 7"
    )
    assert [step.op for step in instructions_for((5,), 7, 0, split=True)][-2:] == [
        Op.BACKWARD_INPUT,
        Op.BACKWARD_WEIGHT,
    ]


def test_evaluation_has_no_backward():
    ops = [step.op for stage in range(3) for step in instructions_for((0, 0, 0), 0, stage, backward=False)]
    assert ops.count(Op.FORWARD) == 3
    assert not {Op.BACKWARD, Op.SEND_GRADIENT, Op.RECV_GRADIENT} & set(ops)
