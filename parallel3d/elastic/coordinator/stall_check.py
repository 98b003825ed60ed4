"""Ends what the run would wait for in vain: workers without a connection or an answer, hosts without a path."""

from __future__ import annotations

from collections.abc import Mapping

from parallel3d.elastic.coordinator.change_deadline import ChangeDeadline
from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.fences import Fences
from parallel3d.elastic.coordinator.path_check import PathCheck
from parallel3d.elastic.coordinator.run_status import RunStatus
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.elastic.settings import LaunchTimeouts


class StallCheck:
    """Checks in each of the coordinator's turns whether the run still moves."""

    def __init__(self, server: ConnectionServer, status: RunStatus, *, timeouts: LaunchTimeouts, own_host: str):
        self.fences = Fences(server, status)
        self.change_deadline = ChangeDeadline(server, self.fences, change_s=timeouts.change_s)
        self.paths = PathCheck(server, status, self.fences, control_s=timeouts.control_s, own_host=own_host)

    def check(self, protocol: MembershipProtocol | None, published: Mapping[str, int], now_s: float) -> str:
        """Asks, kills and evicts; returns why the run can't go on, or "".

        `protocol`: while losses may be survived. `published`: the newest steps, by kind of record. In most turns this
        takes O(1), whatever the number of workers.
        """
        self.fences.check(now_s)
        if protocol is None or protocol.committed is None:  # workers may be loading for long
            return ""
        self.change_deadline.check(protocol, now_s)
        progress = (protocol.pending, protocol.num_changes, *sorted(published.items()))
        return self.paths.check(protocol, progress, now_s, has_trained="step" in published)
