"""An estimate of the control plane's costs at any size, from measurements of benchmarks/scale.py. Pure.

Costs are nearly linear in workers and in connections; the coefficients fit runs with 64 to 10,240 workers, and 8 or one
a connection, within a third. Measured on one core of an AMD EPYC (2026-11-22).
"""

from __future__ import annotations

from dataclasses import dataclass

WORKER_S, CONNECTION_S = 25e-6, 100e-6
"""CPU seconds of one loss: for a worker's report and confirmation, for a connection's three frames and two batches."""
START_WORKER_S, START_CONNECTION_S = 50e-6, 250e-6
FRAMES_BYTES = 2_500
"""Of one connection: the frames of a change, without the missing entries."""
BYTES_PER_CURSOR = 2.7
WHOLE_RECORD_BYTES_PER_WORKER = 6.0
"""Hosts and ports, compressed."""


@dataclass(frozen=True, kw_only=True)
class ControlEstimate:
    """The costs of the coordinator alone."""

    num_connections: int
    start_cpu_s: float
    start_bytes: float
    loss_cpu_s: float
    loss_bytes: float
    """If one worker of each connection lacks the newest entry."""

    def __str__(self) -> str:
        return (
            f"{self.num_connections:,} connections; start {self.start_cpu_s:.2g} s of CPU time, "
            f"{self.start_bytes / 1e6:,.2g} MB sent; one loss until its commit {self.loss_cpu_s:.2g} s, "
            f"at most {self.loss_bytes / 1e6:,.2g} MB"
        )


def estimate_control(num_workers: int, *, num_sequences: int, workers_per_connection: int) -> ControlEstimate:
    """Estimates a start and a loss; `num_sequences` is the global batch, whose cursors an entry carries, and
    `workers_per_connection` the workers of one guardian, which relays for them."""
    num_connections = -(-num_workers // workers_per_connection)
    return ControlEstimate(
        num_connections=num_connections,
        start_cpu_s=num_workers * START_WORKER_S + num_connections * START_CONNECTION_S,
        start_bytes=num_connections * (FRAMES_BYTES + num_workers * WHOLE_RECORD_BYTES_PER_WORKER),
        loss_cpu_s=num_workers * WORKER_S + num_connections * CONNECTION_S,
        loss_bytes=num_connections * (FRAMES_BYTES + num_sequences * BYTES_PER_CURSOR),
    )
