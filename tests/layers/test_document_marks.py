"""Documents that attention keeps apart: they are found, later stages receive them, and each is independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.layers import attention
from parallel3d.layers.document_marks import append_document_marks, document_lengths, num_rows, split_document_marks
from parallel3d.layers.parameter import parameters_of
from parallel3d.parallel.tensor_parallel import solo_region
from tests.support.tiny_stages import (
    BATCH,
    SEQ,
    build,
    differences_of_tensor_parallel,
    micro_batch,
    model_config,
    relative,
    tokens,
)

DOCUMENTS = (5, 7, 1, 3, 8)
"""Of two sequences of 12 tokens: the first document that would cross their border is cut there."""


def test_all_layers_share_one_copy_of_the_documents_starts(monkeypatch):
    copies = []
    monkeypatch.setattr(attention, "to_device", lambda starts, device: copies.append(device) or starts)
    attention._document_starts.cache_clear()
    found = [attention._document_starts(DOCUMENTS, torch.device("meta")) for _ in range(3)]
    attention._document_starts.cache_clear()
    assert found[0].tolist() == [0, 5, 12, 13, 16, 24] and len(copies) == 1


def test_an_eos_belongs_to_its_document_and_sequences_cut_documents():
    rows = np.array([[1, 9, 2, 3], [9, 9, 4, 9], [5, 6, 7, 8]])
    assert document_lengths(rows, eos_id=9) == (2, 2, 1, 1, 2, 4)


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4))
def test_every_token_is_in_one_document(rows):
    tokens = np.array(rows)
    ends = np.cumsum(document_lengths(tokens, eos_id=0))
    assert ends[-1] == tokens.size
    assert set(ends - 1) == {*np.flatnonzero(tokens == 0), *range(5, tokens.size, 6)}


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.sampled_from([1, 3, 8, 64]),
    st.integers(1, 4),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_what_stages_are_told_survives_the_way(lengths, hidden_size, num_local, dtype):
    x, documents = torch.randn(num_local, hidden_size).to(dtype), tuple(lengths)
    sent = append_document_marks(x, documents)
    assert sent.shape == (num_local + num_rows(sum(lengths), hidden_size), hidden_size)
    received, told = split_document_marks(sent, sum(lengths))
    assert torch.equal(received, x)
    assert told == documents


def losses_and_gradients(config, batches):
    """The sum of the losses of consecutive parts of the tokens, and the gradients of that sum."""
    stage, (inputs, targets), begin, total = build(config, solo_region()), tokens(config.vocab_size), 0, 0.0
    for batch in batches:
        part = slice(begin, begin + batch.num_tokens)
        loss = stage(inputs[part], batch, targets[part])
        loss.backward()
        begin, total = part.stop, total + loss.item()
    assert begin == BATCH * SEQ
    return total, {p.sharding.name: p.main_grad for p in parameters_of(stage)}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_documents_apart_equal_sequences_of_their_own(architecture, kv_heads):
    config = model_config(architecture=architecture, num_key_value_heads=kv_heads)
    loss, grads = losses_and_gradients(config, [micro_batch(documents=DOCUMENTS)])
    alone = [micro_batch(slots=(0,), sequence_length=length) for length in DOCUMENTS]
    their_loss, their_grads = losses_and_gradients(config, alone)
    assert loss == pytest.approx(their_loss, rel=1e-12)
    for name, grad in their_grads.items():
        assert relative(grads[name], grad) < 1e-11, name
    assert loss != pytest.approx(losses_and_gradients(config, [micro_batch()])[0], rel=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_whole_sequences_as_documents_change_nothing(architecture):
    config = model_config(architecture=architecture)
    loss, grads = losses_and_gradients(config, [micro_batch(documents=(SEQ, SEQ))])
    their_loss, their_grads = losses_and_gradients(config, [micro_batch()])
    assert loss == pytest.approx(their_loss, rel=1e-14)
    assert all(relative(grads[name], grad) < 1e-12 for name, grad in their_grads.items())


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("size, sequence_parallel", [(2, False), (4, True)])
def test_tensor_parallel_equals_one_rank(architecture, size, sequence_parallel):
    """4 ranks have 6 of the 24 tokens each, with borders inside documents."""
    config = model_config(architecture=architecture)
    differences = differences_of_tensor_parallel(config, size, sequence_parallel, micro_batch(documents=DOCUMENTS))
    assert max(differences.values()) < 1e-11, differences
