"""The configuration's section `restart`."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt

from parallel3d.config.sections.base import Section


class RestartConfig(Section):
    """What happens when a run can't go on in place: it begins again from a checkpoint, with all of its workers."""

    max_restarts: NonNegativeInt = 0
    """So many times at most; needs checkpoint.every. 0: such a run ends. For runs that are started plainly: another
    launcher restarts by itself (torchrun --max-restarts N), and the run then goes on from its newest checkpoint."""
    backoff_s: NonNegativeFloat = 1.0
    """Seconds before a restart; doubled with each further one, until the run gets beyond where it had come before."""
    max_backoff_s: NonNegativeFloat = 300.0
    """Never more, in seconds; at least backoff_s."""
    skip_diverging_data: bool = True
    """After a divergence the data that led into it is not read again: the lanes go on behind it. false: the same data
    comes again, and with it, unless a faulty machine was the cause, the divergence."""
