"""The settings of a run's distributed optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallel3d.optim.updater import Updaters
from parallel3d.precision.fixed_point import FixedPoint
from parallel3d.precision.policy import Policy


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """How optimizer state is kept, reduced and updated; the same on every rank."""

    seed: int
    """Of initial weights and rounding noise."""
    is_sharded: bool
    """Whether the replicas of a stage share its state (ZeRO stage 1), or each keeps all of it."""
    bucket_bytes: int
    """Of main gradients in a bucket."""
    policy: Policy
    updaters: Updaters
    fixed: FixedPoint | None = None
    """The format of exact sums; None adds gradients as floats."""
    overlap_reduce: bool
    """Whether a bucket's reduction starts as soon as it has all of its gradients."""
    overlap_gather: bool
    """Whether updated weights are gathered under the next forward pass."""

    measures_norms: bool = False
    """Whether kernels of updates measure weights and second moments as they write them."""

    @property
    def bucket_elements(self) -> int:
        return max(1, self.bucket_bytes // self.policy.grad.itemsize)

    @property
    def sums_terms(self) -> bool:
        """Whether each micro-batch's gradients are one term, which is complete, and added to the totals, only after
        the last of them: exact sums, and accumulation that is rounded stochastically."""
        return self.fixed is not None or self.policy.rounds_accumulation

    @property
    def grad_dtype(self) -> torch.dtype:
        """The format in which layers add gradients up."""
        return torch.float32 if self.policy.rounds_accumulation else self.policy.grad

    @property
    def total_dtype(self) -> torch.dtype:
        """The format of the totals that are reduced, where these are not the gradients themselves."""
        return self.policy.grad if self.fixed is None else torch.int64
