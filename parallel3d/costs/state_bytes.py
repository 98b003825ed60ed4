"""The bytes that a rank keeps between steps: weights, gradients, optimizer state, from the plan of its buckets. Pure.

The same functions that lay out a run's buckets (`optim/bucket_plan.py`) are asked, so the counts are those of the
buffers and not of a formula; `optim/bucket.py` and `optim/state_shard.py` allocate what is counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from parallel3d.config.schema import Config
from parallel3d.config.specs.policies import POLICY_SPECS
from parallel3d.optim.bucket_plan import BucketPlan, padded_length, plan_buckets
from parallel3d.optim.update_rules import rules_of
from parallel3d.optim.update_rules.update_rule import MatrixRule
from parallel3d.parallel.sharding import ParamSharding

EXACT_SUM_BYTES = 8
"""Of an integer total of exact sums."""
WORD_BYTES, INDEX_BYTES = 24, 16
"""An element of a range that is rounded stochastically by torch's operators: random words, and the global indices of
the parameter at work."""
MAX_COUNTED_RANGES = 64
"""Ranges of matrices up to which each is looked at; beyond, a range has one matrix at most, or its equal share."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What one rank keeps between steps."""

    num_parameters: int
    """Elements of parameters on this rank."""
    num_buckets: int
    weights: int
    gradients: int
    """Main gradients and, where terms are summed apart, their totals."""
    optimizer: int
    """The owned ranges: master weights, the rule's states, reduced gradients."""
    backup: int
    """The same of another replica's ranges."""
    updated_elements: int
    """Elements that this rank updates in a step: of its own ranges and of those that it backs up."""
    longest_range: int
    """Elements of the longest range that it owns."""
    rounding: int
    """Bytes of random words and their keys, where a range is rounded by torch's operators. Not part of the total."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.backup


@dataclass(frozen=True, kw_only=True)
class StateFormats:
    """Bytes of an element of everything that a rank keeps, for one configuration."""

    weight: int
    gradient: int
    """Of the main gradients that layers add to, and of totals beside them."""
    reduced: int
    """Of the owned range of reduced gradients, where it is a buffer of its own."""
    state: int
    has_master: bool
    sums_exactly: bool
    num_states: int
    """States of the rule for most parameters."""
    num_matrix_states: int | None
    """States of the rule for the layers' matrices; None: it does not need them whole."""

    @staticmethod
    def of(config: Config) -> StateFormats:
        spec, rules = POLICY_SPECS[config.precision.policy], rules_of(config.optimizer.kind)
        rounds_accumulation = "accumulation" in config.precision.stochastic_rounding
        exact = EXACT_SUM_BYTES if config.precision.sums == "exact" else 0
        grad = spec.grad.num_bytes
        main = 4 if rounds_accumulation else grad
        totals = exact or (grad if rounds_accumulation else 0)
        return StateFormats(
            weight=spec.compute.num_bytes,
            gradient=main + totals,
            reduced=grad + exact,
            state=spec.state.num_bytes,
            has_master=spec.has_master,
            sums_exactly=bool(exact),
            num_states=len(rules[-1].states),
            num_matrix_states=len(rules[0].states) if issubclass(rules[0], MatrixRule) else None,
        )

    def range_bytes(self, *, is_matrix_wise: bool, is_only_range: bool) -> int:
        """Bytes of an element of a range that a rank holds; `is_only_range`: the bucket is not divided, and its own
        gradients serve."""
        states = self.num_matrix_states if is_matrix_wise else self.num_states
        assert states is not None
        kept = (states + self.has_master) * self.state
        if not is_only_range:
            return kept + self.reduced
        return kept + (self.reduced - EXACT_SUM_BYTES if self.sums_exactly else 0)


@dataclass(frozen=True, kw_only=True)
class Holders:
    """How many ranks share the optimizer state of a parameter."""

    stage: int
    """Replicas of the stage; 1 where the state is not sharded."""
    tied: int
    """Ranks that hold a tied embedding: the replicas of the first and of the last stage."""
    has_backup: bool
    most_stage: int = 0
    """Replicas to which the stage may grow, which the buffers have room for; 0: it may not."""
    most_tied: int = 0


def count_state(shardings: Sequence[ParamSharding], config: Config, holders: Holders, tp_size: int) -> StateBytes:
    """Counts what one rank keeps of parameters in forward order."""
    formats = StateFormats.of(config)
    buckets = plan_rank_buckets(shardings, config, formats, tp_size)
    weights = gradients = optimizer = backup = updated = longest = rounding = 0
    for bucket in buckets:
        num_ranges = holders.tied if bucket.key.tied else holders.stage
        most = max(num_ranges, holders.most_tied if bucket.key.tied else holders.most_stage)
        elements = capacity(bucket.num_elements, 1 if bucket.key.is_matrix_wise else most)
        weights += elements * formats.weight
        gradients += elements * formats.gradient
        length = longest_range(bucket, num_ranges)
        held = length * formats.range_bytes(is_matrix_wise=bucket.key.is_matrix_wise, is_only_range=num_ranges == 1)
        optimizer += held
        has_backup = holders.has_backup and num_ranges > 1
        backup += held if has_backup else 0
        updated += length * (2 if has_backup else 1)
        longest = max(longest, length)
        slot = max(each.length for each in bucket.param_slots)
        rounding = max(rounding, WORD_BYTES * length + INDEX_BYTES * min(length, slot))
    return StateBytes(
        num_parameters=sum(slot.length for bucket in buckets for slot in bucket.param_slots),
        num_buckets=len(buckets),
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        backup=backup,
        updated_elements=updated,
        longest_range=longest,
        rounding=rounding,
    )


def plan_rank_buckets(
    shardings: Sequence[ParamSharding], config: Config, formats: StateFormats, tp_size: int
) -> tuple[BucketPlan, ...]:
    """The buckets of a rank with these parameters, as its optimizer plans them."""
    is_token_sharded = config.parallel.sequence_parallel and tp_size > 1
    grad_bytes = POLICY_SPECS[config.precision.policy].grad.num_bytes
    return plan_buckets(
        [replace(each, partial_grad=is_token_sharded) if each.dim is None else each for each in shardings],
        tp_size=tp_size,
        bucket_elements=max(1, int(config.parallel.bucket_mib * 2**20) // grad_bytes),
        decay_norms_and_biases=config.optimizer.decay_norms_and_biases,
        matrix_wise=formats.num_matrix_states is not None,
    )


@cache
def capacity(num_elements: int, max_ranges: int) -> int:
    """As `BucketPlan.capacity`, remembered: layers that are alike have equal buckets."""
    return max(padded_length(num_elements, num_ranges) for num_ranges in range(1, max_ranges + 1))


def longest_range(bucket: BucketPlan, num_ranges: int) -> int:
    """Elements of the longest of the bucket's ranges."""
    if not bucket.key.is_matrix_wise:
        return padded_length(bucket.num_elements, num_ranges) // num_ranges
    if num_ranges > MAX_COUNTED_RANGES:
        largest = max(slot.length for slot in bucket.param_slots)
        return max(largest, bucket.length(1) // num_ranges)
    return max(len(bucket.range_of(number, num_ranges)) for number in range(num_ranges))
