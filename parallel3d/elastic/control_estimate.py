"""An estimate of the control plane's costs at any size, from measurements of benchmarks/scale.py. Pure.

Costs are nearly linear in workers, in guardians and in connections; the coefficients fit runs with 64 to 10,240
workers, with a guardian for 8 workers or for each, and with relays for 8 guardians, within a third. Measured on one
core of an AMD EPYC (2026-11-22), relays on one of an Intel Xeon (2026-11-24).
"""

from __future__ import annotations

from dataclasses import dataclass

WORKER_S, CONNECTION_S = 25e-6, 100e-6
"""CPU seconds of one loss: for a worker's report and confirmation, for a connection's three frames and two batches."""
START_WORKER_S, START_CONNECTION_S = 50e-6, 250e-6
RELAYED_S, START_RELAYED_S = 10e-6, 40e-6
"""For a guardian behind a relay, in place of a connection of its own."""
RELAYED_BYTES = 530
"""What a change sends to such a guardian, beside what its relay gets for all of them."""
FRAMES_BYTES = 2_500
"""Of one connection: the frames of a change, without the missing entries."""
BYTES_PER_CURSOR = 2.7
WHOLE_RECORD_BYTES_PER_WORKER = 6.0
"""Hosts and ports, compressed."""
GROUP_WORKER_S, REGROUP_WORKER_S = 18e-6, 120e-6
"""For what a worker says about its groups: the comparison and a few groups that meet again, or all of them. Measured at
loads of 6 to 30 (2026-11-28), so taken as shares of what a loss took in the same runs."""
GROUP_WORKER_BYTES, REGROUP_WORKER_BYTES = 38, 350
"""Beside the addresses."""
ADDRESS_BYTES = 17
"""Of the address of a rank, compressed, that each host with ranks of its group gets."""


@dataclass(frozen=True, kw_only=True)
class ControlEstimate:
    """The costs of the coordinator alone."""

    num_connections: int
    start_cpu_s: float
    start_bytes: float
    loss_cpu_s: float
    loss_bytes: float
    """If one worker of each connection lacks the newest entry."""
    groups_cpu_s: float
    groups_bytes: float
    """What the groups of the generation after a loss add, over gloo: those of the lost worker's stage meet again. Bytes
    if no two ranks of such a group share a host."""
    regroup_cpu_s: float
    regroup_bytes: float
    """The same where the loss comes within collectives, and all groups meet again."""

    def __str__(self) -> str:
        return (
            f"{self.num_connections:,} connections; start {self.start_cpu_s:.2g} s of CPU time, "
            f"{self.start_bytes / 1e6:,.2g} MB sent; one loss until its commit {self.loss_cpu_s:.2g} s, "
            f"at most {self.loss_bytes / 1e6:,.2g} MB; its groups over gloo {self.groups_cpu_s:.2g} s, "
            f"{self.groups_bytes / 1e6:,.2g} MB, or if all meet again {self.regroup_cpu_s:.2g} s, "
            f"{self.regroup_bytes / 1e6:,.2g} MB"
        )


def estimate_control(
    num_workers: int,
    *,
    num_sequences: int,
    tp_size: int,
    pp_size: int,
    workers_per_guardian: int,
    guardians_per_connection: int = 1,
) -> ControlEstimate:
    """Estimates a start and a loss; `num_sequences` is the global batch, whose cursors an entry carries. A guardian
    relays for `workers_per_guardian` workers; with more than one guardian a connection, relays carry their frames."""
    stage_bytes = tp_size * (num_workers / (tp_size * pp_size)) ** 2 * ADDRESS_BYTES
    num_guardians = -(-num_workers // workers_per_guardian)
    num_connections = -(-num_guardians // guardians_per_connection)
    num_relayed = num_guardians if guardians_per_connection > 1 else 0
    return ControlEstimate(
        num_connections=num_connections,
        start_cpu_s=num_workers * START_WORKER_S
        + num_connections * START_CONNECTION_S
        + num_relayed * START_RELAYED_S,
        start_bytes=num_connections * (FRAMES_BYTES + num_workers * WHOLE_RECORD_BYTES_PER_WORKER)
        + num_relayed * RELAYED_BYTES,
        loss_cpu_s=num_workers * WORKER_S + num_connections * CONNECTION_S + num_relayed * RELAYED_S,
        loss_bytes=num_connections * (FRAMES_BYTES + num_sequences * BYTES_PER_CURSOR) + num_relayed * RELAYED_BYTES,
        groups_cpu_s=num_workers * GROUP_WORKER_S,
        groups_bytes=stage_bytes + num_workers * GROUP_WORKER_BYTES,
        regroup_cpu_s=num_workers * REGROUP_WORKER_S,
        regroup_bytes=pp_size * stage_bytes + num_workers * REGROUP_WORKER_BYTES,
    )
