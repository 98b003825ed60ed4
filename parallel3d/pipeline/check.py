"""Proves a plan before it runs: the right steps in order, matching messages, an end, and the memory it takes.

1. *Steps*: each micro-batch passes exactly one replica of each stage, whose steps for it with each chunk are exactly
   those of `instructions_for`, in that order. So every forward comes after its receive, every backward after its
   forward, every send after the compute that makes the value; nothing is repeated or left out.
2. *Pairs*: on each ordered pair of replicas the messages are received in the order sent, each exactly once. Some
   transports have no tags, so only their order distinguishes two messages.
3. *End*: the lists are run with the given number of slots. A replica's next step never depends on timing, so if one
   run ends every run ends, and if one gets stuck all do.
4. *Memory*: in that run, timed with the plan's costs, the peak of stashed + unsent + unused bytes of each replica. A
   message in a slot counts at both of its ends, since its transfer may have reached any point. One that was read early
   counts at its reader until it is used, as does an activation or gradient that a replica keeps for its next chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product, zip_longest

from parallel3d.errors import ScheduleError
from parallel3d.pipeline.chunk_layout import ChunkLayout
from parallel3d.pipeline.instructions import RECEIVE_OF, Instruction, Op, ReplicaId, instructions_for
from parallel3d.pipeline.planner import Plan, costs_by_op

_VirtualMicroBatch = tuple[int, int]
"""(micro-batch, chunk)"""
_Pair = tuple[ReplicaId, ReplicaId]
_Received = tuple[Op, int, int]
"""(receive, micro-batch, virtual stage that reads it)"""
_FREES_STASH = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
_BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT)
_TAKER_OF = {Op.KEEP_ACTIVATION: (Op.FORWARD, 1), Op.KEEP_GRADIENT: (Op.BACKWARD, -1)}
"""The compute that uses a kept value, and its virtual stage relative to the one that made it."""
_SEND_OF = {receive: send for send, receive in RECEIVE_OF.items()}


@dataclass(frozen=True, kw_only=True)
class MessageSizes:
    """Bytes of one micro-batch on one rank."""

    activation_bytes: int
    """An activation or a gradient between stages."""
    targets_bytes: int
    stash_bytes: tuple[int, ...]
    """Bytes that each virtual stage keeps from forward to backward."""
    deferred_bytes: tuple[int, ...]
    """Bytes that each virtual stage keeps between the halves of a split backward: the inputs of all products and the
    gradients of their results."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Figures of a plan that passed."""

    makespan: int
    """End of the lists when every step runs as soon as it can, with the plan's costs and these slots."""
    peak_in_flight: dict[ReplicaId, int]
    """The most virtual micro-batches held between the start of a forward and the end of both halves of its backward."""
    peak_bytes: dict[ReplicaId, int]
    """The most bytes stashed, unsent, kept, or received and not yet used; empty without sizes."""


def check_plan(plan: Plan, slots: int, sizes: MessageSizes | None = None) -> CheckReport:
    """Checks that the plan is correct and ends with these slots; raises ScheduleError with replica and instruction."""
    _check_steps(plan)
    _check_pairs(plan)
    execution = _Execution(plan, slots)
    return CheckReport(
        makespan=max(execution.clock.values()),
        peak_in_flight={replica: _peak_in_flight(steps) for replica, steps in plan.lists.items()},
        peak_bytes=_peak_bytes(plan, execution, sizes) if sizes else {},
    )


def find_makespan(plan: Plan, replicas: Iterable[ReplicaId], *, slots: int) -> int:
    """The end of the lists of these replicas alone, which are whole components of a correct plan; raises ScheduleError
    if they get stuck."""
    part = replace(plan, lists={replica: plan.lists[replica] for replica in replicas})
    return max(_Execution(part, slots).clock.values())


def _check_steps(plan: Plan) -> None:
    live = {(stage, replica) for stage, ids in enumerate(plan.request.replicas) for replica in ids}
    if odd := live ^ set(plan.lists):
        raise ScheduleError(f"the plan's lists and the live replicas differ in {sorted(odd)}")
    expected: dict[ReplicaId, dict[_VirtualMicroBatch, tuple[Instruction, ...]]] = {replica: {} for replica in live}
    request = plan.request
    for micro_batch, route in enumerate(plan.routes):
        for (stage, replica), chunk in product(enumerate(route), range(request.virtual_stages)):
            expected[stage, replica][micro_batch, chunk] = instructions_for(
                route,
                micro_batch,
                stage,
                chunk,
                layout=request.layout,
                backward=request.has_backward,
                split=request.splits,
            )
    for replica_id, wanted in expected.items():
        found: dict[_VirtualMicroBatch, list[Instruction]] = defaultdict(list)
        for step in plan.lists[replica_id]:
            found[step.micro_batch, step.chunk].append(step)
        for key in sorted(wanted.keys() | found.keys()):
            _compare_steps(replica_id, key[0], wanted.get(key, ()), found[key])


def _compare_steps(
    replica: ReplicaId, micro_batch: int, wanted: tuple[Instruction, ...], found: list[Instruction]
) -> None:
    if [step.op for step in found[:2]] == [Op.RECV_ACTIVATION, Op.RECV_TARGETS]:  # equivalent to the opposite order
        found = [found[1], found[0], *found[2:]]
    for wants, has in zip_longest(wanted, found):
        if wants != has:
            raise ScheduleError(
                f"replica {replica}, micro-batch {micro_batch}: '{has or 'nothing'}' stands where "
                f"'{wants or 'nothing'}' belongs"
            )


def _check_pairs(plan: Plan) -> None:
    layout = plan.request.layout
    sent: dict[_Pair, list[_Received]] = defaultdict(list)
    received: dict[_Pair, list[_Received]] = defaultdict(list)
    for replica, steps in plan.lists.items():
        for step in steps:
            if step.peer is None:
                continue
            reader_stage = step.reader_stage(replica[0], layout)
            if step.op in RECEIVE_OF:
                sent[replica, step.peer].append((RECEIVE_OF[step.op], step.micro_batch, reader_stage))
            else:
                received[step.peer, replica].append((step.op, step.micro_batch, reader_stage))
    for pair in sorted(sent.keys() | received.keys()):
        for number, (has, wants) in enumerate(zip_longest(sent[pair], received[pair])):
            if has != wants:
                sends = f"'{_SEND_OF[has[0]].value} {_message_name(has, layout)}'" if has else "nothing"
                takes = f"'{wants[0].value} {_message_name(wants, layout)}'" if wants else "no receive"
                raise ScheduleError(
                    f"message {number} from {pair[0]} to {pair[1]}: {pair[0]} has {sends} where {pair[1]} has {takes}"
                )


def _message_name(message: _Received, layout: ChunkLayout) -> str:
    _, micro_batch, reader_stage = message
    chunk = layout.chunks[reader_stage]
    return f"{micro_batch} for chunk {chunk}" if chunk else str(micro_batch)


class _Execution:
    """Runs every step of the lists as soon as possible; `clock` has each replica's end, other fields record times."""

    def __init__(self, plan: Plan, slots: int):
        self.lists, self.slots, self.layout = plan.lists, slots, plan.request.layout
        self.costs, self.factors = costs_by_op(plan.request), plan.request.time_factors
        self.clock = dict.fromkeys(plan.lists, 0)
        self.next_step = dict.fromkeys(plan.lists, 0)
        self.computed_at: dict[_Pair, list[int]] = defaultdict(list)
        self.sent_at: dict[_Pair, list[int]] = defaultdict(list)
        self.read_at: dict[_Pair, list[int]] = defaultdict(list)
        self.ops_sent: dict[_Pair, list[Op]] = defaultdict(list)
        self.used_at: dict[_Pair, list[int]] = defaultdict(list)
        """The times at which messages that were read are used: at once, or later."""
        self.read_unused: dict[tuple[ReplicaId, _VirtualMicroBatch], list[tuple[_Pair, int]]] = defaultdict(list)
        """Messages read and not yet used, by the compute that needs them: (pair, position in its order)."""
        self.stashes: dict[ReplicaId, list[tuple[int, int, int]]] = defaultdict(list)  # (time, virtual stage, +1 or -1)
        self.deferred: dict[ReplicaId, list[tuple[int, int, int]]] = defaultdict(list)
        self.kept: dict[ReplicaId, list[tuple[int, int]]] = defaultdict(list)
        """(time, +1 or -1) for activations and gradients that pass between chunks on the same replica."""
        self._kept_for: set[tuple[ReplicaId, Op, int, int]] = set()
        """(replica, compute, micro-batch, virtual stage) that will use the kept values."""
        todo = list(plan.lists)
        while todo:
            todo += self._advance(todo.pop())
        self._raise_if_deadlocked()

    def _advance(self, replica: ReplicaId) -> set[ReplicaId]:
        """Runs one replica until it must wait; returns the peers that may continue now."""
        steps, unblocked = self.lists[replica], set()
        while self.next_step[replica] < len(steps) and self._try_step(replica, steps[self.next_step[replica]]):
            peer = steps[self.next_step[replica]].peer
            if peer is not None:
                unblocked.add(peer)
            self.next_step[replica] += 1
        return unblocked

    def _try_step(self, replica: ReplicaId, step: Instruction) -> bool:
        """Runs the step if possible now; returns whether it did."""
        if step.peer is None:
            self._compute(replica, step)
            return True
        is_send = step.op in RECEIVE_OF
        pair = (replica, step.peer) if is_send else (step.peer, replica)
        done, others = (self.sent_at, self.read_at) if is_send else (self.read_at, self.sent_at)
        awaited = len(done[pair]) - (self.slots if is_send else 0)  # a send waits for the read that frees its slot
        if awaited >= len(others[pair]):
            return False
        if is_send:
            self.computed_at[pair].append(self.clock[replica])
            self.ops_sent[pair].append(step.op)
        else:
            self.read_unused[replica, (step.micro_batch, step.chunk)].append((pair, len(done[pair])))
            self.used_at[pair].append(-1)
        if awaited >= 0:
            self.clock[replica] = max(self.clock[replica], others[pair][awaited])
        done[pair].append(self.clock[replica])
        return True

    def _compute(self, replica: ReplicaId, step: Instruction) -> None:
        virtual_stage = self.layout.virtual_stages[replica[0]][step.chunk]
        for pair, number in self.read_unused.pop((replica, (step.micro_batch, step.chunk)), ()):
            self.used_at[pair][number] = self.clock[replica]
        self._keep_or_take(replica, step, virtual_stage)
        if step.op is Op.FORWARD:
            self.stashes[replica].append((self.clock[replica], virtual_stage, +1))
        if step.op in self.costs:
            self.clock[replica] += self.costs[step.op][virtual_stage] * self.factors[replica]
        if step.op in _BACKWARDS:
            self.stashes[replica].append((self.clock[replica], virtual_stage, -1))
        if step.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
            sign = +1 if step.op is Op.BACKWARD_INPUT else -1
            self.deferred[replica].append((self.clock[replica], virtual_stage, sign))

    def _keep_or_take(self, replica: ReplicaId, step: Instruction, virtual_stage: int) -> None:
        """Tracks values that stay on a replica: they must be there when the compute that needs them begins."""
        if step.op in _TAKER_OF:
            taker, offset = _TAKER_OF[step.op]
            self._kept_for.add((replica, taker, step.micro_batch, virtual_stage + offset))
            self.kept[replica].append((self.clock[replica], +1))
        elif step.op in (Op.FORWARD, *_BACKWARDS):
            taker = Op.FORWARD if step.op is Op.FORWARD else Op.BACKWARD
            source = virtual_stage + (-1 if taker is Op.FORWARD else 1)
            if not (0 <= source <= self.layout.last and self.layout.stages[source] == replica[0]):
                return
            key = (replica, taker, step.micro_batch, virtual_stage)
            if key not in self._kept_for:
                raise ScheduleError(f"replica {replica}: '{step}' comes before the chunk that it continues")
            self._kept_for.remove(key)
            self.kept[replica].append((self.clock[replica], -1))

    def _raise_if_deadlocked(self) -> None:
        blocked = []
        for replica, number in self.next_step.items():
            if number < len(self.lists[replica]):
                step = self.lists[replica][number]
                why = "to read" if step.op in RECEIVE_OF else "to send"
                blocked.append(f"  {replica} at instruction {number}, '{step}': waits for {step.peer} {why}")
        if blocked:
            plural = "s" if self.slots > 1 else ""
            raise ScheduleError(f"the lists never end with {self.slots} slot{plural} a pair:\n" + "\n".join(blocked))


def _peak_in_flight(steps: tuple[Instruction, ...]) -> int:
    changes = {Op.FORWARD: 1} | dict.fromkeys(_FREES_STASH, -1)
    return max(accumulate((changes.get(step.op, 0) for step in steps), initial=0))


def _peak_bytes(plan: Plan, execution: _Execution, sizes: MessageSizes) -> dict[ReplicaId, int]:
    """The largest sum of bytes alive at one time, by replica; values that end at a time no longer count then."""
    changes: dict[ReplicaId, list[tuple[int, int]]] = defaultdict(list)
    for replica, time, change in _byte_changes(plan, execution, sizes):
        changes[replica].append((time, change))
    return {replica: max(accumulate((c for _, c in sorted(changes[replica])), initial=0)) for replica in plan.lists}


def _byte_changes(plan: Plan, execution: _Execution, sizes: MessageSizes) -> Iterator[tuple[ReplicaId, int, int]]:
    """Yields (replica, time, change in bytes)."""
    if plan.request.has_backward:
        for changes, by_stage in ((execution.stashes, sizes.stash_bytes), (execution.deferred, sizes.deferred_bytes)):
            for replica, times in changes.items():
                for time, virtual_stage, sign in times:
                    yield replica, time, sign * by_stage[virtual_stage]
    for replica, kept in execution.kept.items():
        for time, sign in kept:
            yield replica, time, sign * sizes.activation_bytes
    for pair, ops in execution.ops_sent.items():
        event_times = (
            execution.computed_at[pair],
            execution.sent_at[pair],
            execution.read_at[pair],
            execution.used_at[pair],
        )
        for op, computed, sent, read, used in zip(ops, *event_times):
            num_bytes = sizes.targets_bytes if op is Op.SEND_TARGETS else sizes.activation_bytes
            yield pair[0], computed, num_bytes
            yield pair[0], read, -num_bytes
            yield pair[1], sent, num_bytes
            yield pair[1], used, -num_bytes
