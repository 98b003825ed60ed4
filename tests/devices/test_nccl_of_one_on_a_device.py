"""NCCL's communicator of a single rank: built, used, aborted, closed. With peers it has not been run."""

import time

import pytest
import torch
import torch.distributed as dist

from parallel3d.errors import GenerationEnded
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.nccl_group import NcclGroup
from parallel3d.worker.device import init_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda:0")


def make(token, name="alone"):
    init_device(DEVICE)  # sets NCCL's environment before the first communicator
    return NcclGroup(name=name, rank=0, ranks=(0,), store=dist.HashStore(), token=token, timeout_s=60.0, device=DEVICE)


def test_collectives_of_one_change_nothing_and_close():
    group = make(AbortToken())
    tensor = torch.arange(8.0, device=DEVICE)
    output = torch.empty_like(tensor)
    assert torch.equal(group.all_reduce(tensor.clone()), tensor)
    assert torch.equal(group.reduce_scatter(output, tensor.clone()), tensor)
    assert torch.equal(group.all_gather(torch.empty_like(tensor), tensor), tensor)
    assert torch.equal(group.all_reduce_max(tensor.clone()), tensor)
    group.close()


def test_an_abort_ends_a_group_soon():
    token = AbortToken()
    group = make(token, "aborted")
    group.all_reduce(torch.ones(8, device=DEVICE))
    started = time.monotonic()
    token.abort("rank 1 was killed")
    with pytest.raises(GenerationEnded, match="rank 1 was killed"):
        group.all_reduce(torch.ones(8, device=DEVICE))
    while group.is_busy and time.monotonic() - started < 30:
        time.sleep(0.01)
    assert not group.is_busy
    torch.cuda.synchronize(DEVICE)


def test_another_group_can_be_built_after_an_abort():
    token = AbortToken()
    make(token, "first").all_reduce(torch.ones(2, device=DEVICE))
    token.abort("the generation is over")
    second = make(AbortToken(), "second")
    assert second.all_reduce(torch.ones(2, device=DEVICE)).tolist() == [1.0, 1.0]
    second.close()
