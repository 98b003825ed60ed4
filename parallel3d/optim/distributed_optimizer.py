"""Reduces the gradients of one rank's buckets, updates the ranges that the rank holds, and gathers the weights.

ZeRO stage 1 (Rajbhandari et al. 2020): each data-parallel rank owns one range of every bucket. Gradients are
reduce-scattered to the owners, the owners update, and the weights are gathered. With backups another replica holds the
same range, and applies the same update to a copy of the same reduced gradients, so that its state is the same::

    bucket on each rank   [ range 0 | range 1 | range 2 | range 3 ]
    reduce-scatter                    ^ rank 1 gets the sum of range 1 ...
    copy                              ^ ... and sends it to rank 2, which holds the backup of range 1, unless rank 2
                                        can reduce it, too (in memory that the ranks share)
    update                            rank 1 and rank 2, each its own copy of the states (and master weights)
    all-gather            every rank gets every range from its owner

With zero_stage 0 the one range is the whole bucket, on every rank: all-reduce, update, nothing to gather.

Reductions start while the last backward passes run, as soon as a bucket has all of its gradients, in bucket order,
which is the same on every rank. Gathers may overlap the next forward pass: each module waits for its own buckets.
Neither changes a bit of the result.

A bucket belongs to the ranks that hold its parameters: the replicas of the stage (data-parallel group), or for a tied
embedding those of the first and the last stage (embedding group). It is reduced, sharded, counted in the norm, updated
and gathered once over all of them, so both stages continue with the same bits. No rank waits forever, whatever its part
of the batch is:

- reductions and gathers are started without waiting for another one, each by every rank of its group in every
  iteration, and are waited for only when all of an iteration have started. (Partial sums inside a replica finish in
  between.);
- all ranks start a tied bucket's reduction after those of their stage's buckets, and its gather before theirs. So two
  groups never meet in different orders, should a transport run them one by one;
- reshards go in bucket order too: messages between stages may wait for messages inside a stage, never the other way
  round. Backups are in the owner's stage.

Between membership generations the optimizer has no groups. `reshard` (reshard.py) builds the ranges of new shard maps
next to the old ones, and `commit` replaces the old ones by them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from parallel3d.layers.gradient_sink import WeightGradStore
from parallel3d.layers.init import InitMethod, first_value
from parallel3d.layers.micro_batch import GradPass, MicroBatch
from parallel3d.layers.parameter import ShardedParameter, parameters_of
from parallel3d.optim.bucket import Bucket
from parallel3d.optim.bucket_norms import squared_norm, state_norms
from parallel3d.optim.bucket_plan import BucketPlan, plan_buckets
from parallel3d.optim.optimizer_settings import OptimizerSettings
from parallel3d.optim.reshard import ReshardPlan, move_bucket
from parallel3d.optim.shard_map import ShardMap, ShardMaps
from parallel3d.optim.state_norms import StateNorms
from parallel3d.optim.state_shard import Shard
from parallel3d.optim.update_rules.update_rule import UpdateStep
from parallel3d.parallel.group import AbsentGroup, Group, Work
from parallel3d.parallel.groups import Groups
from parallel3d.parallel.host_numbers import HostNumbers
from parallel3d.parallel.p2p_messages import Header, Kind, Links
from parallel3d.parallel.sharding import TpShard
from parallel3d.precision.fixed_point import ExactSum

InitialShard = Callable[[Bucket, range], Shard]
"""Makes a range of a bucket as a run starts with it: from the seed, or from a checkpoint."""

PhaseHook = Callable[[str], None]
"""Called with the name of each phase of a step or a recovery; faults are injected here."""


class ShardedOptimizer:
    """The optimizer of one rank's stage. Each iteration reduces, updates and gathers.

    `initial` gives the initial weights, by default from the seed. `widest_shard_maps` have as many ranges as any
    that will be.
    """

    def __init__(
        self,
        stage: nn.Module,
        settings: OptimizerSettings,
        *,
        rank: int,
        tp: TpShard,
        widest_shard_maps: ShardMaps,
        initial: InitMethod | None = None,
        weight_grads: WeightGradStore | None = None,
        device: torch.device,
        phase_hook: PhaseHook = lambda phase: None,
    ):
        self.rank = rank
        self._is_sharded = settings.is_sharded
        self._overlap_reduce = settings.overlap_reduce and not settings.sums_terms
        self._overlap_gather = settings.overlap_gather
        self._phase_hook = phase_hook
        self._kernels = settings.updaters.kernels
        parameters = {p.sharding.name: p for p in parameters_of(stage)}
        initial = initial or partial(first_value, parameters, settings.seed, device)
        self.buckets = [
            Bucket(
                plan,
                [parameters[param_slot.name] for param_slot in plan.param_slots],
                settings,
                tp=tp,
                max_ranges=widest_shard_maps.of(plan.key).num_ranges,
                initial=initial,
                weight_grads=weight_grads,
                on_grad_added=partial(self._on_grad_added, index),
                device=device,
            )
            for index, plan in enumerate(_plan_buckets(parameters.values(), settings, tp))
        ]
        uses = Counter(id(p) for module in stage.modules() for p in module.parameters(recurse=False))
        self._num_grads = [sum(uses[id(p)] for p in bucket.parameters) for bucket in self.buckets]
        """Gradients that each bucket gets in a micro-batch: one from each module that uses a parameter."""
        self._stale: set[int] = set()
        """Buckets that were updated and not gathered since: the ranges that others own are out of date."""
        self._first_shard: InitialShard = Bucket.initial_shard
        self._pending: tuple[ReshardPlan, list[list[Shard]]] | None = None
        self._reducing: list[Work] = []
        self._gathering: dict[int, Work] = {}
        self._num_missing_grads: list[int] = []
        self._iteration = 0
        for parameter in parameters.values():
            parameter.first_value = None
        self._register_gather_hooks(stage)

    # --- one iteration --------------------------------------------------------------------------------------------

    def begin_iteration(self, iteration: int, num_micro_batches: int, loss_factor: float = 1.0) -> None:
        """Clears the gradients and all that an earlier iteration left unfinished.

        Each module of this rank will add `num_micro_batches` gradients, multiplied by `loss_factor`, a power of two,
        by which the reduced gradients are divided again.
        """
        self._iteration = iteration
        self._reducing = []
        self._num_missing_grads = [num_grads * num_micro_batches for num_grads in self._num_grads]
        self.is_finite = True
        """Whether all terms of exact sums were finite, which integer totals can't show."""
        for bucket in self.buckets:
            bucket.clear(loss_factor)

    def finalize_micro_batch_grads(self, micro_batch: MicroBatch, grad_pass: GradPass) -> None:
        """Adds the gradients of one micro-batch to the totals where they are a term of their own; called after each
        computation that may have added gradients."""
        finite = [bucket.finalize_micro_batch_grads(micro_batch, grad_pass) for bucket in self.buckets]
        self.is_finite &= all(finite)

    def finish_reduction(self) -> None:
        """Starts the reductions that have not started and waits for all. Afterwards each range here has its reduced
        gradients; a backup has those that its owner sends."""
        self.finish_gather()  # a rank without a micro-batch has not waited for it yet
        while len(self._reducing) < len(self.buckets):
            self._start_reduction()
        self._phase_hook("reduce_scatter")
        for index, (bucket, work) in enumerate(zip(self.buckets, self._reducing)):
            work.wait()
            bucket.finalize_reduced_grads(self._holders_of(bucket))
            backup = self.shard_map_of(bucket).backup_of(self.rank)
            if backup is not None and not self._holders_of(bucket).reduces_parts and len(bucket.owned.grads):
                grads = bucket.owned.grads
                self._links.send(backup, self._header(index, grads), grads, bounded=False)
        self._phase_hook("backup")
        for index, bucket in enumerate(self.buckets):
            shard_map = self.shard_map_of(bucket)
            for shard, number in zip(bucket.shards[1:], shard_map.ranges_of(self.rank)[1:]):
                if self._holders_of(bucket).reduces_parts or not len(shard.grads):
                    continue
                owner = shard_map.holders[number][0]
                shard.grads.copy_(self._links.receive(owner, self._header(index, shard.grads)), non_blocking=True)
        for bucket in self.buckets:
            bucket.gather_matrices(self._groups.tp)

    def squared_norm(self, numbers: HostNumbers) -> Callable[[], ExactSum]:
        """This rank's part of the squared gradient norm, once `numbers` are read: each element of the model counts on
        one rank only."""
        norm = squared_norm(self._counted, self._groups.tp.rank, self._kernels, numbers)

        def read() -> ExactSum:
            total = norm()
            if self._is_sharded:
                self._stale = set()  # the device has given numbers that come after all gathers of the last iteration
            return total

        return read

    def state_norms(self, numbers: HostNumbers) -> Callable[[], StateNorms]:
        """This rank's part of the norms of weights and second moments before the update, counted the same way."""
        return state_norms(self._counted, self._groups.tp.rank, self._kernels, numbers)

    @property
    def _counted(self) -> list[Bucket]:
        """The buckets whose owned range this rank counts in sums over the model: all, or without ZeRO those of which it
        is the first holder."""
        return [bucket for bucket in self.buckets if self._is_sharded or self._holders_of(bucket).rank == 0]

    def update(self, version: int, step: UpdateStep | None) -> None:
        """Updates every range here to `version`, and starts the gathers. None: the iteration updates nothing."""
        for index in reversed(range(len(self.buckets))):  # forward order: the first layers are needed first
            self.update_to(version, step, only=index)
            if self._is_sharded:
                self._gathering[index] = self._start_gather(self.buckets[index])
            self._phase_hook("update")
        self._phase_hook("all_gather")
        self._wait_for([index for index in self._gathering if not self._overlaps_gather_of(self.buckets[index])])

    def update_to(self, version: int, step: UpdateStep | None, *, only: int | None = None) -> None:
        """Applies the update that leads to `version` to every bucket (or one) that has not had it yet."""
        for index in range(len(self.buckets)) if only is None else (only,):
            bucket = self.buckets[index]
            if not bucket.shards:  # a spare has nothing to update
                bucket.version = version
            elif bucket.version < version:
                assert bucket.version == version - 1, f"a range at version {bucket.version} can't become {version}"
                if step is not None:
                    bucket.update(step, version)
                    self._stale |= {index} if self._is_sharded else set()
                bucket.version = version

    def gather(self) -> None:
        """Gathers all weights from their owners, after a change of membership."""
        if self._is_sharded:
            works = [self._start_gather(bucket) for bucket in reversed(self.buckets)]
            for work in works:
                work.wait()
        self._mark_gathered(range(len(self.buckets)))

    def finish_gather(self) -> None:
        """Waits for all gathers."""
        self._wait_for(list(self._gathering))

    def state_bytes(self) -> int:
        return sum(bucket.state_bytes() for bucket in self.buckets)

    def shard_map_of(self, bucket: Bucket) -> ShardMap:
        """The current shard map of a bucket."""
        return self._shard_maps.of(bucket.plan.key)

    @property
    def is_gathered(self) -> bool:
        """Whether all weights are known to be those of `version`, the ranges that others own included."""
        return not self._stale

    @property
    def version(self) -> int:
        """The iteration to which all ranges have been updated."""
        return min(bucket.version for bucket in self.buckets)

    def start_from(self, version: int, initial_shard: InitialShard) -> None:
        """Starts at `version` with the ranges that `initial_shard` makes, such as a checkpoint's.

        The weights that others own are out of date until they are gathered.
        """
        self._first_shard = initial_shard
        for bucket in self.buckets:
            bucket.version = version
        self._stale = set(range(len(self.buckets))) if self._is_sharded else set()

    # --- membership -----------------------------------------------------------------------------------------------

    def reshard(self, change: ReshardPlan, links: Links) -> int:
        """Builds the ranges of the new shard maps next to the old ones; returns the bytes that this rank has received.

        Every live holder of the old maps and every rank of the new ones calls it. State travels bucket by bucket,
        directly from a holder to each rank that lacks it.
        """
        self.discard()
        shards, num_bytes = [], 0
        for index, bucket in enumerate(self.buckets):
            new = change.new.of(bucket.plan.key)
            if change.old is None:
                spans = [bucket.plan.range_of(number, new.num_ranges) for number in new.ranges_of(self.rank)]
                shards.append([self._first_shard(bucket, span) for span in spans])
            else:
                moved, received = move_bucket(
                    bucket, self._number(index), change, rank=self.rank, version=self.version, links=links
                )
                shards.append(moved)
                num_bytes += received
        self._pending = (change, shards)
        return num_bytes

    def commit(self) -> None:
        """Replaces the old shard maps and ranges by the new ones."""
        assert self._pending is not None
        change, shards = self._pending
        self._pending = None
        self._shard_maps = change.new
        for bucket, mine in zip(self.buckets, shards):
            bucket.install_shards(mine, self.shard_map_of(bucket).num_ranges)

    def discard(self) -> None:
        """Drops new ranges that were not committed."""
        self._pending = None

    def reallocate_buffers(self) -> None:
        """Replaces buffers into which an abandoned collective may still write; the gradients are lost."""
        for bucket in self.buckets:
            bucket.reallocate_buffers()

    def join(self, generation: int, groups: Groups[Group], links: Links) -> None:
        """Takes the groups of a new generation."""
        self._generation, self._groups, self._links = generation, groups, links
        self._gathering = {}
        self._reducing = []

    def leave(self) -> None:
        """Releases the groups and work of a generation that has ended."""
        absent = AbsentGroup(name="none", rank=0, ranks=(self.rank,))
        self._groups = Groups(tp=absent, dp=absent, world=absent)
        self._gathering = {}
        self._reducing = []

    # --- reduction ------------------------------------------------------------------------------------------------

    def _header(self, index: int, grads: Tensor) -> Header:
        return Header(
            generation=self._generation,
            iteration=self._iteration,
            kind=Kind.REDUCED,
            micro_batch=self._number(index),
            shape=tuple(grads.shape),
            dtype=grads.dtype,
        )

    def _number(self, index: int) -> int:
        """The number of a bucket in messages, counted from the last, so that both stages give a tied one the same."""
        return len(self.buckets) - 1 - index

    def _holders_of(self, bucket: Bucket) -> Group:
        """The group of the ranks that hold the bucket's parameters."""
        return self._groups.tied if bucket.plan.key.tied else self._groups.dp

    def _on_grad_added(self, index: int) -> None:
        """Counts a gradient of a bucket, and starts the reductions of those that have all of theirs."""
        self._num_missing_grads[index] -= 1
        if not self._overlap_reduce:
            return
        while len(self._reducing) < len(self.buckets) and self._num_missing_grads[len(self._reducing)] == 0:
            self._start_reduction()

    def _start_reduction(self) -> None:
        """Starts the next bucket's reduction; sums partial gradients inside the replica first."""
        bucket = self.buckets[len(self._reducing)]
        bucket.zero_unwritten_grads()
        if bucket.plan.key.partial_grad:
            self._groups.tp.all_reduce(bucket.totals)
        if bucket.plan.key.copies > 1:
            bucket.sum_copies(self._groups.tp)
        holders = self._holders_of(bucket)
        if self._is_sharded:
            self._reducing.append(bucket.reduce_async(holders, self.shard_map_of(bucket).ranges_of(self.rank)))
        else:
            self._reducing.append(holders.all_reduce_async(bucket.totals))

    def _overlaps_gather_of(self, bucket: Bucket) -> bool:
        return self._overlap_gather and self._holders_of(bucket).runs_in_background

    def _start_gather(self, bucket: Bucket) -> Work:
        """Starts to gather a bucket's weights, each range from its owner."""
        return bucket.gather_async(self._holders_of(bucket))

    def _register_gather_hooks(self, stage: nn.Module) -> None:
        """Every module that owns parameters waits for their buckets before its forward pass; one of a user's parts, for
        those of all modules in it."""
        bucket_of = {id(p): i for i, bucket in enumerate(self.buckets) for p in bucket.parameters}
        for module in stage.modules():
            below = getattr(module, "uses_parameters_below", False)
            indices = sorted({bucket_of[id(p)] for p in module.parameters(recurse=below)})
            if indices:
                module.register_forward_pre_hook(lambda _module, _args, indices=indices: self._wait_for(indices))

    def _wait_for(self, indices: list[int]) -> None:
        for index in indices:
            if index in self._gathering:
                self._gathering[index].wait()
                del self._gathering[index]
                self._mark_gathered([index])

    def _mark_gathered(self, indices: Iterable[int]) -> None:
        """Marks buckets as gathered if a wait on their group waits for the data itself, not only for its enqueueing."""
        self._stale -= {index for index in indices if self._holders_of(self.buckets[index]).waits_for_data}


def _plan_buckets(
    parameters: Iterable[ShardedParameter], settings: OptimizerSettings, tp: TpShard
) -> tuple[BucketPlan, ...]:
    """The bucket plans of a stage's parameters."""
    return plan_buckets(
        [parameter.sharding for parameter in parameters],
        tp_size=tp.size,
        bucket_elements=settings.bucket_elements,
        decay_norms_and_biases=settings.updaters.decay_norms_and_biases,
        matrix_wise=settings.updaters.matrix is not None,
    )
