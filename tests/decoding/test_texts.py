"""When texts end, and what of them is certain while tokens come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.data.conversations import ChatTemplate
from parallel3d.data.tokenizer import ByteTokenizer
from parallel3d.decoding.prompts import PromptEncoder, number_samples, read_prompts
from parallel3d.decoding.texts import Continuation, EndRule, Prompt, TextStream, cut_at
from parallel3d.errors import DataError
from tests.support.tiers import examples

BYTES = ByteTokenizer()
LETTERS = "ab\u00e4\u4e16\U0001f600 "
"""Of one to four bytes."""


def ids(text):
    return BYTES.encode(text).tolist()


def streamed(text, stops=()):
    stream = TextStream(BYTES.decode, stops)
    parts = [stream.add(token) for token in ids(text)]
    return [*parts, stream.end()]


@settings(max_examples=examples(200))
@given(
    st.text(alphabet="ab\u00e4\u4e16\U0001f600 ", max_size=30), st.sampled_from([(), ("ab",), ("aab", "b "), ("ba",)])
)
def test_a_stream_gives_the_whole_text_up_to_a_stop(text, stops):
    parts = streamed(text, stops)
    assert "".join(parts) == cut_at(text, stops)
    assert not any("\ufffd" in part for part in parts)


def test_a_stream_holds_back_no_more_than_it_must():
    assert streamed("xay", stops=("ab",))[:3] == ["x", "", "ay"]
    assert streamed("a\u00e4")[:3] == ["a", "", "\u00e4"]


def test_the_end_of_a_text():
    rule = EndRule(max_tokens=4, end_ids=frozenset({256, 7}), stops=("ab",), decode=BYTES.decode)
    for text, reason in (("x", None), ("xab", "stop"), ("abcd", "stop"), ("xxxx", "length"), ("xxx", None)):
        assert rule.reason(ids(text)) == reason
    assert rule.reason([1, 256]) == rule.reason([7]) == "eos"
    assert rule.reason([1, 2, 3, 7]) == "eos"  # what the model says comes before its greatest length


def test_perplexity_is_that_of_the_mean_logarithm():
    """Once: the exponential of a perplexity would be 7.4 and more."""
    text = Continuation(prompt=Prompt(ids=(1,)), ids=[1, 2], log_probs=[-1.0, -0.3862943611198906])
    assert text.perplexity == pytest.approx(2.0)


def test_prompts_are_lines_or_records():
    lines = ["a text\n", "\n", '{"prompt": "b"}\n', '{"messages": [{"role": "user", "content": "c"}]}\n', "[1]", "{x"]
    found = [*read_prompts(lines, "here")]
    assert found == ["a text", "b", [{"role": "user", "content": "c"}], "[1]", "{x"]
    for wrong in ('{"text": "a"}', '{"prompt": 3}', '{"messages": []}'):
        with pytest.raises(DataError, match="here, line 1"):
            [*read_prompts([wrong], "here")]


def test_tokens_of_prompts():
    plain = PromptEncoder(tokenizer=BYTES, prefix=(5,))
    assert plain.ids("ab") == (5, 97, 98) and plain.ids("") == (5,)
    assert PromptEncoder(tokenizer=BYTES).ids("") == (256,)
    with pytest.raises(DataError, match="--template"):
        PromptEncoder(tokenizer=BYTES, is_chat=True).ids("ab")
    chat = PromptEncoder(tokenizer=BYTES, prefix=(5,), template=ChatTemplate(), is_chat=True)
    text = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    assert chat.ids("ab") == chat.ids([{"role": "user", "content": "ab"}]) == tuple(ids(text))
    assert chat.stops == ("<|im_end|>",) and plain.stops == ()


def test_equal_prompts_have_samples_of_their_own():
    found = number_samples([(1,), (2,), (1,)], 2)
    assert [(prompt.ids, prompt.sample) for prompt in found] == [
        ((1,), 0), ((1,), 1), ((2,), 0), ((2,), 1), ((1,), 2), ((1,), 3)
    ]  # fmt: skip
