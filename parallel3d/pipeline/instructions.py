"""The instructions of a pipeline schedule: one `Instruction` is one thing that one replica does for one micro-batch.

A schedule is data. Each replica of a stage gets a list of instructions, made by the planner, proven by the checker and
run by one interpreter; nothing else decides what happens when. What a replica does for one micro-batch, in this order:

    first stage    load, send targets, forward, send activation, receive gradient, backward
    middle stage   receive activation, forward, send activation, receive gradient, backward, send gradient
    last stage     receive targets, receive activation, forward, backward, send gradient
    only stage     load, forward, backward

A backward may be split in two (Qi et al. 2023, "Zero bubble pipeline parallelism"): `backward input` makes the gradient
that is sent on, `backward weight` comes any time later and needs no message.

With virtual stages (`chunk_layout.py`) a stage has several chunks of layers, and a micro-batch passes them in the order
of the layers. "First" and "last" then mean the first virtual stage and the last one. Where two virtual stages in a row
stand on one stage, the replica keeps the activation (`keep activation`) and the gradient (`keep gradient`) that it
would otherwise send.

The targets go straight from the first virtual stage's replica to the last one's, with the sender's last chunk: as late
as without chunks. They stay where they are if both are the same.
A receive waits for its message; a send puts the message into one of the slots of its ordered pair of replicas and waits
only while all of them hold messages that are not yet read.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from parallel3d.pipeline.chunk_layout import ChunkLayout

ReplicaId = tuple[int, int]
"""(stage, id of the replica within its stage)."""


class Op(Enum):
    """The kinds of instructions."""

    LOAD = "load"
    SEND_TARGETS = "send targets"
    RECV_TARGETS = "receive targets"
    RECV_ACTIVATION = "receive activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send activation"
    KEEP_ACTIVATION = "keep activation"
    RECV_GRADIENT = "receive gradient"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward input"
    BACKWARD_WEIGHT = "backward weight"
    SEND_GRADIENT = "send gradient"
    KEEP_GRADIENT = "keep gradient"


RECEIVE_OF = {
    Op.SEND_TARGETS: Op.RECV_TARGETS,
    Op.SEND_ACTIVATION: Op.RECV_ACTIVATION,
    Op.SEND_GRADIENT: Op.RECV_GRADIENT,
}
"""The receive that takes what a send puts on its way."""

_READER_OFFSET = {Op.SEND_ACTIVATION: 1, Op.SEND_GRADIENT: -1}


class Instruction(NamedTuple):
    """One step of a replica's list; `peer` is the other end of a send or a receive, else None."""

    op: Op
    micro_batch: int
    peer: ReplicaId | None = None
    chunk: int = 0
    """The chunk of this stage's layers."""

    def __str__(self) -> str:
        chunk = f" chunk {self.chunk}" if self.chunk else ""
        if self.peer is None:
            return f"{self.op.value} {self.micro_batch}{chunk}"
        arrow = "->" if self.op in RECEIVE_OF else "<-"
        return f"{self.op.value} {self.micro_batch}{chunk} {arrow} {self.peer}"

    def reader_stage(self, stage: int, layout: ChunkLayout) -> int:
        """The virtual stage that reads what this instruction of a replica of `stage` sends or receives."""
        if self.op is Op.SEND_TARGETS:
            return layout.last
        return layout.virtual_stages[stage][self.chunk] + _READER_OFFSET.get(self.op, 0)


def instructions_for(
    route: tuple[int, ...],
    micro_batch: int,
    stage: int,
    chunk: int = 0,
    *,
    layout: ChunkLayout | None = None,
    backward: bool = True,
    split: bool = False,
) -> tuple[Instruction, ...]:
    """The instructions of the replica of `stage` on this route for one micro-batch and chunk, in order (table above).

    `layout` None: one chunk a stage. `split`: the backward in its two halves; its message goes out before the second.
    """
    layout = layout or ChunkLayout.round_robin(len(route))
    virtual_stage = layout.virtual_stages[stage][chunk]
    is_first, is_last = virtual_stage == 0, virtual_stage == layout.last
    targets_travel = layout.first_stage != layout.last_stage
    previous_stage = None if is_first else layout.stages[virtual_stage - 1]
    next_stage = None if is_last else layout.stages[virtual_stage + 1]
    steps: list[tuple[Op, int | None]] = []
    if is_first:
        steps.append((Op.LOAD, None))
    if is_last and targets_travel:
        steps.append((Op.RECV_TARGETS, layout.first_stage))
    if previous_stage not in (None, stage):
        steps.append((Op.RECV_ACTIVATION, previous_stage))
    if targets_travel and stage == layout.first_stage and virtual_stage == layout.virtual_stages[stage][-1]:
        steps.append((Op.SEND_TARGETS, layout.last_stage))
    steps.append((Op.FORWARD, None))
    if next_stage is not None:
        steps.append((Op.KEEP_ACTIVATION, None) if next_stage == stage else (Op.SEND_ACTIVATION, next_stage))
    if backward:
        if next_stage not in (None, stage):
            steps.append((Op.RECV_GRADIENT, next_stage))
        steps.append((Op.BACKWARD_INPUT if split else Op.BACKWARD, None))
        if previous_stage is not None:
            steps.append((Op.KEEP_GRADIENT, None) if previous_stage == stage else (Op.SEND_GRADIENT, previous_stage))
        if split:
            steps.append((Op.BACKWARD_WEIGHT, None))
    return tuple(Instruction(op, micro_batch, None if at is None else (at, route[at]), chunk) for op, at in steps)
