"""Which worker holds the newest entry, by the reports to a change of membership. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from parallel3d.elastic.protocol.membership import LogPosition, StateReport
from parallel3d.errors import ProtocolError


def find_newest(reports: Sequence[StateReport]) -> StateReport:
    """Returns the report of a worker that holds the newest entry, the lowest rank's of several; `reports` are those of
    the workers that have trained. Raises ProtocolError if they contradict each other."""
    by_position: dict[LogPosition, list[StateReport]] = {}
    for report in reports:
        by_position.setdefault(report.position, []).append(report)
    holders, others = by_position[max(by_position)], by_position[min(by_position)]
    newest, oldest = (min(group, key=lambda report: report.rank) for group in (holders, others))
    behind = newest.position.iteration - oldest.position.iteration
    if behind > 1 or len(by_position) > 2:
        raise ProtocolError(
            f"rank {oldest.rank} at {oldest.position} is more than one entry behind rank {newest.rank} "
            f"at {newest.position}"
        )
    for report in holders:
        if report.digest != newest.digest:
            raise ProtocolError(f"ranks {newest.rank} and {report.rank} hold different entries at {newest.position}")
    return newest
