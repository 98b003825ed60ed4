"""A tied embedding in the trainer: when its reduction begins, in what it is added exactly."""

import pytest

from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.trainer.batching import plan_batch
from parallel3d.trainer.build import exact_format
from parallel3d.trainer.context import Transports
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.step import train_step
from tests.support import tiny_runs


@pytest.mark.parametrize("parallel", [dict(dp_size=2), dict(pp_size=2, stage_replicas=[2, 1])], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_all_reductions_have_begun_when_the_backward_pass_ends(parallel, schedule):
    """The tied bucket too, of which a stage that is both ends gets two gradients a micro-batch."""
    config = tiny_runs.make_config(model=dict(tie_word_embeddings=True), parallel=dict(**parallel, schedule=schedule))
    grid = build_grid(config)

    def body(number, world: ThreadWorld):
        transports = Transports(
            make_group=world.make_group(number), links=world.links(number), token=world.tokens[number]
        )
        rank = tiny_runs.build(config, grid, number, transports)
        begun, finish = [], rank.optimizer.finish_reduction

        def noted():
            begun.append(len(rank.optimizer._reducing))
            finish()

        rank.optimizer.finish_reduction = noted
        for _ in range(2):
            train_step(rank)
        rank.optimizer.finish_gather()
        return begun, len(rank.optimizer.buckets)

    for begun, num_buckets in run_threads(len(grid.ranks), body):
        assert begun == [num_buckets] * 2 and num_buckets > 1


def test_head_and_embedding_are_terms_of_their_own():
    """They may come up on different ranks; so each of the two has half of the room."""
    tied, untied = (
        tiny_runs.make_config(model=dict(tie_word_embeddings=on), precision=dict(sums="exact")) for on in (True, False)
    )
    batch = plan_batch(tied, 0)
    for tp_size in (1, 2):
        ours, theirs = exact_format(tied, batch, tp_size), exact_format(untied, batch, tp_size)
        assert ours.shift == theirs.shift and ours.largest == theirs.largest / 2
