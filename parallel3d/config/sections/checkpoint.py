"""The configuration's section `checkpoint`, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from parallel3d.config.rule import rule, without_credentials
from parallel3d.config.sections.section import Section
from parallel3d.errors import Problem


class CheckpointConfig(Section):
    """Checkpoints of a run. Saves are written while training continues, and are atomic."""

    every: PositiveInt | None = None
    """Steps between two saves. A save that is due while another is being written is skipped. Null: none."""
    save_at_end: bool = True
    """Save after the last step, and after a stop (Ctrl-C, SIGTERM), before the workers end. If `every` is set, a stop
    always saves."""
    retry_s: list[PositiveFloat] = [1.0, 10.0, 60.0, 300.0]
    """Delays in seconds before each retry of the final save, if it fails: time to make room on a full disk. A stop
    (Ctrl-C, SIGTERM) cuts the delays short."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep, in addition to the one with the lowest loss."""
    keep_every: PositiveInt | None = None
    """Steps that are a multiple of this are saved too, and their checkpoints kept for good. Null: none."""
    keep_every_weights_only: bool = False
    """Reduce the checkpoints that keep_every keeps to their weights once they are neither the best nor among the last:
    a third of the bytes. A new run can start from them, but no run can resume from them."""
    write_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the time that a rank spends writing while training continues. A smaller share slows training less, but
    for longer. 1: no pauses, for machines with idle CPUs."""
    directory: str | None = None
    """Checkpoint directory; shared between hosts, if there are several. Null: checkpoints in the run's folder."""
    upload: str | None = None
    """Address in a remote store (s3://bucket/runs/name, gs://, file:///folder, ...), of this run alone: each checkpoint
    is copied there beside training, its index last. A run that finds no checkpoint here, or an older one, resumes from
    the newest complete one there. Null: none."""
    upload_keep_last: PositiveInt | None = None
    """Number of newest checkpoints to keep there, in addition to the best and to those of keep_every, which stay whole.
    Null: as keep_last."""
    upload_end_wait_s: PositiveFloat = 600.0
    """Longest wait in seconds, after the run, for the last upload."""


@rule("checkpoint.keep_every_weights_only", "checkpoint.keep_every")
def check_permanent(weights_only: bool, keep_every: int | None) -> Iterator[Problem]:
    """There are checkpoints to reduce."""
    if weights_only and keep_every is None:
        yield Problem(
            field="checkpoint.keep_every_weights_only",
            value=True,
            rule="applies to the checkpoints that checkpoint.keep_every keeps, which is null",
            fix="Set checkpoint.keep_every to a number of steps, or remove this",
        )


@rule("checkpoint.upload")
def check_upload(address: str | None) -> Iterator[Problem]:
    """The target is an address that can be kept in files."""
    if address is None:
        return
    field, fix = "checkpoint.upload", "Give one such as s3://bucket/runs/name; of a folder file:///folder"
    scheme, _, rest = address.partition("://")
    if not scheme or not rest.strip("/"):
        yield Problem(field=field, value=address, rule="is not an address with :// and a folder", fix=fix)
    else:
        yield from without_credentials(field, address, query=False)


@rule("checkpoint.upload_keep_last", "checkpoint.upload")
def check_upload_keep_last(keep_last: int | None, address: str | None) -> Iterator[Problem]:
    """There is a target to keep them at."""
    if keep_last is not None and address is None:
        rule_text, fix = "applies to checkpoint.upload, which is null", "Set checkpoint.upload, or remove this"
        yield Problem(field="checkpoint.upload_keep_last", value=keep_last, rule=rule_text, fix=fix)
