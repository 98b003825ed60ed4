"""The search of a guardian's connection for the coordinator, and its owner's part when something happens to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parallel3d.elastic.protocol.failover import GuardianInfo
from parallel3d.elastic.protocol.membership import Address


@dataclass(frozen=True, kw_only=True)
class Search:
    """Attempts to reach one address."""

    address: Address
    candidate: GuardianInfo | None
    """None: the coordinator that the run begins with."""
    deadline_s: float
    attempt_s: float
    """Longest attempt."""
    relay_until_s: float = 0.0
    """Until then attempts are made at this host's relay."""


@dataclass(frozen=True, kw_only=True)
class LinkEvents:
    """The guardian's part when something happens to the connection."""

    greet: Callable[[], dict[str, Any]]
    """Returns the first frame, `hello`."""
    on_welcome: Callable[[], None]
    """A coordinator serves at the other end."""
    on_frame: Callable[[dict[str, Any], bytes], None]
    on_lost: Callable[[], None]
    """A coordinator that has served is gone."""
    on_relay_lost: Callable[[], None]
    """The relay is gone, without word of the coordinator: `on_lost` follows."""
    on_end: Callable[[str, bool], None]
    """No coordinator can be reached: why, and whether this guardian is the one to say so."""
