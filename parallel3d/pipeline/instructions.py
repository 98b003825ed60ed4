"""The words of a pipeline schedule: one `Instruction` is one thing that one replica does for one micro-batch.

A schedule is data. Each replica of a stage gets a list of instructions, made by the planner, proven by the checker and
run by one interpreter; nothing else decides what happens when. What a replica does for one micro-batch, in this order:

    first stage    load, send targets, forward, send activation, receive gradient, backward
    middle stage   receive activation, forward, send activation, receive gradient, backward, send gradient
    last stage     receive targets, receive activation, forward, backward, send gradient
    only stage     load, forward, backward

A backward may be split in two (Qi et al. 2023, "Zero bubble pipeline parallelism"): `backward input` makes the gradient
that is sent on, `backward weight` comes any time later and needs nobody.

The targets go straight from the first stage to the last. A receive waits for its message; a send puts the message into
one of the slots of its ordered pair of replicas and waits only while all of them hold messages that are not yet read.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

ReplicaId = tuple[int, int]
"""(stage, id of the replica within its stage)."""


class Op(Enum):
    """What an instruction does."""

    LOAD = "load"
    SEND_TARGETS = "send targets"
    RECV_TARGETS = "receive targets"
    RECV_ACTIVATION = "receive activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send activation"
    RECV_GRADIENT = "receive gradient"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward input"
    BACKWARD_WEIGHT = "backward weight"
    SEND_GRADIENT = "send gradient"


RECEIVE_OF = {
    Op.SEND_TARGETS: Op.RECV_TARGETS,
    Op.SEND_ACTIVATION: Op.RECV_ACTIVATION,
    Op.SEND_GRADIENT: Op.RECV_GRADIENT,
}
"""The receive that takes what a send puts on its way."""


class Instruction(NamedTuple):
    """One step of a replica's list; `peer` is the other end of a send or a receive, else None."""

    op: Op
    micro_batch: int
    peer: ReplicaId | None = None

    def __str__(self) -> str:
        if self.peer is None:
            return f"{self.op.value} {self.micro_batch}"
        arrow = "->" if self.op in RECEIVE_OF else "<-"
        return f"{self.op.value} {self.micro_batch} {arrow} {self.peer}"


def instructions_for(
    route: tuple[int, ...], micro_batch: int, stage: int, *, backward: bool = True, split: bool = False
) -> tuple[Instruction, ...]:
    """What the replica of `stage` on this route does for one micro-batch, in order (the table above).

    `split`: the backward in its two halves; its message goes out before the second.
    """
    last = len(route) - 1
    steps: list[tuple[Op, int | None]] = []
    if stage == 0:
        steps += [(Op.LOAD, None)] + ([(Op.SEND_TARGETS, last)] if last else [])
    else:
        steps += [(Op.RECV_TARGETS, 0)] if stage == last else []
        steps += [(Op.RECV_ACTIVATION, stage - 1)]
    steps += [(Op.FORWARD, None)]
    steps += [(Op.SEND_ACTIVATION, stage + 1)] if stage < last else []
    if backward:
        steps += [(Op.RECV_GRADIENT, stage + 1)] if stage < last else []
        steps += [(Op.BACKWARD_INPUT if split else Op.BACKWARD, None)]
        steps += [(Op.SEND_GRADIENT, stage - 1)] if stage else []
        steps += [(Op.BACKWARD_WEIGHT, None)] if split else []
    return tuple(Instruction(op, micro_batch, None if at is None else (at, route[at])) for op, at in steps)
