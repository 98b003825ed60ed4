"""The group of one, and the placeholder of a group between two membership generations."""

import pytest
import torch

from parallel3d.errors import ProtocolError
from parallel3d.parallel.group import AbsentGroup, SoloGroup

CALLS = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(2)),
    "all_reduce_async": lambda group: group.all_reduce_async(torch.ones(2)),
    "all_reduce_max": lambda group: group.all_reduce_max(torch.ones(2)),
    "reduce_scatter": lambda group: group.reduce_scatter(torch.ones(2), torch.ones(2)),
    "reduce_scatter_async": lambda group: group.reduce_scatter_async(torch.ones(2), torch.ones(2)),
    "all_gather": lambda group: group.all_gather(torch.ones(2), torch.ones(2)),
    "all_gather_async": lambda group: group.all_gather_async(torch.ones(2), torch.ones(2)),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_between_two_generations_every_call_is_a_defect(name, size):
    """A group of one would let an interrupted rank continue with its own part as if it were the whole."""
    group = AbsentGroup(name="generation3/dp", rank=0, ranks=tuple(range(size)))
    with pytest.raises(ProtocolError, match="group generation3/dp is used outside of a membership generation"):
        CALLS[name](group)


def test_an_absent_group_still_says_where_the_rank_stands():
    """Layers are built before the first generation, and read only the rank and the size."""
    group = AbsentGroup(name="none", rank=1, ranks=(4, 6))
    assert (group.rank, group.size, group.ranks) == (1, 2, (4, 6))
    assert not group.is_busy
    for nothing in (group.abort, group.close):
        nothing()


def test_a_group_that_gives_a_rank_its_own_part_says_so():
    group = SoloGroup(name="dp", rank=7)
    assert not group.reduces_parts
    with pytest.raises(ProtocolError, match=r"group dp can't reduce \[0\]"):
        group.reduce_parts_async({0: torch.zeros(1)}, torch.zeros(1))


def test_a_group_of_one_is_its_own_sum():
    group = SoloGroup(name="dp", rank=7)
    assert (group.rank, group.size, group.ranks) == (0, 1, (7,))
    mine = torch.tensor([3.0, -1.0])
    assert torch.equal(group.all_reduce(mine.clone()), mine)
    assert torch.equal(group.all_reduce_max(mine.clone()), mine)
    for call in (group.reduce_scatter, group.all_gather):
        output = torch.zeros(2)
        assert call(output, mine) is output and torch.equal(output, mine)
        assert torch.equal(call(mine, mine), torch.tensor([3.0, -1.0]))  # in its place
