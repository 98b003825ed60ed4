"""The sharded optimizer against torch's AdamW on plain, whole parameters; backups against their owners."""

import itertools

import pytest
import torch

from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.layers.init import initial_value
from parallel3d.layers.parameter import parameters_of
from parallel3d.optim.update_rules.update_rule import UpdateStep
from parallel3d.parallel.p2p_messages import Header, Kind
from parallel3d.parallel.sharding import UNSHARDED, TpShard
from tests.support.optimizer_ranks import (
    NUM_STEPS,
    SEED,
    SHARDINGS,
    Rank,
    backward,
    cut_local,
    gradient,
    reference,
    update_step,
)

LAYOUTS = [*itertools.product((1, 2), (1, 2, 4), (0, 1)), (4, 2, 1)]


def train(tp_size, dp_size, zero_stage, **settings):
    """Returns for each rank the local weights after every step, the squared norms, and the rank itself."""

    def body(number, world):
        rank = Rank(number, world, tp_size=tp_size, dp_size=dp_size, zero_stage=zero_stage, **settings)
        history, norms = [], []
        for step in range(NUM_STEPS):
            rank.reduce(step)
            norms.append(rank.squared_norm())
            rank.optimizer.update(step + 1, update_step(step))
            history.append(rank.weights())
        rank.optimizer.finish_gather()
        return history, norms, rank

    return run_threads(tp_size * dp_size, body)


@pytest.mark.pairwise
@pytest.mark.parametrize("tp_size, dp_size, zero_stage", LAYOUTS)
def test_every_layout_is_adamw_on_the_whole_parameters(tp_size, dp_size, zero_stage):
    expected, _ = reference(dp_size)
    for number, (history, _, _) in enumerate(train(tp_size, dp_size, zero_stage)):
        tp = TpShard(rank=number % tp_size, size=tp_size)
        for step, weights in enumerate(history):
            for sharding in SHARDINGS:
                whole = expected[step][sharding.name]
                ours = weights[sharding.name]
                # fp64, the same sums; one fused formula instead of torch's several: some 1e-16 a step.
                difference = (ours - cut_local(sharding, whole, tp)).abs().max()
                assert difference < 1e-14, (step, sharding.name)


@pytest.mark.pairwise
@pytest.mark.parametrize("tp_size, dp_size, zero_stage", LAYOUTS)
def test_the_norm_counts_every_element_once(tp_size, dp_size, zero_stage):
    _, expected = reference(dp_size)
    results = train(tp_size, dp_size, zero_stage, zero_backups=1)
    for step, total in enumerate(expected):
        assert sum(norms[step] for _, norms, _ in results) == pytest.approx(total.item(), rel=1e-12)


@pytest.mark.parametrize("zero_stage, dp_size", [(0, 4), (1, 1), (1, 2), (1, 4)])
def test_zero_1_shares_the_state_over_the_replicas(zero_stage, dp_size):
    """Each element has two moments of 8 bytes (fp64: no master weights); a range is padded to 64 elements."""
    for _, _, rank in train(1, dp_size, zero_stage):
        num_elements = sum(bucket.plan.num_elements for bucket in rank.buckets)
        num_ranges = dp_size if zero_stage == 1 else 1
        padding = 64 * len(rank.buckets)
        num_bytes = rank.optimizer.state_bytes()
        assert 16 * num_elements / num_ranges <= num_bytes < 16 * (num_elements / num_ranges + padding)
        assert num_bytes == sum(bucket.owned.states.nbytes for bucket in rank.buckets)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("dp_size", [2, 3, 4])
def test_a_backup_doubles_the_state(policy, dp_size):
    for without, with_backup in zip(
        train(1, dp_size, 1, policy=policy), train(1, dp_size, 1, policy=policy, zero_backups=1)
    ):
        assert with_backup[2].optimizer.state_bytes() == 2 * without[2].optimizer.state_bytes()


HOSTS = {
    "one host": lambda rank: "a",
    "two hosts": lambda rank: "ab"[rank % 2],
    "halves": lambda rank: "ab"[rank // 2 % 2],
    "a host each": lambda rank: str(rank),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("dp_size", [2, 3, 4])
@pytest.mark.parametrize("policy", ["fp64", "fp32", "bf16"])
def test_a_backup_is_bitwise_its_owner(policy, dp_size, hosts):
    """Compares master weights and both moments of every bucket after every step."""

    def body(number, world):
        named = {rank: HOSTS[hosts](rank) for rank in range(dp_size)}
        rank = Rank(number, world, tp_size=1, dp_size=dp_size, policy=policy, zero_backups=1, hosts=named)
        states = []
        for step in range(NUM_STEPS):
            rank.step(step)
            states.append(rank.state())
        rank.optimizer.finish_gather()
        return states, rank.shard_maps_on(rank.grid).stage

    results = run_threads(dp_size, body)
    shard_map = results[0][1]
    assert all(len(set(holders)) == 2 for holders in shard_map.holders)
    for step, index in itertools.product(range(NUM_STEPS), range(len(results[0][0][0]))):
        seen = {}
        for owner, backup in shard_map.holders:
            ours, theirs = results[owner][0][step][index], results[backup][0][step][index]
            span, copied = list(ours)[0], list(theirs)[1]  # the owned range comes first
            assert span == copied and torch.equal(ours[span], theirs[span])
            seen[span] = ours[span]
        assert len(seen) == dp_size and any(state[:2].all(dim=0).any() for state in seen.values())


@pytest.mark.pairwise
@pytest.mark.parametrize("zero_stage, zero_backups", [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("overlap_reduce, overlap_gather", [(True, False), (False, True), (True, True)])
def test_neither_overlap_nor_backups_change_a_bit(zero_stage, zero_backups, overlap_reduce, overlap_gather):
    plain = train(2, 2, zero_stage)
    overlapped = train(
        2,
        2,
        zero_stage,
        zero_backups=zero_backups,
        overlap_reduce=overlap_reduce,
        overlap_gather=overlap_gather,
    )
    for (ours, our_norms, _), (theirs, their_norms, _) in zip(overlapped, plain):
        assert our_norms == their_norms
        for mine, yours in zip(ours, theirs):
            assert all(torch.equal(mine[name], yours[name]) for name in yours)


def test_reductions_start_during_the_last_backward_pass_and_only_then():
    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=2, overlap_reduce=True)
        assert len(rank.buckets) > 3
        started = []
        rank.optimizer.begin_iteration(1, 2)
        backward(rank.stage, 0, number, rank.tp_shard)  # the first of two micro-batches
        started.append(len(rank.optimizer._reducing))
        for parameter in reversed(parameters_of(rank.stage)):
            parameter.sink.add(gradient(parameter.sharding, 1, number))
            started.append(len(rank.optimizer._reducing))
        rank.optimizer.finish_reduction()
        return started, len(rank.buckets), rank.squared_norm()

    results = run_threads(2, body)
    (started, num_buckets, _), (other, _, _) = results
    assert started == other == sorted(started)
    assert started[0] == 0 and 0 < started[3] < num_buckets and started[-1] == num_buckets
    sums = [sum(gradient(s, part, number) for part in (0, 1) for number in (0, 1)).square().sum() for s in SHARDINGS]
    assert sum(norm for _, _, norm in results) == pytest.approx(sum(sums).item(), rel=1e-12)


def test_an_iteration_that_broke_off_leaves_nothing_behind():
    """Gradients were added and a reduction had started; the next iteration's result is not affected."""

    def body(number, world, break_off):
        rank = Rank(number, world, tp_size=1, dp_size=2, overlap_reduce=True)
        if break_off:
            rank.optimizer.begin_iteration(1, 1)
            backward(rank.stage, number, 3, rank.tp_shard)
            assert rank.optimizer._reducing
        rank.step(0)
        return rank.weights()

    for ours, theirs in zip(*(run_threads(2, lambda r, w, b=b: body(r, w, b)) for b in (True, False))):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("done", [0, 1, 3])
def test_an_update_is_applied_once_to_every_bucket(done):
    """`done` buckets were updated when the rank left its step: `update_to` updates the others, a second call none."""
    (expected,) = run_threads(1, lambda number, world: two_steps(Rank(number, world, tp_size=1, dp_size=1)))

    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=1)
        assert len(rank.buckets) > 3
        rank.step(0)
        rank.reduce(1)
        for index in range(done):
            rank.optimizer.update_to(2, update_step(1), only=index)
        assert rank.optimizer.version == 1
        for _ in range(3):
            rank.optimizer.update_to(2, update_step(1))
        assert rank.optimizer.version == 2
        return rank.weights()

    (weights,) = run_threads(1, body)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def two_steps(rank):
    rank.step(0)
    rank.step(1)
    return rank.weights()


def test_no_update_is_a_version_too_and_none_may_be_left_out():
    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=1)
        before = rank.weights()
        rank.reduce(0)
        rank.optimizer.update_to(1, None)
        assert rank.optimizer.version == 1
        assert all(torch.equal(rank.weights()[name], before[name]) for name in before)
        with pytest.raises(AssertionError, match="a range at version 1 can't become 3"):
            rank.optimizer.update_to(3, update_step(2))

    run_threads(1, body)


def test_every_rank_holds_its_backups_gradients_before_the_reduction_counts_as_finished():
    """So an entry proves that all gradients are held twice: no norm and no update before the backup has its copy."""

    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=3, zero_backups=1)
        rank.reduce(0)
        return [[(s.span.start, s.grads.clone()) for s in bucket.shards] for bucket in rank.buckets]

    results = run_threads(3, body)
    for number, buckets in enumerate(results):
        for mine, owners in zip(buckets, results[(number + 2) % 3]):  # rank r is the backup of the one before it
            (start, backup), (owned_start, owned) = mine[1], owners[0]
            assert start == owned_start and torch.equal(backup, owned)
    assert any(grads.any() for buckets in results for bucket in buckets for _, grads in bucket)


@pytest.mark.parametrize("zero_stage, zero_backups", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_no_message_is_left_unread(zero_stage, zero_backups):
    """No rank sends gradients to a rank that has reduced them itself."""
    world = ThreadWorld(3)

    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=3, zero_stage=zero_stage, zero_backups=zero_backups)
        for step in range(NUM_STEPS):
            rank.step(step)

    run_threads(3, body, world=world)
    assert not any(world._queues.values())


def test_a_backup_knows_a_message_of_another_bucket():
    """Reduced gradients carry iteration and bucket, so a mix-up is an error instead of a wrong state."""

    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=2, zero_backups=1)
        if number == 1:
            stray = torch.zeros(4, dtype=torch.float64)
            header = Header(generation=0, iteration=9, kind=Kind.REDUCED, micro_batch=0, shape=(4,), dtype=stray.dtype)
            world.links(1).send(0, header, stray)
        rank.reduce(0)

    with pytest.raises(Exception, match="expected reduced of micro-batch .*, iteration 1.*got .*iteration 9"):
        run_threads(2, body)


def test_parameters_and_gradients_are_views_of_their_buckets():
    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=1)
        for bucket in rank.buckets:
            for parameter, param_slot in zip(bucket.parameters, bucket.plan.param_slots):
                assert parameter.sharding.name == param_slot.name
                assert parameter.data_ptr() == bucket.weights[param_slot.offset :].data_ptr()
                assert parameter.main_grad.data_ptr() == bucket.grads[param_slot.offset :].data_ptr()
                initial = initial_value(parameter.sharding, seed=SEED, tp=UNSHARDED)
                assert torch.equal(parameter.detach(), initial.double())

    run_threads(1, body)


@pytest.mark.parametrize("policy, num_bytes", [("bf16", 2 + 4 + 4 + 8), ("bf16_sr", 2 + 2 + 4), ("fp32", 4 + 4 + 8)])
def test_one_replica_needs_no_second_buffer_for_its_gradients(policy, num_bytes):
    """Weights, gradients, master weights where they are copies, two moments; not even at the start, where all shards
    are built before one is installed."""

    def body(number, world):
        optimizer = Rank(number, world, tp_size=1, dp_size=1, zero_stage=1, policy=policy).optimizer
        new = [bucket.empty_shard(range(bucket.plan.length(1))) for bucket in optimizer.buckets]
        held = [(bucket, shard) for bucket in optimizer.buckets for shard in bucket.shards]
        tensors = [t for b, s in held for t in (b.weights, b.grads, b.totals, s.master, s.states, s.grads, s.sums)]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(shard.grads.nbytes + shard.sums.nbytes for shard in new), sum(sizes.values()), optimizer

    ((at_start, in_training, optimizer),) = run_threads(1, body)
    assert at_start == 0
    assert in_training == num_bytes * sum(len(bucket.weights) for bucket in optimizer.buckets)


@pytest.mark.parametrize("dp_size, zero_stage", [(1, 1), (2, 0), (2, 1), (4, 1)])
def test_bf16_weights_are_the_cast_of_fp32_master_weights(dp_size, zero_stage):
    expected, _ = reference(dp_size, dtype=torch.float32)
    for history, _, rank in train(1, dp_size, zero_stage, policy="bf16"):
        masters = {}
        for bucket in rank.buckets:
            assert bucket.owned.master.dtype is torch.float32 and bucket.weights.dtype is torch.bfloat16
            assert torch.equal(bucket.owned.master.bfloat16(), bucket.owned_weights)
            masters |= owned_parts(bucket)
        assert rank.optimizer.state_bytes() == sum(3 * bucket.owned.master.nbytes for bucket in rank.buckets)
        for name, (start, values) in masters.items():
            whole = expected[-1][name].reshape(-1)[start : start + len(values)]
            # fp32 and a fused formula: an ulp or two of weights about 1.
            torch.testing.assert_close(values, whole, rtol=1e-6, atol=1e-6)
        for name, weight in history[-1].items():  # gathered: includes the parts of the others
            torch.testing.assert_close(weight.float(), expected[-1][name], rtol=2**-8, atol=1e-6)


def owned_parts(bucket):
    """Returns name -> (first flat index, master values) for the parameters of which this rank owns a part."""
    parts, owned = {}, bucket.owned
    for param_slot in bucket.plan.param_slots:
        start = max(param_slot.offset, owned.span.start)
        stop = min(param_slot.offset + param_slot.length, owned.span.stop)
        if start < stop:
            parts[param_slot.name] = (start - param_slot.offset, owned.read(start, stop, with_master=True)[2])
    return parts


def test_small_updates_are_not_lost_in_bf16():
    """Ten steps of 1e-4 on a weight of 1, whose next bf16 value is 4e-3 below: the master weights keep them."""

    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=1, policy="bf16")
        for step in range(10):
            rank.optimizer.begin_iteration(step + 1, 1)
            for parameter in parameters_of(rank.stage):
                parameter.sink.buffer.fill_(1.0)
            rank.optimizer.finish_reduction()
            small = UpdateStep(number=step + 1, learning_rate=1e-4, peak_learning_rate=1.0, grad_scale=1.0)
            rank.optimizer.update(step + 1, small)
        (bucket,) = (b for b in rank.buckets if b.plan.param_slots[0].name == "norm")
        return bucket.owned.master[:12].clone(), bucket.weights[:12].clone()

    ((master, weights),) = run_threads(1, body)
    torch.testing.assert_close(master, torch.full((12,), 0.999), rtol=0, atol=1e-6)
    assert torch.equal(weights, torch.ones(12).bfloat16())


@pytest.mark.parametrize("dp_size, zero_stage", [(1, 1), (2, 0), (2, 1)])
def test_an_iteration_without_a_micro_batch_has_no_gradients(dp_size, zero_stage):
    """Those of the iteration before are still in the buffers."""

    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=dp_size, zero_stage=zero_stage)
        largest = []
        for step, has_gradients in enumerate((True, False)):
            rank.optimizer.begin_iteration(step + 1, 1)
            for parameter in parameters_of(rank.stage) if has_gradients else ():
                parameter.sink.add(torch.ones(parameter.shape, dtype=parameter.sink.buffer.dtype))
            rank.optimizer.finish_reduction()
            largest.append(max(bucket.owned.grads.abs().max().item() for bucket in rank.buckets))
        return largest

    assert run_threads(dp_size, body) == [[dp_size, 0.0]] * dp_size
