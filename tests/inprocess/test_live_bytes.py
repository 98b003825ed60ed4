"""What counts as live memory, and for how long."""

import torch

from parallel3d.inprocess.live_bytes import LiveBytes


def test_memory_counts_once_and_while_it_is_held():
    outside = torch.zeros(1000)
    with LiveBytes() as memory:
        inside = outside + 1
        assert memory.live == 4000
        view = inside.view(10, 100)[2:]
        inside.mul_(2)
        outside.add_(1)
        assert memory.live == memory.peak == 4000
        other = torch.zeros(3, dtype=torch.float64)
        assert memory.live == 4024
        del inside, other
        assert memory.live == 4000  # the view holds it
        del view
        assert memory.live == 0 and memory.peak == 4024


def test_what_autograd_keeps_is_live():
    x = torch.ones(100, requires_grad=True)
    with LiveBytes() as memory:
        y = x.exp().sum()  # exp keeps its result
        assert memory.live == 404
        y.backward()
        del y
        assert memory.live == x.grad.nbytes


def test_an_address_that_is_used_again_counts_again():
    """A tensor from outside dies, and one made inside takes its place."""
    for _ in range(50):
        tensors = [torch.zeros(256) for _ in range(4)]
        with LiveBytes() as memory:
            while tensors:
                tensors.pop().add_(1)
            made = [torch.zeros(256) for _ in range(4)]
            assert memory.live == len(made) * 1024
