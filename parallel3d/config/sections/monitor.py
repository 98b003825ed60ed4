"""The configuration's section `monitor`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from parallel3d.config.sections.section import Section


class MonitorConfig(Section):
    """Figures to record in addition to the loss, and the rules that end a diverged run."""

    norms_every: PositiveInt | None = 1
    """Steps between two measurements of the weights' l2 norm, and of the l1 norm and the largest element of Adam's
    sqrt(v): one pass over the weights and one over the second moments that a rank owns. Null: never."""
    divergence: Literal["stop", "warn"] = "stop"
    """stop: a run that has diverged ends with exit code 6 and logs its step and the reason. warn: it logs them and
    continues (except after a NaN or infinite loss, which always ends the run). A run has diverged if max_loss_ratio is
    exceeded; or if, for about 1.4 / (1 - beta2) consecutive updates, the loss is more than 1.2 times its previous
    minimum and does not fall, all gradients are clipped, and the largest sqrt(v) is flat."""
    max_loss_ratio: Annotated[float, Field(gt=1)] | None = None
    """A step whose loss is more than this many times the previous minimum has diverged. Null: no limit."""
    peak_flops: PositiveFloat | None = None
    """Peak FLOP/s of a rank's device, for MFU. Null: the vendor's figure; for CPUs and unknown devices the speed of a
    matrix product, measured at the start."""
    charts: bool = True
    """Draw loss.png, course.png and instability.png into the run's folder when the run ends; launch/report.py draws
    them at any time."""
    page: bool = True
    """Write report.html, a page that shows the run without a network (docs/report.md), into its folder when the run
    ends. It takes about 0.1 s after 300 steps, and never fails a run; `parallel3d report --html` writes it any time."""
    page_every_s: PositiveFloat | None = 300.0
    """Seconds between two pages while the run goes on, each written by a process of the lowest priority that needs
    about a second of one core; after a checkpoint 60 are enough. Null: at the end alone. Has no effect if page is
    false."""
    dollars_per_hour: PositiveFloat | None = None
    """The price of all devices of the run together: the page and `parallel3d watch` then show what the run has cost."""
    tensorboard: bool = False
    """Also writes the figures of every step for TensorBoard, to tensorboard/ in the run folder. Needs the package
    tensorboardX, which the extra "tensorboard" installs."""
    trackers: list[str] = []
    """Experiment trackers that get the figures of every step and evaluation: wandb, mlflow, trackio, tensorboard, or a
    class of yours, "package:object" (docs/monitors.md). Each needs its package, and runs as a process of its own, which
    can neither slow nor end the run. A resumed run goes on in the tracker's run."""
    tracker_project: str = "parallel3d"
    """The trackers' project, or experiment."""
