"""Conversations as text: a record of messages (ShareGPT's conversations too), or a prompt and its completion, with the
replies marked as targets.

A reply begins where the template, asked for it, ends the messages before (`add_generation_prompt`), and ends with the
template's end of the message, so that a model learns to stop. What follows the last reply is left out. A Hugging Face
template runs in jinja2's sandbox, as in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from parallel3d.config.sections.chat import CHATML
from parallel3d.data.marked_text import MarkedText
from parallel3d.errors import DataError, shorten

REPLIES = "assistant"
"""The role whose messages are learned."""

SHAREGPT = "conversations"
"""The list of messages in ShareGPT's form: {"from": "human", "value": "..."}."""
SHAREGPT_ROLES = {"human": "user", "gpt": REPLIES, "chatgpt": REPLIES, "bing": REPLIES, "bard": REPLIES}
"""Other names, such as system, user and tool, are roles as they are."""

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""(messages, whether a reply is to follow) -> text"""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """How messages become text; JSON in a corpus, so that every host has the same one."""

    source: str = CHATML
    """chatml, or a template of jinja2."""
    bos: str = ""
    eos: str = ""
    """Token texts that a template may insert."""

    def to_json(self) -> dict[str, str]:
        return {"source": self.source, "bos": self.bos, "eos": self.eos}

    def mark(self, record: Mapping[str, Any], where: str) -> MarkedText:
        """The text of a record. Raises DataError, with `where`, for a malformed one."""
        if "messages" in record:
            return self._mark_messages(check_messages(record["messages"], where), where)
        if SHAREGPT in record:
            return self._mark_messages(check_messages(from_sharegpt(record[SHAREGPT]), where, SHAREGPT), where)
        if "prompt" in record and "completion" in record:
            return mark_pair(record["prompt"], record["completion"], where)
        names = shorten(", ".join(map(repr, record)))
        raise DataError(
            f"{where}: neither 'messages', nor 'conversations', nor 'prompt' and 'completion'; it has {names}"
        )

    def render(self, messages: Sequence[Message], where: str) -> str:
        """The text of `messages` and of the beginning of a reply to them. Raises DataError, with `where`."""
        return self._render(messages, True, where)

    def _mark_messages(self, messages: Sequence[Message], where: str) -> MarkedText:
        replies = [number for number, message in enumerate(messages) if message["role"] == REPLIES]
        if not replies:
            raise DataError(f"{where}: no message has the role {REPLIES!r}: there is nothing to learn")
        text, spans = self._render(messages[: replies[-1] + 1], False, where), []
        for number in replies:
            before = self._render(messages[:number], True, where)
            after = text if number == replies[-1] else self._render(messages[: number + 1], False, where)
            if not after.startswith(before) or not text.startswith(after):
                raise DataError(
                    f"{where}: the template changes the text before message {number + 1} when it is added, so its "
                    "reply can't be marked: use another data.chat.template"
                )
            spans.append((len(before), len(after)))
        return MarkedText(text, spans)

    def _render(self, messages: Sequence[Message], is_reply_next: bool, where: str) -> str:
        if self.source == CHATML:
            return render_chatml(messages, is_reply_next)
        try:
            return compile_template(self.source)(
                messages=messages, add_generation_prompt=is_reply_next, bos_token=self.bos, eos_token=self.eos
            )
        except Exception as error:  # a template may raise anything
            raise DataError(f"{where}: data.chat.template fails ({type(error).__name__}: {error})") from error


def load_template(template: str) -> ChatTemplate:
    """The template that data.chat.template names. Raises DataError where a folder or file has none."""
    if template == CHATML:
        return ChatTemplate()
    path = Path(template).expanduser()
    try:
        if path.is_file():
            return ChatTemplate(source=path.read_text(encoding="utf-8"))
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        own_file = path / "chat_template.jinja"
        source = own_file.read_text(encoding="utf-8") if own_file.exists() else settings.get("chat_template")
    except (OSError, ValueError) as error:
        raise DataError(f"data.chat.template {path}: can't be read ({error})") from error
    if isinstance(source, list):  # several, by name
        source = next((each.get("template") for each in source if each.get("name") == "default"), None)
    if not isinstance(source, str):
        raise DataError(f"data.chat.template {path}: its tokenizer_config.json has no chat_template")
    return ChatTemplate(source=source, bos=_text_of(settings.get("bos_token")), eos=_text_of(settings.get("eos_token")))


def render_chatml(messages: Sequence[Message], is_reply_next: bool) -> str:
    said = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return f"{said}<|im_start|>{REPLIES}\n" if is_reply_next else said


@cache
def compile_template(source: str) -> Callable[..., str]:
    """Compiles a template with what Hugging Face's may use. Raises jinja2's errors."""
    from jinja2.ext import loopcontrols  # torch brings jinja2; most corpora do not need it
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(text: str) -> None:
        raise ValueError(text)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source).render


def from_sharegpt(messages: object) -> object:
    """ShareGPT's messages with our names; some files have "role" and "content" in this list, which stay."""
    if not isinstance(messages, list):
        return messages
    return [_from_sharegpt(message) if isinstance(message, dict) else message for message in messages]


def _from_sharegpt(message: Message) -> Message:
    if "from" not in message and "value" not in message:
        return message
    named = {"role": message["from"]} if "from" in message else {}
    if isinstance(role := named.get("role"), str):
        named["role"] = SHAREGPT_ROLES.get(role, role)
    return named | ({"content": message["value"]} if "value" in message else {})


def check_messages(messages: object, where: str, field: str = "messages") -> Sequence[Message]:
    """Messages with a role and a text each; raises DataError for anything else."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: {field!r} must be a list of at least one message")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise DataError(f"{where}: message {number} is of type {type(message).__name__}, not an object")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                found = type(message[name]).__name__ if name in message else "missing"
                raise DataError(f"{where}: {name!r} of message {number} must be text, and is {found}")
    return messages


def mark_pair(prompt: object, completion: object, where: str) -> MarkedText:
    for name, text in (("prompt", prompt), ("completion", completion)):
        if not isinstance(text, str):
            raise DataError(f"{where}: {name!r} must be text, and is {type(text).__name__}")
    assert isinstance(prompt, str) and isinstance(completion, str)
    if not completion:
        raise DataError(f"{where}: 'completion' is empty: there is nothing to learn")
    return MarkedText(prompt + completion, [(len(prompt), len(prompt) + len(completion))])


def _text_of(token: object) -> str:
    """A special token in tokenizer_config.json: a text, an object with one, or null."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
