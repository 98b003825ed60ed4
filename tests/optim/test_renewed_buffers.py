"""Buffers into which an abandoned collective may still write are replaced, and nothing refers to the old ones."""

import pytest
import torch

from parallel3d.inprocess.world import run_threads
from tests.support.optimizer_ranks import NUM_STEPS, Rank, update_step


def train(dp_size, policy, zero_stage, *, renew, dies=None):
    """Returns weights and state after all steps; before the third, rank `dies` is lost and buffers may be replaced."""

    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=dp_size, zero_stage=zero_stage, zero_backups=1, policy=policy)
        for step in range(NUM_STEPS):
            if step == 2:
                live = [other for other in rank.grid.ranks if other != dies]
                if number == dies:
                    return None
                previous = rank.grid
                rank.optimizer.finish_gather()
                rank.optimizer.leave()
                rank.move(1, previous, live)
                old = [(bucket._weights, bucket._grads) for bucket in rank.buckets]
                if renew:
                    rank.optimizer.reallocate_buffers()
                rank.regroup(1, previous, live)
                if renew:  # a late write
                    for weights, grads in old:
                        weights.fill_(float("nan"))
                        grads.fill_(float("nan"))
            rank.reduce(step)
            rank.optimizer.update(step + 1, update_step(step))
        rank.optimizer.finish_gather()
        state = [tensor for b in rank.buckets for s in b.shards for tensor in (s.master.clone(), s.states.clone())]
        return [module() for module in rank.stage], state

    return run_threads(dp_size, body)


@pytest.mark.pairwise
@pytest.mark.parametrize("dies", [None, 1], ids=["the same members", "one less"])
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize(("dp_size", "zero_stage"), [(2, 1), (3, 1), (3, 0)])
def test_late_writes_reach_nobody(dp_size, zero_stage, policy, dies):
    plain = train(dp_size, policy, zero_stage, renew=False, dies=dies)
    renewed = train(dp_size, policy, zero_stage, renew=True, dies=dies)
    for ours, theirs in zip(renewed, plain):
        if theirs is not None:
            for mine, other in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1])):
                assert torch.equal(mine, other)
