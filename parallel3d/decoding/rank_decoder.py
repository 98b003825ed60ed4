"""Continues prompts on one rank: the loop that all ranks of a model's copy run, stage after stage.

Every rank keeps the same account of the texts, since each stage learns the tokens that the last one has chosen. So no
rank has to say what comes next: each computes it from the tokens alone. Texts are spread over as many lanes as there
are stages, and a lane's step is under way on one stage while other lanes are on others::

    stage 0   lane 0   lane 1   lane 0   lane 1        a lane's next step needs the tokens
    stage 1            lane 0   lane 1   lane 0        of its last: they come back from the last stage

A lane takes a new prompt as soon as a row is free; its tokens are computed by themselves, so they do not depend on what
else is in the batch. The rows in use are the first ones: a row that ends is replaced by the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel3d.decoding.sampling import SamplingRule, choose_tokens
from parallel3d.decoding.texts import Continuation, EndRule, Prompt
from parallel3d.layers.kv_cache import CachedTokens, KeyValueCache
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.parallel.p2p_messages import Header, Kind, Links
from parallel3d.random_keys import Key


class ModelStage(Protocol):
    """The layers of one stage."""

    def __call__(self, x: Tensor, micro_batch: MicroBatch) -> Tensor: ...

    def logits(self, x: Tensor, micro_batch: MicroBatch, rows: slice) -> Tensor:
        """(tokens, vocab) of the last stage, for tokens `rows`."""
        ...


@dataclass(frozen=True, kw_only=True)
class PipelinePlace:
    """A rank's stage, and how it reaches the others that hold the same tensor-parallel part."""

    stage: int
    ranks: tuple[int, ...]
    """By stage."""
    links: Links
    hidden_size: int
    dtype: torch.dtype
    """Of the activations between stages."""
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.ranks) - 1


@dataclass(frozen=True, kw_only=True)
class DecodingRule:
    """All that is asked for but the prompts."""

    sampling: SamplingRule
    end: EndRule
    batch_size: int = 8
    """Texts under way at once."""
    uses_cache: bool = True
    """False: every token costs the work of the whole text, for layers that have no cache, and to compare."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step of one lane: the first tokens of a text, or the next one of each of its texts."""

    number: int
    texts: list[Continuation]
    tokens: list[int]
    micro_batch: MicroBatch


@dataclass(kw_only=True, eq=False)
class _Lane:
    cache: KeyValueCache
    texts: list[Continuation] = field(default_factory=list)
    """By row; a text without tokens has not begun."""
    step: _Step | None = None
    """Whose tokens are not known yet."""
    chosen: Tensor | None = None
    """They are, here."""

    @property
    def is_busy(self) -> bool:
        return bool(self.texts)


class RankDecoder:
    """Runs the texts of one copy of the model through one rank's layers.

    `on_token` is called with a text as soon as this rank knows its next token.
    """

    def __init__(
        self,
        stage: ModelStage,
        place: PipelinePlace,
        rule: DecodingRule,
        *,
        on_token: Callable[[Continuation], None] = lambda text: None,
    ):
        self.stage, self.place, self.rule, self.on_token = stage, place, rule, on_token
        self._num_steps = 0
        self._keys: dict[int, Key] = {}

    @torch.inference_mode()
    def run(self, prompts: Sequence[Prompt]) -> list[Continuation]:
        """The texts that continue `prompts`, which are the same on all ranks of the copy."""
        texts = [Continuation(prompt=prompt) for prompt in prompts]
        longest = max((len(prompt.ids) for prompt in prompts), default=0) + self.rule.end.max_tokens
        num_lanes = max(1, min(len(self.place.ranks), len(prompts)))
        num_rows = max(1, min(-(-self.rule.batch_size // num_lanes), -(-len(prompts) // num_lanes)))
        lanes = [_Lane(cache=KeyValueCache(num_rows, longest)) for _ in range(num_lanes)]
        waiting = deque(texts)
        while waiting or any(lane.is_busy for lane in lanes):
            for lane in lanes:
                self._take_turn(lane, waiting)
        return texts

    def _take_turn(self, lane: _Lane, waiting: deque[Continuation]) -> None:
        """Ends the lane's last step and begins its next one."""
        if lane.step is not None:
            self._apply(lane, lane.step, self._chosen(lane, lane.step))
        if waiting and len(lane.texts) < lane.cache.num_rows:
            lane.texts.append(waiting.popleft())
        lane.step = self._next_step(lane)
        lane.chosen = None if lane.step is None else self._compute(lane.step)

    # --- the account, the same on all ranks ------------------------------------------------------------------------

    def _next_step(self, lane: _Lane) -> _Step | None:
        if not lane.texts:
            return None
        self._num_steps += 1
        newest = len(lane.texts) - 1
        if not self.rule.uses_cache:
            shortest = min(range(len(lane.texts)), key=lambda row: len(lane.texts[row].ids))
            return self._whole_step(lane, shortest, cache=None)
        if not lane.texts[newest].ids:
            return self._whole_step(lane, newest, cache=lane.cache)
        lengths = tuple(len(text.prompt.ids) + len(text.ids) - 1 for text in lane.texts)
        micro_batch = CachedTokens(
            seed=0,
            iteration=0,
            slots=tuple(range(len(lengths))),
            sequence_length=1,
            training=False,
            cache=lane.cache,
            lengths=lengths,
            device=self.place.device,
        )
        tokens = [text.ids[-1] for text in lane.texts]
        return _Step(number=self._num_steps, texts=list(lane.texts), tokens=tokens, micro_batch=micro_batch)

    def _whole_step(self, lane: _Lane, row: int, cache: KeyValueCache | None) -> _Step:
        text = lane.texts[row]
        tokens = [*text.prompt.ids, *text.ids]
        common: dict[str, Any] = dict(seed=0, iteration=0, slots=(0,), sequence_length=len(tokens), training=False)
        micro_batch = MicroBatch(**common) if cache is None else CachedTokens(**common, cache=cache, row=row)
        return _Step(number=self._num_steps, texts=[text], tokens=tokens, micro_batch=micro_batch)

    def _apply(self, lane: _Lane, step: _Step, chosen: Tensor) -> None:
        """Adds the chosen tokens to their texts; rows of texts that have ended become free."""
        for text, token, log_prob in zip(step.texts, *chosen.tolist()):
            text.ids.append(int(token))
            text.log_probs.append(log_prob)
            text.reason = self.rule.end.reason(text.ids)
            self.on_token(text)
        for row in reversed(range(len(lane.texts))):
            if lane.texts[row].reason is not None:
                last = len(lane.texts) - 1
                if row < last:
                    lane.cache.move_row(last, row)
                lane.texts[row] = lane.texts[last]
                lane.texts.pop()

    # --- the work ---------------------------------------------------------------------------------------------------

    def _compute(self, step: _Step) -> Tensor | None:
        """Runs a step through this stage; returns the chosen tokens, if this is the last one."""
        place, num_tokens = self.place, len(step.tokens)
        header = self._header(step, Kind.ACTIVATION, (num_tokens, place.hidden_size), place.dtype)
        if place.is_first:
            x = torch.tensor(step.tokens, device=place.device)
        else:
            x = place.links.receive(place.ranks[place.stage - 1], header).to(place.device)
        if not place.is_last:
            place.links.send(place.ranks[place.stage + 1], header, self.stage(x, step.micro_batch))
            return None
        rows = slice(None) if len(step.texts) == num_tokens else slice(num_tokens - 1, None)
        chosen = self._choose(step, self.stage.logits(x, step.micro_batch, rows))
        for rank in place.ranks[:-1]:
            place.links.send(rank, self._tokens_header(step), chosen, bounded=False)
        return chosen

    def _choose(self, step: _Step, logits: Tensor) -> Tensor:
        """(2, texts) float64: tokens, and the logarithms of their probabilities."""
        rule = self.rule.sampling
        keys = [self._key_of(text) for text in step.texts]
        ids, log_probs = choose_tokens(logits, rule, keys, [len(text.ids) for text in step.texts])
        return torch.stack([ids.double(), log_probs]).cpu()

    def _key_of(self, text: Continuation) -> Key:
        if id(text) not in self._keys:
            self._keys[id(text)] = self.rule.sampling.key(text.prompt.ids, text.prompt.sample)
        return self._keys[id(text)]

    def _chosen(self, lane: _Lane, step: _Step) -> Tensor:
        if lane.chosen is not None:
            return lane.chosen
        return self.place.links.receive(self.place.ranks[-1], self._tokens_header(step))

    def _tokens_header(self, step: _Step) -> Header:
        return self._header(step, Kind.TOKENS, (2, len(step.texts)), torch.float64)

    def _header(self, step: _Step, kind: Kind, shape: tuple[int, ...], dtype: torch.dtype) -> Header:
        return Header(generation=0, iteration=step.number, kind=kind, micro_batch=0, shape=shape, dtype=dtype)
