"""The words of a pipeline schedule: one `Instruction` is one thing that one replica does for one micro-batch.

A schedule is data. Each replica of a stage gets a list of instructions, made by the planner, proven by the checker and
run by one interpreter; nothing else decides what happens when. What a replica does for one micro-batch, in this order:

    first stage    load, send targets, forward, send activation, receive gradient, backward
    middle stage   receive activation, forward, send activation, receive gradient, backward, send gradient
    last stage     receive targets, receive activation, forward, backward, send gradient
    only stage     load, forward, backward

A backward may be split in two (Qi et al. 2023, "Zero bubble pipeline parallelism"): `backward input` makes the gradient
that is sent on, `backward weight` comes any time later and needs nobody.

With virtual stages (Narayanan et al. 2021, section 2.2) a stage has several chunks of layers, and a micro-batch passes
all stages once for each. "First" and "last" then mean the first stage's first chunk and the last stage's last one; in
between, the last stage sends its activations to the first, for the next chunk, and gradients come back the same way.

The targets go straight from the first stage to the last, with the first stage's last chunk: as late as without chunks.
A receive waits for its message; a send puts the message into one of the slots of its ordered pair of replicas and waits
only while all of them hold messages that are not yet read.
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
    chunk: int = 0
    """Of the layers of this stage: which."""

    def __str__(self) -> str:
        chunk = f" chunk {self.chunk}" if self.chunk else ""
        if self.peer is None:
            return f"{self.op.value} {self.micro_batch}{chunk}"
        arrow = "->" if self.op in RECEIVE_OF else "<-"
        return f"{self.op.value} {self.micro_batch}{chunk} {arrow} {self.peer}"

    def reader_stage(self, stage: int, num_stages: int) -> int:
        """The virtual stage that reads what this instruction of a replica of `stage` sends or receives."""
        virtual_stage = self.chunk * num_stages + stage
        if self.op is Op.SEND_TARGETS:
            return virtual_stage + num_stages - 1
        return virtual_stage + {Op.SEND_ACTIVATION: 1, Op.SEND_GRADIENT: -1}.get(self.op, 0)


def instructions_for(
    route: tuple[int, ...],
    micro_batch: int,
    stage: int,
    chunk: int = 0,
    *,
    virtual_stages: int = 1,
    backward: bool = True,
    split: bool = False,
) -> tuple[Instruction, ...]:
    """What the replica of `stage` on this route does for one micro-batch with one chunk, in order (the table above).

    `split`: the backward in its two halves; its message goes out before the second.
    """
    last = len(route) - 1
    is_first, is_last = stage == chunk == 0, stage == last and chunk == virtual_stages - 1
    previous_stage, next_stage = (stage - 1) % len(route), (stage + 1) % len(route)
    steps: list[tuple[Op, int | None]] = []
    steps += [(Op.LOAD, None)] if is_first else []
    steps += [(Op.RECV_TARGETS, 0)] if is_last and last else []
    steps += [] if is_first else [(Op.RECV_ACTIVATION, previous_stage)]
    steps += [(Op.SEND_TARGETS, last)] if stage == 0 and chunk == virtual_stages - 1 and last else []
    steps += [(Op.FORWARD, None)]
    steps += [] if is_last else [(Op.SEND_ACTIVATION, next_stage)]
    if backward:
        steps += [] if is_last else [(Op.RECV_GRADIENT, next_stage)]
        steps += [(Op.BACKWARD_INPUT if split else Op.BACKWARD, None)]
        steps += [] if is_first else [(Op.SEND_GRADIENT, previous_stage)]
        steps += [(Op.BACKWARD_WEIGHT, None)] if split else []
    return tuple(Instruction(op, micro_batch, None if at is None else (at, route[at]), chunk) for op, at in steps)
