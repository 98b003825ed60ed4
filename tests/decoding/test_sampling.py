"""Temperature, top-k and top-p by their definitions; draws have the frequencies of their probabilities."""

from __future__ import annotations

import pytest
import torch

from parallel3d.decoding.sampling import SamplingRule, choose_tokens, token_probabilities

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.0], [0.0, 3.0, 0.0, 0.0, -9.0]])


def draws(rule, num, logits=LOGITS[:1]):
    rows = logits.expand(num, -1) if len(logits) == 1 else logits
    ids, _ = choose_tokens(rows, rule, [rule.key((1, 2), 0)] * num, list(range(num)))
    return ids


def test_temperature_zero_is_the_likeliest_whatever_else_is_asked():
    rule = SamplingRule(temperature=0.0, top_k=1000, top_p=0.1, seed=5)
    assert choose_tokens(LOGITS, rule, [], [])[0].tolist() == [0, 1]


def test_probabilities():
    plain = torch.softmax(LOGITS.double(), -1)
    assert torch.allclose(token_probabilities(LOGITS, SamplingRule(temperature=1.0)), plain)
    hot = token_probabilities(LOGITS, SamplingRule(temperature=2.0))
    assert torch.allclose(hot, torch.softmax(LOGITS.double() / 2, -1))


@pytest.mark.parametrize("top_k, kept", [(1, [0]), (2, [0, 1, 4]), (3, [0, 1, 4]), (4, [0, 1, 2, 4]), (9, range(5))])
def test_top_k_hides_all_others(top_k, kept):
    """Tokens 1 and 4 are equally likely: both or none."""
    found = token_probabilities(LOGITS[:1], SamplingRule(temperature=1.0, top_k=top_k))[0]
    right = torch.zeros(5, dtype=torch.float64)
    right[list(kept)] = torch.softmax(LOGITS[0, list(kept)].double(), -1)
    assert torch.allclose(found, right)
    assert set(draws(SamplingRule(temperature=1.0, top_k=top_k), 500).tolist()) == set(kept)


@pytest.mark.parametrize("top_p, num_kept", [(0.01, 1), (0.56, 2), (0.76, 3), (0.97, 4), (0.999, 5)])
def test_top_p_keeps_the_fewest_that_add_up_to_it(top_p, num_kept):
    """Sorted probabilities: 0.552, 0.203, 0.203, 0.075 and 0.028, over 1.0."""
    found = token_probabilities(LOGITS[:1], SamplingRule(temperature=1.0, top_p=top_p))[0]
    plain = torch.softmax(LOGITS[0].double(), -1)
    kept = plain.sort(descending=True, stable=True).indices[:num_kept]
    right = torch.zeros_like(plain)
    right[kept] = plain[kept] / plain[kept].sum()
    assert torch.allclose(found, right)


def test_top_p_is_transformers():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(1)) * 3
    for top_k, top_p in ((300, 0.9), (20, 0.7), (5, 1.0), (300, 0.05)):
        theirs = TopKLogitsWarper(top_k)(None, TemperatureLogitsWarper(0.8)(None, logits))
        theirs = torch.softmax(TopPLogitsWarper(top_p)(None, theirs) if top_p < 1 else theirs, -1)
        ours = token_probabilities(logits, SamplingRule(temperature=0.8, top_k=top_k, top_p=top_p))
        assert torch.allclose(ours.float(), theirs, atol=1e-6)


def test_draws_have_the_probabilities():
    """20,000 draws: a standard deviation is below 0.0036."""
    found = torch.bincount(draws(SamplingRule(temperature=1.0, seed=1), 20_000), minlength=5) / 20_000
    assert (found - torch.softmax(LOGITS[0], -1)).abs().max() < 0.015


def test_a_draw_is_a_function_of_seed_prompt_sample_and_position():
    logits = torch.zeros(1, 1000)
    first = SamplingRule(temperature=1.0, seed=1)

    def draw(rule, prompt, sample, position):
        return int(choose_tokens(logits, rule, [rule.key(prompt, sample)], [position])[0])

    other = SamplingRule(temperature=1.0, seed=2)
    keys = [(first, (1, 2), 0, 0), (other, (1, 2), 0, 0), (first, (1, 3), 0, 0), (first, (1, 2), 1, 0)]
    keys.append((first, (1, 2), 0, 1))
    assert len({draw(*key) for key in keys}) == len(keys)
    assert [draw(*key) for key in keys] == [draw(*key) for key in keys]


def test_log_probabilities_are_the_models_own():
    """Not those after temperature and top-k, which would make every perplexity small."""
    rule = SamplingRule(temperature=0.5, top_k=1)
    ids, log_probs = choose_tokens(LOGITS, rule, [rule.key((1,), 0)] * 2, [0, 0])
    right = torch.log_softmax(LOGITS.double(), -1)[[0, 1], ids]
    assert torch.allclose(log_probs, right, atol=1e-6)
