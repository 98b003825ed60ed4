"""One process against a training loop of nothing but torch: what all layouts are compared with is itself right."""

import pytest
import torch

from parallel3d.comparison.compare_runs import largest_difference
from parallel3d.data.lanes import Cursor
from tests.support import plain_gpt2, plain_llama, tiny_runs

PLAIN_LOSS = {"llama": plain_llama.plain_loss, "gpt2": plain_gpt2.plain_loss}


def plain_run(config, initial, num_steps):
    """Losses, gradient norms before clipping and final weights of a plain training loop."""
    weights = {name: value.clone().requires_grad_() for name, value in initial.items()}
    small = ("norm.weight", "bias")
    decayed = [weight for name, weight in weights.items() if not name.endswith(small)]
    others = [weight for name, weight in weights.items() if name.endswith(small)]
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    lanes, seq = tiny_runs.topic_lanes(config), config.batch.sequence_length
    slots = range(config.batch.global_batch_size)
    streams = [lanes.read(slot, Cursor.start(), num_steps * seq)[0] for slot in slots]  # each lane in one piece
    losses, norms = [], []
    for step in range(num_steps):
        rows = torch.tensor([stream[step * seq : (step + 1) * seq + 1].tolist() for stream in streams])
        loss_sum = PLAIN_LOSS[config.model.architecture](config.model, weights, rows[:, :-1], rows[:, 1:])
        loss = loss_sum / (len(slots) * seq)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), config.optimizer.max_grad_norm).item())
        for group in optimizer.param_groups:  # two steps of warmup, the third at the end of the cosine: a tenth
            group["lr"] = config.optimizer.learning_rate * (0.5, 1.0, 0.1)[step]
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.each_value
@pytest.mark.parametrize("architecture", PLAIN_LOSS)
@pytest.mark.parametrize("max_grad_norm", [0.5, 1e9])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("parallel", [{}, dict(tp_size=2, pp_size=2, dp_size=2, sequence_parallel=True)])
def test_three_steps_of_a_plain_loop(parallel, tied, max_grad_norm, architecture):
    """fp64, 1e-9: the same arithmetic in another order; both clip with 1e-6 in the divisor."""
    changes = dict(
        parallel=parallel,
        model=dict(architecture=architecture, num_key_value_heads=2, qkv_bias=False, tie_word_embeddings=tied),
        optimizer=dict(learning_rate=1e-2, max_grad_norm=max_grad_norm),
    )
    ours = tiny_runs.train_in_threads(**changes)
    assert ("head.weight" in ours.initial) is not tied
    losses, norms, weights = plain_run(tiny_runs.make_config(**changes), ours.initial, 3)
    assert norms[0] > 0.5  # the smaller limit clips
    assert ours.losses == pytest.approx(losses, rel=1e-11)
    assert ours.grad_norms == pytest.approx(norms, rel=1e-10)
    difference, name = largest_difference(ours.weights, weights)
    assert difference < 1e-9, name
