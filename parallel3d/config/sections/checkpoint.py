"""The configuration's section `checkpoint`, and its rules."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from parallel3d.config.sections.base import Section


class CheckpointConfig(Section):
    """What a run keeps of itself on disk. Saves are written while training goes on; each is complete or not there."""

    every: PositiveInt | None = None
    """Steps between two saves. One that comes while another is still being written is skipped. Null: none."""
    save_at_end: bool = True
    """Save after the last step, and after a stop (Ctrl-C, SIGTERM), before the workers end. With `every` a stop saves
    in any case."""
    retry_s: list[PositiveFloat] = [1.0, 10.0, 60.0, 300.0]
    """Seconds after which the save at the end of a run is tried again when it has failed, one try each: time to make
    room on a full disk. A stop (Ctrl-C, SIGTERM) cuts the waits short."""
    keep_last: PositiveInt = 2
    """So many of the newest checkpoints are kept, and the one with the lowest loss."""
    keep_every: PositiveInt | None = None
    """Steps that are a multiple of this are saved, too, and their checkpoints kept for ever. Null: none."""
    keep_every_weights_only: bool = False
    """Of those that are kept for ever only the weights are, once they are neither the best nor among the last: a third
    of the bytes. A new run can begin from them, none can go on."""
    write_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the time in which a rank writes, while training goes on. Less: training is slowed less, but for longer;
    1: no breaks, for machines whose CPUs have nothing else to do."""
    directory: str | None = None
    """Folder of the checkpoints; on several hosts one that all share. Null: checkpoints in the run's folder."""
