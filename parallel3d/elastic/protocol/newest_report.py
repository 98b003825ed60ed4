"""Which worker holds the newest entry, by the reports to a change of membership. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from parallel3d.elastic.protocol.membership import StateReport
from parallel3d.errors import ProtocolError


def find_newest(reports: Sequence[StateReport]) -> StateReport:
    """Returns the report of a worker that holds the newest entry, the lowest rank's of several; `reports` are those of
    the workers that have trained. Raises ProtocolError if they contradict each other."""
    newest = max(reports, key=lambda report: (report.position, -report.rank))
    oldest = min(reports, key=lambda report: (report.position, report.rank))
    behind = newest.position.iteration - oldest.position.iteration
    if behind > 1 or len({report.position for report in reports}) > 2:
        raise ProtocolError(
            f"rank {oldest.rank} at {oldest.position} is more than one entry behind rank {newest.rank} "
            f"at {newest.position}"
        )
    for report in reports:
        if report.position == newest.position and report.digest != newest.digest:
            raise ProtocolError(f"ranks {newest.rank} and {report.rank} hold different entries at {newest.position}")
    return newest
