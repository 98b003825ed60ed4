"""One flat bucket of weights and main gradients, and the update of the ranges that this rank holds.

The buffers have the largest length that the bucket has with any number of replicas, so a reshard moves no parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from parallel3d.accelerator import host_of
from parallel3d.layers.gradient_sink import GradientSink, WeightGradStore
from parallel3d.layers.init import InitMethod
from parallel3d.layers.micro_batch import GradPass, MicroBatch
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.optim.bucket_plan import BucketPlan
from parallel3d.optim.matrices import gather_matrices
from parallel3d.optim.optimizer_settings import OptimizerSettings
from parallel3d.optim.parameter_noise import ParameterNoise
from parallel3d.optim.range_update import RangeUpdate
from parallel3d.optim.state_shard import Shard
from parallel3d.optim.update_rules.update_rule import UpdateRule, UpdateStep
from parallel3d.parallel.group import Group, Work, WorkThen
from parallel3d.parallel.sharding import TpShard
from parallel3d.precision.exact_sums import add_and_clear, write_floats
from parallel3d.precision.stochastic_rounding import add_rounded, round_in_place
from parallel3d.user_code import errors_named


class Bucket:
    """One bucket on this rank. The parameters' data and main gradients are views of its buffers.

    `shards` are the ranges that this rank holds under the current shard map, its own first.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[ShardedParameter],
        settings: OptimizerSettings,
        *,
        tp: TpShard,
        max_ranges: int,
        initial: InitMethod,
        weight_grads: WeightGradStore | None,
        on_grad_added: Callable[[], None],
        device: torch.device,
    ):
        self.plan = plan
        self.parameters = tuple(parameters)
        self.version = 0
        """The iteration to which the shards have been updated."""
        self.shards: list[Shard] = []
        self.fixed = settings.fixed
        """The format of exact sums; None adds gradients as floats."""
        self._policy = settings.policy
        self.updated_norms: Tensor | None = None
        """What the last update measured of the state that the owned range now has; None: nothing."""
        self._noise = ParameterNoise(seed=settings.seed, tp=tp)
        self._update = RangeUpdate.build(plan, self.parameters, settings, self._noise)
        self._measures_updates = settings.measures_norms and settings.fixed is None
        self._unscale = 1.0
        self._num_ranges = 1
        capacity = plan.capacity(max_ranges)
        self._weights = torch.zeros(capacity, dtype=self._policy.compute, device=device)
        self._grads = torch.zeros(capacity, dtype=settings.grad_dtype, device=device)
        self._totals = self._grads
        if settings.sums_terms:
            self._totals = torch.zeros(capacity, dtype=settings.total_dtype, device=device)
        self._sinks = [
            GradientSink(
                view,
                weight_grads=weight_grads,
                on_added=on_grad_added,
                accumulate_in_grad_dtype=self._policy.rounds_accumulation,
                gemm=parameter.gemm,
            )
            for parameter, view in zip(parameters, self._views(self._grads))
        ]
        for parameter, sink in zip(parameters, self._sinks):
            parameter.attach(sink)
        self._initial: Tensor | None = self._initialize_weights(initial, tp)
        self._bind_buffers()

    def _initialize_weights(self, initial: InitMethod, tp: TpShard) -> Tensor:
        """Fills the weights; returns their initial values in the state format, the weights themselves where that is
        theirs, else on the host: a device may have no room for both at the start."""
        values = self._weights
        if self._policy.has_master:
            values = torch.zeros(len(self._weights), dtype=self._policy.state, device=host_of(self._weights.device))
        for parameter, view in zip(self.parameters, self._views(values)):
            view.copy_(initial(parameter.sharding, tp=tp))
        if values is not self._weights:
            self._weights.copy_(values)
        return values

    @property
    def rule(self) -> UpdateRule:
        return self._update.updater.rule

    @property
    def has_master(self) -> bool:
        """Whether master weights are a copy, not the weights themselves."""
        return self._policy.has_master

    @property
    def state_dtype(self) -> torch.dtype:
        return self._policy.state

    def num_rows(self, *, with_master: bool) -> int:
        """Rows that `Shard.read` returns."""
        return len(self.rule.states) + (1 if with_master else 0)

    @property
    def owned(self) -> Shard:
        return self.shards[0]

    @property
    def owned_weights(self) -> Tensor:
        """The owned range of the weights, as the layers see them."""
        return self.weights[self.owned.span]

    def state_bytes(self) -> int:
        """Bytes of states and master weights on this rank."""
        masters = sum(shard.master.nbytes for shard in self.shards) if self.has_master else 0
        return masters + sum(shard.states.nbytes for shard in self.shards)

    def clear(self, loss_factor: float = 1.0) -> None:
        """Forgets all gradients; the next ones will be multiplied by `loss_factor`."""
        self._unscale = 1.0 / loss_factor
        for shard in self.shards:
            shard.gathered = None
        for sink in self._sinks:
            sink.clear()
        if self._totals is not self._grads:
            self._totals.zero_()

    def zero_unwritten_grads(self) -> None:
        """Zeroes the gradients to which nothing was added since `clear`; call it before the flat gradients are read."""
        for sink in self._sinks:
            _ = sink.buffer

    def finalize_micro_batch_grads(self, micro_batch: MicroBatch, grad_pass: GradPass) -> bool:
        """Adds the gradients of one micro-batch to the totals where they are a term of their own; False if the term was
        not finite, which integer totals can't show."""
        # Three cases. Without terms, layers add to the totals themselves. With stochastically rounded accumulation, the
        # fp32 gradients of this micro-batch are rounded into the narrow totals, by noise that depends on the
        # micro-batch and the pass, so that any layout rounds alike. With exact sums, each gradient becomes a multiple
        # of 2**-k, which is added as an integer: in any order, the same total. The last two may come together.
        if self._totals is self._grads:
            return True
        self.zero_unwritten_grads()
        _scale(self.grads, self._unscale)
        if self._policy.rounds_accumulation:
            when = (micro_batch.iteration, micro_batch.slots[0], grad_pass)
            noise = self._noise.of_range(self.plan, self.parameters, 0, "accumulation", *when)
            if self.fixed is None:
                add_rounded(self.totals, self.grads, noise)
                return True
            round_in_place(self.grads, noise)
        assert self.fixed is not None
        return add_and_clear(self.totals, self.grads, self.fixed)

    def finalize_reduced_grads(self, holders: Group) -> None:
        """Computes gradients from the result of the reduction over `holders`."""
        for shard in self._reduced_shards(holders):
            if self.fixed is not None:
                write_floats(shard.grads, shard.sums, self.fixed)
            else:
                _scale(shard.grads, self._unscale)

    def gather_matrices(self, tp: Group) -> None:
        """For a matrix-wise rule, gathers gradients and states over the ranks of the replica, so that the update is
        local."""
        for shard in self.shards if self.plan.key.is_matrix_wise else ():
            if len(shard.grads):
                shard.gathered = gather_matrices(shard.grads, shard.states, tp)

    def counted(self, tp_rank: int) -> list[slice]:
        """The parts of the owned range that rank `tp_rank` counts in sums over the model."""
        span = range(self.owned.span.start, self.owned.span.stop)
        counted = self.plan.counted(span, tp_rank)
        return [slice(part.start - span.start, part.stop - span.start) for part in counted]

    def sum_copies(self, tp: Group) -> None:
        """Sums the gradients of elements that several tensor-parallel ranks hold, over those ranks.

        All add the same parts in the same order, so the copies stay bitwise equal.
        """
        spans, copies = self.plan.shared, self.plan.key.copies
        mine = torch.cat([self.totals[span.start : span.stop] for span in spans])
        parts = tp.all_gather(mine.new_empty(tp.size * len(mine)), mine).view(tp.size, -1)
        total, *others = parts[tp.rank // copies * copies :][:copies]
        for other in others:
            total += other
        for span, part in zip(spans, total.split([len(span) for span in spans])):
            self.totals[span.start : span.stop] = part

    def update(self, step: UpdateStep, iteration: int) -> None:
        """Makes one step on every range that this rank holds; `iteration` keys the rounding noise."""
        for shard in self.shards:
            measures, weights = shard is self.owned and self._measures_updates, self.weights[shard.span]
            with errors_named(f"optimizer.kind {self.rule.name}", self.rule):
                measured = self._update.update(shard, weights, step, iteration, measures=measures)
            self.updated_norms = measured if shard is self.owned else self.updated_norms

    def copy_master_to_weights(self) -> None:
        """Copies the master weights of this rank's ranges to the weights, if they are copies."""
        for shard in self.shards:
            if self._policy.has_master:
                self.weights[shard.span].copy_(shard.master)

    # --- collectives ----------------------------------------------------------------------------------------------

    def reduce_async(self, holders: Group, numbers: Sequence[int]) -> Work:
        """Reduces the totals over `holders`, each range to its owner, and to its backup where the group can.

        `numbers` are those of the ranges that this rank holds, its own first.
        """
        # Ranges of matrices end at parameter borders and differ in length, and collectives need equal parts. So they
        # are padded to the longest, and the result is copied to its place when the work is waited for.
        shards = self._reduced_shards(holders)
        if not self.plan.key.is_matrix_wise or self._num_ranges == 1:
            return _reduce(holders, {number: shard.sums for number, shard in zip(numbers, shards)}, self.totals)
        ranges = self._padded_ranges(self.totals)
        sums = {number: ranges.new_empty(ranges.shape[1]) for number, _ in zip(numbers, shards)}

        def write() -> None:
            for number, shard in zip(numbers, shards):
                shard.sums.copy_(sums[number][: len(shard.sums)])

        return WorkThen(_reduce(holders, sums, ranges.view(-1)), write)

    def _reduced_shards(self, holders: Group) -> list[Shard]:
        """The shards here whose gradients the reduction over `holders` gives; of the others, the owner sends them."""
        return self.shards if holders.reduces_parts else self.shards[:1]

    def gather_async(self, holders: Group) -> Work:
        """Gathers the weights over `holders`, each range from its owner."""
        if not self.plan.key.is_matrix_wise or self._num_ranges == 1:
            return holders.all_gather_async(self.weights, self.owned_weights)
        ranges, weights, spans = self._padded_ranges(self.weights), self.weights, self._ranges()

        def write() -> None:
            for values, span in zip(ranges, spans):
                weights[span.start : span.stop] = values[: len(span)]

        return WorkThen(holders.all_gather_async(ranges.view(-1), ranges[holders.rank].clone()), write)

    def _ranges(self) -> list[range]:
        return [self.plan.range_of(number, self._num_ranges) for number in range(self._num_ranges)]

    def _padded_ranges(self, flat: Tensor) -> Tensor:
        """(num_ranges, longest): the ranges of `flat`, each padded to the longest."""
        spans = self._ranges()
        padded = flat.new_zeros(len(spans), max(len(span) for span in spans))
        for row, span in zip(padded, spans):
            row[: len(span)] = flat[span.start : span.stop]
        return padded

    # --- shards ---------------------------------------------------------------------------------------------------

    def initial_shard(self, span: range) -> Shard:
        """A range as the run starts with it: initial weights, states of zero."""
        assert self._initial is not None, "the initial weights are gone"
        shard = self.empty_shard(span)
        shard.master.copy_(self._initial[shard.span])
        shard.states.zero_()
        return shard

    def empty_shard(self, span: range) -> Shard:
        """A range whose state is to be received; padding, which is never sent, is zeroed.

        Its master may be a view of the weights. It may be written before the new shard map is committed: each holder of
        the range has these same weights.
        """
        part = self._weights[span.start : span.stop]
        master = part.to(self._policy.state) if self._policy.has_master else part
        states = master.new_empty((len(self.rule.states), len(span)))
        states[:, max(0, self.plan.num_elements - span.start) :] = 0
        return Shard(span, master=master, states=states, grad_dtype=self._policy.grad)

    def install_shards(self, shards: list[Shard], num_ranges: int) -> None:
        """Commits the shards of a new shard map with `num_ranges` ranges; none on a rank that holds nothing."""
        self.shards = shards
        self._initial = None
        self._num_ranges = num_ranges
        self.updated_norms = None
        for shard in shards:
            shard.pieces = self._update.pieces(range(shard.span.start, shard.span.stop))
            self._allocate_grads(shard)
        self._bind_buffers()
        self.copy_master_to_weights()

    def _allocate_grads(self, shard: Shard) -> None:
        """Allocates what the reduction into a shard needs and the bucket's own buffers, with one range, don't serve."""
        is_in_place, length = self._num_ranges == 1, len(shard.master)
        if len(shard.grads) < length and not (is_in_place and self.fixed is None):
            shard.grads = torch.zeros_like(shard.master, dtype=self._policy.grad)
            shard.sums = shard.grads
        if not is_in_place and self.fixed is not None and shard.sums.dtype != torch.int64:
            shard.sums = torch.zeros_like(shard.master, dtype=torch.int64)

    def reallocate_buffers(self) -> None:
        """Replaces the buffers by copies: an abandoned collective may still write into the old ones."""
        self._weights = self._weights.clone()
        is_exact = self._totals is not self._grads
        self._grads = torch.zeros_like(self._grads)
        self._totals = torch.zeros_like(self._totals) if is_exact else self._grads
        self._bind_buffers()

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        """The part of `flat` that belongs to each parameter, in the parameter's shape."""
        for slot in self.plan.param_slots:
            yield flat[slot.offset : slot.offset + slot.length].view(slot.shape)

    def _bind_buffers(self) -> None:
        """Points all views (parameters, sinks, shards) at the current buffers, at the current length."""
        length = self.plan.length(self._num_ranges)
        self.weights, self.grads, self.totals = self._weights[:length], self._grads[:length], self._totals[:length]
        for parameter, weight_view in zip(self.parameters, self._views(self._weights)):
            parameter.data = weight_view
        for sink, grad_view in zip(self._sinks, self._views(self._grads)):
            sink.rebind(grad_view)
        for shard in self.shards:
            if not self._policy.has_master:
                shard.master = self._weights[shard.span]
        if self.shards and self._num_ranges == 1:  # reduced in place
            self.owned.sums = self.totals
            self.owned.grads = self.totals if self.fixed is None else self.owned.grads


def _reduce(holders: Group, outputs: Mapping[int, Tensor], tensor: Tensor) -> Work:
    if holders.reduces_parts:
        return holders.reduce_parts_async(outputs, tensor)
    [own] = outputs.values()
    return holders.reduce_scatter_async(own, tensor)


def _scale(grads: Tensor, factor: float) -> None:
    if factor != 1.0:
        grads.mul_(factor)
