"""Prompts, the texts that continue them, and when a text ends. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Literal

Reason = Literal["eos", "stop", "length"]
"""Why a text ended: with a token that ends texts, with a given string, or at its greatest length."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The tokens to continue. Equal prompts with equal `sample`s have equal texts."""

    ids: tuple[int, ...]
    sample: int = 0


@dataclass(kw_only=True)
class Continuation:
    """The tokens that follow a prompt, so far."""

    prompt: Prompt
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of each token, by the model itself."""
    reason: Reason | None = None
    """None: it has not ended."""

    @property
    def perplexity(self) -> float:
        """exp(-mean log p) of the model's own tokens."""
        return exp(-sum(self.log_probs) / len(self.log_probs))


@dataclass(frozen=True, kw_only=True)
class EndRule:
    """When a text ends."""

    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    decode: Decode | None = None
    """Gives the text of tokens; needed for `stops`."""

    def reason(self, ids: Sequence[int]) -> Reason | None:
        """Why a text that consists of `ids` has ended with the last of them; None: it goes on."""
        if ids[-1] in self.end_ids:
            return "eos"
        if self.stops and self._has_stop(ids):
            return "stop"
        return "length" if len(ids) >= self.max_tokens else None

    def _has_stop(self, ids: Sequence[int]) -> bool:
        assert self.decode is not None
        # a token may be a single byte of a character: the last of these tokens hold the longest string, and more
        num_last = 4 * max(map(len, self.stops)) + 8
        tail = self.decode(ids[-num_last:])
        return any(stop in tail for stop in self.stops)


def cut_at(text: str, stops: Sequence[str]) -> str:
    """The text before the first of `stops`."""
    found = [text.index(stop) for stop in stops if stop in text]
    return text[: min(found)] if found else text


class TextStream:
    """Gives a text in parts while its tokens come: whole characters, and nothing that could be a part of a stop."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()):
        self._decode, self._stops = decode, stops
        self._ids: list[int] = []
        self._given = self._read = 0
        self._held = ""

    def add(self, token: int) -> str:
        """The characters that are certain now."""
        self._ids.append(token)
        known, text = (self._decode(part) for part in (self._ids[self._given : self._read], self._ids[self._given :]))
        if text.endswith("\ufffd"):  # a character of which bytes are to come
            return ""
        self._given, self._read = self._read, len(self._ids)
        return self._release(text[len(known) :])

    def end(self) -> str:
        """The characters that were held back, once no token follows."""
        known, text = (self._decode(part) for part in (self._ids[self._given : self._read], self._ids[self._given :]))
        rest = cut_at(self._held + text[len(known) :], self._stops)
        self._held = ""
        return rest

    def _release(self, new: str) -> str:
        text = self._held + new
        held = max((len(start) for stop in self._stops for start in _starts_at_end(text, stop)), default=0)
        if any(stop in text for stop in self._stops):
            held = len(text)  # `end` cuts it
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _starts_at_end(text: str, stop: str) -> list[str]:
    """The beginnings of `stop` with which the text ends."""
    return [stop[:length] for length in range(1, len(stop)) if text.endswith(stop[:length])]
