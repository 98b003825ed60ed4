"""Prompts as tokens: plain text, or conversations in the template that the tokenizer comes with.

The names of special tokens in a prompt are these tokens, as for transformers: a prompt is the user's own text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel3d.config.sections.chat import CHATML
from parallel3d.data.conversations import ChatTemplate, check_messages, load_template
from parallel3d.data.marked_text import encode_with_special
from parallel3d.data.tokenizer import Tokenizer
from parallel3d.decoding.texts import Prompt
from parallel3d.errors import DataError

CHATML_END = "<|im_end|>"
PromptRecord = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation."""


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """Makes tokens of prompts."""

    tokenizer: Tokenizer
    prefix: tuple[int, ...] = ()
    """What stands in front of every plain text, as in the model's training."""
    template: ChatTemplate | None = None
    """None: there is none, and conversations are refused."""
    is_chat: bool = False
    """Whether a plain text is a user's message."""
    system: Sequence[Mapping[str, str]] = field(default_factory=tuple)
    """Messages in front of it."""

    def ids(self, record: PromptRecord) -> tuple[int, ...]:
        """The tokens of one prompt, at least one. Raises DataError."""
        if isinstance(record, str) and not self.is_chat:
            found = (*self.prefix, *encode_with_special(record, self.tokenizer))
            return found or (self.tokenizer.eos_id,)  # documents begin after it
        if self.template is None:
            raise DataError("a conversation needs a template, which this tokenizer lacks: give --template")
        messages = [*self.system, {"role": "user", "content": record}] if isinstance(record, str) else record
        text = self.template.render(messages, "a prompt")
        return tuple(encode_with_special(text, self.tokenizer))

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end replies: of ChatML, where they are not tokens."""
        return (CHATML_END,) if self.template is not None and self.template.source == CHATML else ()


def number_samples(ids: Iterable[tuple[int, ...]], num_samples: int) -> list[Prompt]:
    """`num_samples` prompts for each; equal ones are numbered, so that each has draws of its own."""
    seen: Counter[tuple[int, ...]] = Counter()
    prompts = []
    for each in ids:
        for _ in range(num_samples):
            prompts.append(Prompt(ids=each, sample=seen[each]))
            seen[each] += 1
    return prompts


def read_prompts(lines: Iterable[str], where: str) -> Iterator[PromptRecord]:
    """A prompt for each line: {"prompt": text}, {"messages": [...]}, or the line itself as text; empty lines are left
    out. Raises DataError."""
    for number, line in enumerate(lines, start=1):
        if text := line.rstrip("\n"):
            yield _parse_line(text, f"{where}, line {number}")


def _parse_line(line: str, where: str) -> PromptRecord:
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict):
        return line
    if "messages" in record:
        return check_messages(record["messages"], where)
    prompt = record.get("prompt")
    if not isinstance(prompt, str):
        raise DataError(f"{where}: neither 'prompt', which is text, nor 'messages'")
    return prompt


def find_template(named: str | None, folder: Path, trained_with: str | None) -> ChatTemplate | None:
    """The template of conversations: the one that is named, the folder's own, or that of the model's training."""
    if named is not None:
        return load_template(named)
    if (folder / "tokenizer_config.json").is_file():
        try:
            return load_template(str(folder))
        except DataError:  # it has a tokenizer without a template
            pass
    return None if trained_with is None else load_template(trained_with)
