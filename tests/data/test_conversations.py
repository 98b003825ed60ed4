"""Conversations: which characters and tokens are targets, templates, and lanes that keep each one whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from parallel3d.data.conversation_files import extract_conversations
from parallel3d.data.conversation_lanes import ConversationLanes
from parallel3d.data.conversations import ChatTemplate, load_template
from parallel3d.data.formats import ConversationLines
from parallel3d.data.hf_loader import HuggingFaceTokenizer, train_byte_level
from parallel3d.data.lanes import Cursor
from parallel3d.data.marked_text import IGNORED, MarkedText, encode_marked, split_targets
from parallel3d.data.tokenizer import ByteTokenizer
from parallel3d.errors import DataError
from tests.support.tiers import examples

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "thanks"},
]
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""Llama 3's own."""


def targets_of(text: MarkedText) -> list[str]:
    return [text[begin:end] for begin, end in text.targets]


def test_chatml():
    text = ChatTemplate().mark({"messages": CHAT}, "here")
    assert targets_of(text) == ["2<|im_end|>\n", "4<|im_end|>\n"]
    assert text == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    )  # what follows the last reply is left out


def test_a_pair():
    text = ChatTemplate().mark({"prompt": "2+2=", "completion": "4"}, "here")
    assert text == "2+2=4" and targets_of(text) == ["4"]


SHAREGPT = [
    {"from": "system", "value": "Be short."},
    {"from": "human", "value": "1+1?"},
    {"from": "gpt", "value": "2"},
    {"from": "user", "value": "2+2?", "weight": 1},
    {"from": "assistant", "value": "4"},
    {"from": "human", "value": "thanks"},
]


@pytest.mark.parametrize("messages", [SHAREGPT, CHAT])
def test_sharegpt(messages: list[dict[str, str]]):
    """Its names of fields and roles, or ours in its list."""
    text, ours = (
        ChatTemplate().mark({name: list_}, "here") for name, list_ in (("conversations", messages), ("messages", CHAT))
    )
    assert text == ours and text.targets == ours.targets


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ({}, "'conversations' must be a list of at least one message"),
        ([3], "message 1 is of type int"),
        ([{"from": "human"}], "'content' of message 1 must be text, and is missing"),
        ([{"value": "4"}], "'role' of message 1 must be text, and is missing"),
        ([{"from": ["gpt"], "value": "4"}], "'role' of message 1 must be text, and is list"),
        ([{"from": "human", "value": "4"}], "no message has the role 'assistant'"),
    ],
)
def test_a_malformed_sharegpt_conversation(messages: object, problem: str):
    with pytest.raises(DataError, match=f"^chat.jsonl:7: {problem}"):
        ChatTemplate().mark({"conversations": messages}, "chat.jsonl:7")


def test_sharegpt_in_every_file(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    record = {"id": "a", "conversations": [{k: each[k] for k in ("from", "value")} for each in SHAREGPT]}
    expected, layout = ChatTemplate().mark(record, "here"), ConversationLines(text_column="", template=ChatTemplate())
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps([record]))
    for kind in ("parquet", "json"):
        with (tmp_path / f"{kind}.jsonl").open("wb+") as lines:
            ((begin, size),) = extract_conversations(tmp_path / f"a.{kind}", kind, layout=layout, target=lines)
        found = layout.read(tmp_path / f"{kind}.jsonl", begin, size)
        assert found == expected and found.targets == expected.targets


def test_a_hugging_face_folder_renders_as_transformers_does(tmp_path: Path):
    from transformers.utils.chat_template_utils import render_jinja_template

    config = {"chat_template": LLAMA3, "bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|eot_id|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = load_template(str(tmp_path)).mark({"messages": CHAT}, "here")
    (theirs,), _ = render_jinja_template([CHAT[:-1]], chat_template=LLAMA3, bos_token="<|begin_of_text|>")
    assert text == theirs
    assert targets_of(text) == ["2<|eot_id|>", "4<|eot_id|>"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('no system role') }}", "ValueError: no system role"),
        ("{% for m in messages %}{{ m.content", "TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "before message 3",
        ),
    ],
)
def test_a_template_that_does_not_work(template: str, expected: str):
    with pytest.raises(DataError, match=expected) as error:
        ChatTemplate(source=template).mark({"messages": CHAT}, "chat.jsonl:7")
    assert str(error.value).startswith("chat.jsonl:7: ")


def test_a_folder_without_a_template(tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="has no chat_template"):
        load_template(str(tmp_path))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match="can't be read"):
        load_template(str(tmp_path))


def test_tokens_are_marked():
    stored = encode_marked(MarkedText("abcde", [(1, 2), (3, 5)]), ByteTokenizer())
    assert stored.dtype == np.int32 and stored.tolist() == [~97, 98, ~99, 100, 101]
    inputs, targets = split_targets(stored[None])
    assert inputs.tolist() == [[97, 98, 99, 100]] and targets.tolist() == [[98, IGNORED, 100, 101]]


def test_special_tokens_of_a_template(tmp_path: Path):
    """<|im_start|> and <|im_end|> are one token each; EOS may stand at the end alone, where the lanes put it."""
    tokenizer = train_byte_level(["some text to learn from"] * 20, 300)
    library = Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    start, end = map(library.token_to_id, ("<|im_start|>", "<|im_end|>"))
    files = {**tokenizer.files, "tokenizer.json": library.to_str().encode()}
    text = ChatTemplate().mark({"messages": CHAT}, "here")

    stored = encode_marked(text, HuggingFaceTokenizer(files, eos_id=tokenizer.eos_id))
    assert (stored == ~start).sum() == 5 and (stored == ~end).sum() == 3 and (stored == end).sum() == 2
    with pytest.raises(DataError, match=r"<\|im_end\|> before its end.*set data\.tokenizer\.eos_id"):
        encode_marked(text, HuggingFaceTokenizer(files, eos_id=end))

    pair = ChatTemplate().mark({"prompt": "2+2=", "completion": "4<|im_end|>\n"}, "here")
    ends_so, ends_otherwise = (
        encode_marked(pair, HuggingFaceTokenizer(files, eos_id=eos)) for eos in (end, tokenizer.eos_id)
    )
    assert end not in ends_so and ends_otherwise.tolist()[: len(ends_so) + 1] == [*ends_so.tolist(), end]


class Numbered:
    """Conversation i is i repeated, the first half of it a prompt."""

    eos_id = 99

    def __init__(self, lengths: list[int]):
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int) -> np.ndarray:
        tokens = np.full(self.lengths[index], index + 1, np.int32)
        tokens[: len(tokens) // 2] = ~tokens[: len(tokens) // 2]
        return tokens


def read_pass(lanes: ConversationLanes, num_tokens: int) -> list[np.ndarray]:
    """The sequences of lane 0's first pass; the last one may begin the next pass."""
    rows, cursor = [], Cursor.start()
    while cursor.epoch == 0:
        row, cursor = lanes.read(0, cursor, num_tokens)
        assert cursor.offset == 0
        rows.append(row)
    return rows


@settings(max_examples=examples(200))
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(4, 16), st.integers(0, 5))
def test_every_conversation_is_whole_in_one_sequence(lengths: list[int], num_tokens: int, seed: int):
    documents = Numbered(lengths)
    lanes = ConversationLanes(documents, seed, 1)
    seen: list[int] = []
    for row in read_pass(lanes, num_tokens):
        assert len(row) == num_tokens + 1
        rest = row.tolist()
        while rest and rest[0] != ~0:  # the filler
            index = (rest[0] if rest[0] >= 0 else ~rest[0]) - 1
            expected = [*documents.tokens(index).tolist(), 99][: num_tokens + 1]
            expected[0] = min(expected[0], ~expected[0])  # never a target
            assert rest[: len(expected)] == expected
            rest = rest[len(expected) :]
            seen.append(index)
        assert all(token == ~0 for token in rest)
    order = lanes.document_sequence(0, 0)
    assert seen[: len(order)] == order  # none lost, none twice


def test_unpacked_each_has_a_sequence_of_its_own():
    lengths = [3, 1, 9, 4]
    lanes = ConversationLanes(Numbered(lengths), seed=0, num_lanes=1, packs=False)
    rows, order = read_pass(lanes, 12), lanes.document_sequence(0, 0)
    assert len(rows) == len(order) == 4
    for index, row in zip(order, rows):
        length = lengths[index]
        ids = np.where(row < 0, ~row, row)
        assert (ids[:length] == index + 1).all() and ids[length] == 99 and (row[length + 1 :] == ~0).all()


def test_a_conversation_longer_than_a_sequence_loses_its_end():
    lanes = ConversationLanes(Numbered([30, 3]), seed=0, num_lanes=1)
    rows = read_pass(lanes, 8)
    long = next(row for row in rows if ~row[0] == 1)
    assert len(rows) == 2 and 99 not in long  # no EOS: it does not end here
