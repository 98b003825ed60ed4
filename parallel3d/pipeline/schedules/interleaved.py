"""Interleaved 1F1B (Narayanan et al. 2021, section 2.2): several chunks of layers a stage, a smaller bubble.

Work comes in the paper's order: groups of P micro-batches for each pipeline; a group's first chunk, its second, ...,
and its backwards from the last chunk to the first. A replica with n micro-batches of a group (P on a straight grid) may
hold

    (V - 1) n + 2 (P - 1 - stage) + 1 + extra_in_flight

virtual micro-batches. Where a component is one pipeline whose number of micro-batches P divides, each replica waits for
what is next in this order: the lists are the paper's, and with equal costs their bubble is (P - 1)(F + B) / V, with F
and B of a whole stage. Elsewhere a replica takes the first that has arrived: pp4 x dp4 without one replica takes 3 %
more than the work of the busiest replica (V = 2, split backward).

Progress: if all stood still, let s be the first virtual micro-batch whose forward is missing. All groups before its own
would be done, backwards included, and if s is of the last chunk so would be the micro-batches of its group before it.
Then at most (V - 1) n count against s: there is room for it.
"""

from __future__ import annotations

from collections import Counter

from parallel3d.pipeline.schedules.schedule import Component, Schedule, VirtualMicroBatch


class Interleaved(Schedule):
    """1F1B over groups of P micro-batches, chunk by chunk."""

    name = "interleaved"
    summary = (
        "1f1b over virtual_stages chunks of layers a stage: 1f1b's bubble divided by their number, for that many times"
        " the messages and some more activations; best where pp_size divides the micro-batches of a replica."
    )
    min_chunks = 2
    max_chunks = None
    is_default = True
    suitable_micro_batches = "a multiple of parallel.pp_size micro-batches a replica"

    def suits(self, num_stages: int, num_micro_batches: float) -> bool:
        return num_micro_batches % num_stages == 0

    def forward_order(self, component: Component, stage: int) -> list[VirtualMicroBatch]:
        chunks = range(component.num_chunks)
        return [(m, chunk) for group in _groups(component) for chunk in chunks for m in group]

    def backward_order(self, component: Component, stage: int) -> list[VirtualMicroBatch]:
        chunks = range(component.num_chunks)[::-1]
        return [(m, chunk) for group in _groups(component) for chunk in chunks for m in group]

    def keeps_order(self, component: Component) -> bool:
        is_one_pipeline = len(set(component.routes)) == 1
        return is_one_pipeline and self.suits(component.num_stages, component.num_micro_batches)

    def in_flight_budgets(self, component: Component) -> list[int]:
        num_stages, extra = component.num_stages, component.extra_in_flight
        shares = _largest_shares(component)
        return [
            (component.num_chunks - 1) * share + 2 * (num_stages - 1 - stage) + 1 + extra
            for share, stage in zip(shares, component.stage_of)
        ]


def _groups(component: Component) -> list[range]:
    size, total = _group_size(component), component.num_micro_batches
    return [range(start, min(start + size, total)) for start in range(0, total, size)]


def _group_size(component: Component) -> int:
    """P micro-batches for each pipeline; there are as many pipelines as the widest stage has replicas."""
    return component.num_stages * max(len(set(column)) for column in zip(*component.routes))


def _largest_shares(component: Component) -> list[int]:
    """For each replica the most micro-batches of one group that it handles."""
    size = _group_size(component)
    counts = Counter((number // size, replica) for number, route in enumerate(component.routes) for replica in route)
    shares = [0] * len(component.stage_of)
    for (_, replica), count in counts.items():
        shares[replica] = max(shares[replica], count)
    return shares


SCHEDULE = Interleaved()
