"""A model of ours for lm-evaluation-harness, whose tasks ask for log-likelihoods and for texts.

    from lm_eval import simple_evaluate
    simple_evaluate(model=HarnessModel(computed), tasks=["lambada_openai"])

`parallel3d evaluate MODEL --tasks lambada_openai` does this. The library is imported here and nowhere else.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from parallel3d.data.marked_text import encode_with_special
from parallel3d.data.tokenizer import Tokenizer
from parallel3d.decoding.sampling import SamplingRule
from parallel3d.decoding.texts import Continuation, EndRule, Prompt, cut_at
from parallel3d.errors import DataError
from parallel3d.evaluation.rows import RowScore, ScoredRow, continuation_row, sliding_rows

MAX_NEW_TOKENS = 256
"""Of a text, where a task says nothing."""


class ComputedModel(Protocol):
    """A trained model that computes."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def prefix(self) -> tuple[int, ...]:
        """What stands in front of every text."""
        ...

    @property
    def window(self) -> int:
        """The tokens that it sees."""
        ...

    def score(self, rows: Sequence[ScoredRow]) -> list[RowScore]: ...

    def continue_texts(self, prompts: Sequence[Prompt], sampling: SamplingRule, end: EndRule) -> list[Continuation]: ...


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the library need not be there
    """The library's interface to a model."""

    def __init__(self, model: ComputedModel):
        super().__init__()
        self.model = model

    @property
    def eot_token_id(self) -> int:
        return self.model.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.model.prefix[-1] if self.model.prefix else self.eot_token_id

    @property
    def max_length(self) -> int:
        return self.model.window

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        ids = encode_with_special(string, self.model.tokenizer)
        return ids if add_special_tokens is False else [*self.model.prefix, *ids]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **more: Any
    ) -> list[tuple[float, bool]]:
        """Of contexts that are too long the beginning is left out, as the library's own models do."""
        rows = []
        for (_, text), context, continuation in requests:
            if len(continuation) > self.max_length:
                raise DataError(f"a continuation of {len(continuation):,} tokens: longer than --window ({text[:80]!r})")
            seen = self.max_length + 1 - len(continuation)
            rows.append(continuation_row(context[-seen:], continuation))
        return [(score.log_prob, score.is_greedy) for score in self.model.score(rows)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, each token once, in windows that do not overlap."""
        rows: list[ScoredRow] = []
        for number, request in enumerate(requests):
            tokens = np.array(self.tok_encode(request.args[0], add_special_tokens=False), np.int32)
            window, first = self.max_length, self.prefix_token_id
            rows += sliding_rows(tokens, first=first, window=window, stride=window, group=number)
        sums = [0.0] * len(requests)
        for row, score in zip(rows, self.model.score(rows)):
            sums[row.group] += score.log_prob
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a string that ends them; those that are drawn in one way are computed together."""
        by_settings: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            by_settings[json.dumps(request.args[1], sort_keys=True)].append(number)
        texts = [""] * len(requests)
        for settings, numbers in by_settings.items():
            contexts = [requests[number].args[0] for number in numbers]
            for number, text in zip(numbers, self._continue(contexts, json.loads(settings))):
                texts[number] = text
        return texts

    def _continue(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        until = settings.get("until") or []
        stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
        max_tokens = int(settings.get("max_gen_toks", MAX_NEW_TOKENS))
        if (room := self.max_length - max_tokens) < 1:
            raise DataError(f"a task asks for texts of {max_tokens} tokens: give a --window of more")
        temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
        sampling = SamplingRule(
            temperature=temperature, top_k=settings.get("top_k"), top_p=float(settings.get("top_p", 1.0))
        )
        tokenizer = self.model.tokenizer
        end = EndRule(
            max_tokens=max_tokens, end_ids=frozenset({self.eot_token_id}), stops=stops, decode=tokenizer.decode
        )
        ids = [tuple(self.tok_encode(context)[-room:]) or (self.prefix_token_id,) for context in contexts]
        found = self.model.continue_texts([Prompt(ids=each) for each in ids], sampling, end)
        return [cut_at(tokenizer.decode(text.ids), stops) for text in found]
