"""A worker's place at the coordinator's table: how it takes part in changes of membership.

One worker thread calls a seat. Implementations: the control channel of a process (elastic/control.py) and threads of
one process (testing/, trainer/).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from parallel3d.elastic.protocol.membership import GenerationRecord, StateReport
from parallel3d.parallel.abort import AbortToken


@dataclass(frozen=True, kw_only=True)
class PendingGeneration:
    """A new generation, agreed but not yet confirmed; `token` is aborted when it is over."""

    record: GenerationRecord
    token: AbortToken


class MembershipClient(ABC):
    """All waits end with RunEnded when the coordinator ends the run."""

    rank: int

    @abstractmethod
    def next_generation(
        self, make_report: Callable[[int], StateReport], *, suspicion: str = ""
    ) -> PendingGeneration | None:
        """Reports to the newest change of membership and waits for its record; None: the run is done, leave.

        `make_report(generation)` is asked again when a further loss begins the change anew. With `suspicion` (why the
        caller has left its generation) a change is asked for when none is under way; without, one is waited for, as a
        spare does.
        """

    @abstractmethod
    def confirm(self, generation: int, *, digest: str, moved_bytes: int) -> None:
        """Says that this worker holds all that it shall hold, and waits until all others do.

        `digest` is that of its plan: all ranks of the grid must have the same (a spare sends ""). Raises
        GenerationEnded when a further change has begun before all had confirmed.
        """

    @abstractmethod
    def finish(self) -> None:
        """Waits until every worker of the grid is done; raises GenerationEnded when one is lost before."""
