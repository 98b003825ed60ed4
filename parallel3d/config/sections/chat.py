"""The configuration's section `data.chat`, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import exists

from parallel3d.config.rule import excludes, rule
from parallel3d.config.sections.section import Section, expand_home
from parallel3d.errors import Problem

CHATML = "chatml"


class ChatConfig(Section):
    """Conversations, of which only the replies are learned: lines of .jsonl files {"messages": [{"role": "user",
    "content": "..."}, {"role": "assistant", "content": "..."}]}, ShareGPT's {"conversations": [{"from": "human",
    "value": "..."}, ...]} or {"prompt": "...", "completion": "..."}; also objects of .json files, and rows of .parquet
    files and saved datasets with these columns."""

    template: str = CHATML
    """The text of a conversation's messages. chatml: <|im_start|>ROLE, a newline, the content, <|im_end|>, a newline.
    Or a Hugging Face folder whose chat_template is used, or a file with such a template (.jinja). Pairs of prompt and
    completion are taken as they are."""
    pack: bool = True
    """Several conversations share a sequence, which needs data.document_mask. false: each has a sequence of its own, of
    which the rest is filled; also for layers of your own (model.module) that keep no documents apart."""


@rule("data.chat", "data.document_mask", "data.slice")
def check_chat(chat: ChatConfig | None, document_mask: bool, part: Section | None) -> Iterator[Problem]:
    """Conversations are kept apart, and come from text."""
    if chat is None:
        return
    value = chat.model_dump()
    if chat.pack and not document_mask:
        rule_text = "needs data.document_mask: conversations share a sequence, and must not see each other"
        fix = "Set data.document_mask to true, or data.chat.pack to false (for layers of your own)"
        yield Problem(field="data.chat", value=value, rule=rule_text, fix=fix)
    if part is not None:
        yield excludes("data.chat", value, "data.slice", part.model_dump(), "a slice is a part of a file of tokens")
    if chat.template != CHATML and not exists(expand_home(chat.template)):
        rule_text = "must be chatml, a Hugging Face folder with a chat_template, or a file with a template"
        yield Problem(field="data.chat.template", value=chat.template, rule=rule_text, fix="Correct the path")
