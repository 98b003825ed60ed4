"""The borders of the tensor-parallel region, against sums and concatenations on one rank."""

import pytest
import torch

from parallel3d.inprocess.world import run_threads
from parallel3d.parallel.group import DoneWork
from parallel3d.parallel.tensor_parallel import TensorParallel, reduce_from_tp_region, solo_region

TOKENS, HIDDEN = 8, 3
MODES = [(1, False), (1, True), (2, False), (2, True), (4, False), (4, True)]


def numbers(seed, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(tp_size, sequence_parallel, function):
    """Runs function(tp, rank) on every rank of one region."""

    def body(rank, world):
        group = world.make_group(rank)("tp", tuple(range(tp_size)))
        return function(TensorParallel(group=group, sequence_parallel=sequence_parallel), rank)

    return run_threads(tp_size, body)


def rows(rank, tp_size, sequence_parallel):
    """The tokens that a rank holds outside of the region."""
    size = TOKENS // tp_size if sequence_parallel else TOKENS
    return slice(rank * size, (rank + 1) * size) if sequence_parallel else slice(0, TOKENS)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_leave_sums_forward_and_hands_out_the_whole_gradient_backward(mode):
    """The loss is a weighted sum over the tokens: the same weights are each partial sum's gradient."""
    tp_size, sequence_parallel = mode
    weights = numbers(99, TOKENS, HIDDEN)

    def body(tp, rank):
        partial = numbers(rank, TOKENS, HIDDEN).requires_grad_()
        before = partial.detach().clone()
        total = reduce_from_tp_region(partial, tp)
        (total * weights[rows(rank, *mode)]).sum().backward()
        assert torch.equal(partial.detach(), before)  # a layer's saved activation is not overwritten
        return total.detach(), partial.grad

    expected = sum(numbers(rank, TOKENS, HIDDEN) for rank in range(tp_size))
    for rank, (total, grad) in enumerate(run(*mode, body)):
        torch.testing.assert_close(total, expected[rows(rank, *mode)])
        assert torch.equal(grad, weights)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_gather_and_sum(mode):
    tp_size, sequence_parallel = mode
    whole = numbers(5, TOKENS, HIDDEN)

    def body(tp, rank):
        assert tp.is_token_sharded == (sequence_parallel and tp_size > 1)
        assert tp.num_local_tokens(TOKENS) == TOKENS // (tp_size if sequence_parallel else 1)
        return tp.gather(whole[rows(rank, *mode)]), tp.sum(numbers(rank, TOKENS, HIDDEN))

    expected = sum(numbers(rank, TOKENS, HIDDEN) for rank in range(tp_size))
    for rank, (gathered, total) in enumerate(run(*mode, body)):
        assert torch.equal(gathered, whole)
        torch.testing.assert_close(total, expected[rows(rank, *mode)])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_gather_and_sum_are_conjugate(mode):
    """<gather(x), y> = <x, sum(y)>, where the product of sharded tensors is summed over the ranks."""
    tp_size, sequence_parallel = mode

    def body(tp, rank):
        x = numbers(7, TOKENS, HIDDEN)[rows(rank, *mode)]
        y = numbers(20 + rank, TOKENS, HIDDEN)
        return (tp.gather(x) * y).sum(), (x * tp.sum(y.clone())).sum()

    sides = torch.tensor(run(*mode, body))
    right = sides[:, 1].sum() if sequence_parallel else sides[0, 1]
    torch.testing.assert_close(sides[:, 0].sum(), right)


def test_noncontiguous_inputs():
    """Transposed and strided views are sent with the values that they show."""

    def body(tp, rank):
        x = numbers(rank, HIDDEN, TOKENS).t()[rank::2]
        return tp.gather(x), tp.sum(numbers(rank, HIDDEN, TOKENS).t())

    parts = [numbers(rank, HIDDEN, TOKENS).t() for rank in range(2)]
    for rank, (gathered, total) in enumerate(run(2, True, body)):
        assert torch.equal(gathered, torch.cat([parts[0][0::2], parts[1][1::2]]))
        torch.testing.assert_close(total, (parts[0] + parts[1])[4 * rank : 4 * rank + 4])


def test_both_directions_may_be_under_way_at_once():
    def body(tp, rank):
        part = numbers(rank, TOKENS // 2, HIDDEN)
        whole, gathering = tp.gather_async(part)
        total, summing = tp.sum_async(numbers(rank + 5, TOKENS, HIDDEN))
        summing.wait()
        gathering.wait()
        return whole, total

    (whole, first), (other, second) = run(2, True, body)
    assert torch.equal(whole, torch.cat([numbers(0, 4, HIDDEN), numbers(1, 4, HIDDEN)])) and torch.equal(whole, other)
    torch.testing.assert_close(torch.cat([first, second]), numbers(5, TOKENS, HIDDEN) + numbers(6, TOKENS, HIDDEN))


def test_the_region_of_one_rank_copies_nothing():
    tp = solo_region()
    x = numbers(1, TOKENS, HIDDEN)
    assert tp.gather(x) is x and tp.sum(x) is x
    assert isinstance(tp.gather_async(x)[1], DoneWork)
    assert reduce_from_tp_region(x, tp).data_ptr() == x.data_ptr()
    assert tp.num_local_tokens(TOKENS) == TOKENS and not tp.is_token_sharded
