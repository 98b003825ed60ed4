"""How long sequences are and how many a step has, as functions of what lies behind the step. Pure.

Sequence-length warmup (Li, Zhang and He 2022, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup
for Training GPT Models") begins with short sequences, batch-size warmup (GPT-3) with few. Both are a pace: a value at
each position, a position being the number of the step, or of the step's first token, counted from 1.

    Polynomial    first + (last - first) * min(position / duration, 1) ** exponent, down to a multiple: linear and root
    Discrete    sizes[i] up to position until[i], the last one ever after: Shortformer has two
    Periodic     the same over and over: the paper's Figure 2
    Adaptive  a multiple more while the validation perplexity stays near its best
    Custom    a function of the user's

The paper's root has the exponent itself, DeepSpeed's `root_degree` its inverse. Polynomial and Discrete equal
DeepSpeed's curriculum scheduler at every position, whose first step is 1 too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import floor, inf, isfinite, log
from typing import Any, Literal, Protocol

from parallel3d.errors import UserError

SizeUnit = Literal["steps", "tokens"]


class SizeSchedule(Protocol):
    """A size that follows the run."""

    def at(self, position: int) -> int:
        """The value at `position`, 1 being the first."""

    def constant_until(self, position: int) -> float:
        """A position up to and with which the value stays as it is at `position`; infinite if it never changes."""

    def values(self) -> tuple[int, ...]:
        """All values that it may take, in increasing order; empty where nobody knows."""


@dataclass(frozen=True)
class Constant:
    """No warmup."""

    value: int

    def at(self, position: int) -> int:
        return self.value

    def constant_until(self, position: int) -> float:
        return inf

    def values(self) -> tuple[int, ...]:
        return (self.value,)


@dataclass(frozen=True, kw_only=True)
class Polynomial:
    """From `first` to `last`, both multiples of `multiple`, which are reached at position `over`."""

    first: int
    last: int
    duration: int
    multiple: int
    exponent: float = 1.0

    def at(self, position: int) -> int:
        share = min(position / self.duration, 1.0) ** self.exponent
        value = floor(share * (self.last - self.first) + self.first)
        return value - value % self.multiple

    def constant_until(self, position: int) -> float:
        value = self.at(position)
        return inf if value == self.last else bisect_right(range(self.duration), value, lo=position, key=self.at) - 1

    def values(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.last + 1, self.multiple))


@dataclass(frozen=True, kw_only=True)
class Discrete:
    """`sizes[i]` up to and with position `until[i]`; one size more than ends."""

    sizes: tuple[int, ...]
    until: tuple[int, ...]

    def at(self, position: int) -> int:
        return self.sizes[bisect_left(self.until, position)]

    def constant_until(self, position: int) -> float:
        return (*self.until, inf)[bisect_left(self.until, position)]

    def values(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.sizes)))


@dataclass(frozen=True, kw_only=True)
class Periodic:
    """`sizes[i]` up to and with position `until[i]`, then again from the start; as many sizes as ends."""

    sizes: tuple[int, ...]
    until: tuple[int, ...]

    def at(self, position: int) -> int:
        return self.sizes[self._index(position)]

    def constant_until(self, position: int) -> float:
        periods = (position - 1) // self.until[-1]
        return periods * self.until[-1] + self.until[self._index(position)]

    def _index(self, position: int) -> int:
        return bisect_left(self.until, (position - 1) % self.until[-1] + 1)

    def values(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.sizes)))


@dataclass(frozen=True, kw_only=True)
class Custom:
    """The user's function of the position; what it gives is checked."""

    function: Callable[[int], int]
    name: str
    last: int
    multiple: int

    def at(self, position: int) -> int:
        """UserError where the function gives no multiple of `multiple` between that and `last`."""
        value = self.function(position)
        if type(value) is not int or not 0 < value <= self.last or value % self.multiple:
            raise UserError(
                f"warmup.sequence_length.function = {self.name!r}: gives {value!r} for {position}, and a length must be"
                f" a multiple of {self.multiple} from {self.multiple} to {self.last}"
            )
        return value

    def constant_until(self, position: int) -> float:
        return position

    def values(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """A multiple longer after each evaluation whose perplexity is at most `tolerance` x the best one before, a multiple
    shorter (or as long as it is) after any other.

    The rule is ours: the paper tried pacing by losses, gives no formula, and calls 1.3 x the best perplexity a
    significant fluctuation. Evaluations are the same on all ranks, so lengths are.
    """

    first: int
    last: int
    multiple: int
    tolerance: float = 1.3
    shrinks: bool = True
    value: int
    best_loss: float = inf
    """Lowest evaluation loss so far, in nats a token."""

    def at(self, position: int) -> int:
        return self.value

    def constant_until(self, position: int) -> float:
        return position

    def values(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.last + 1, self.multiple))

    def after_evaluation(self, loss: float) -> Adaptive:
        """The pace once an evaluation has given `loss`."""
        is_near = isfinite(loss) and (self.best_loss == inf or loss - self.best_loss <= log(self.tolerance))
        change = self.multiple if is_near else -self.multiple if self.shrinks else 0
        value = min(max(self.value + change, self.first), self.last)
        return replace(self, value=value, best_loss=min(self.best_loss, loss) if isfinite(loss) else self.best_loss)


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """What a step trains on."""

    num_sequences: int
    """The first so many slots; the other lanes stand still."""
    sequence_length: int
    read_length: int
    """Tokens that each of these lanes moves on by: what is beyond the sequence's length is dropped."""

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.sequence_length

    @property
    def num_dropped_tokens(self) -> int:
        return self.num_sequences * (self.read_length - self.sequence_length)


@dataclass(frozen=True, kw_only=True)
class BatchShapeSchedule:
    """The shape of each step of a run."""

    length: SizeSchedule = Constant(1)
    length_unit: SizeUnit = "steps"
    size: SizeSchedule = Constant(1)
    """Sequences of a step."""
    size_unit: SizeUnit = "steps"
    read_length: int | None = None
    """Tokens that a lane moves on by, whatever is trained on; None: what is trained on, so that nothing is dropped."""

    def shape(self, steps: int, tokens: int) -> BatchShape:
        """Of the step before which lie `steps` steps with `tokens` target tokens."""
        first = {"steps": steps + 1, "tokens": tokens + 1}
        length = self.length.at(first[self.length_unit])
        return BatchShape(
            num_sequences=self.size.at(first[self.size_unit]),
            sequence_length=length,
            read_length=self.read_length or length,
        )

    def num_steps_of_same_shape(self, steps: int, tokens: int) -> float:
        """How many steps, the next one included, surely have the shape of the next one; infinite if all have."""
        shape, counts = self.shape(steps, tokens), []
        for size_schedule, unit in ((self.length, self.length_unit), (self.size, self.size_unit)):
            done, per_step = {"steps": (steps, 1), "tokens": (tokens, shape.num_tokens)}[unit]
            left = size_schedule.constant_until(done + 1) - done
            counts.append(left if left == inf else -(-left // per_step))
        return min(counts)

    def after_evaluation(self, loss: float | None) -> BatchShapeSchedule:
        """The pacing once the evaluation after a step has given `loss`; None: there was no text to evaluate on."""
        if loss is None or not isinstance(self.length, Adaptive):
            return self
        return replace(self, length=self.length.after_evaluation(loss))

    def to_json(self) -> dict[str, Any] | None:
        """What evaluations have made of it; None where they play no part."""
        if not isinstance(self.length, Adaptive):
            return None
        best_loss = self.length.best_loss if isfinite(self.length.best_loss) else None
        return {"length": self.length.value, "best_loss": best_loss}

    def resumed(self, saved: dict[str, Any] | None) -> BatchShapeSchedule:
        """This pacing, where evaluations had led the run that wrote `saved`; as it is where they had not."""
        if saved is None or not isinstance(self.length, Adaptive):
            return self
        value = min(max(saved["length"], self.length.first), self.length.last)
        value -= (value - self.length.first) % self.length.multiple
        best_loss = inf if saved["best_loss"] is None else saved["best_loss"]
        return replace(self, length=replace(self.length, value=value, best_loss=best_loss))


CONSTANT_SHAPE = BatchShapeSchedule()
"""Of a state from which no batch is made."""


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """How long a run is."""

    num_steps: int
    num_tokens: int
    """Target tokens, of all its steps."""
    num_dropped_tokens: int = 0
    first_full_step: int | None = None
    """The first step of which the shape is that of all later ones; None: there is none."""


def compute_run_length(
    shape_schedule: BatchShapeSchedule, *, num_steps: int | None, num_tokens: int | None
) -> RunLength:
    """Of the run that `num_steps` or `num_tokens` ends, whichever is reached first; not for an adaptive pacing."""
    steps = tokens = dropped = 0
    first_full_step = None
    while True:
        shape = shape_schedule.shape(steps, tokens)
        left = inf if num_steps is None else num_steps - steps
        if num_tokens is not None:
            left = min(left, -(-(num_tokens - tokens) // shape.num_tokens))
        if left <= 0:
            return RunLength(
                num_steps=steps, num_tokens=tokens, num_dropped_tokens=dropped, first_full_step=first_full_step
            )
        same_shape = shape_schedule.num_steps_of_same_shape(steps, tokens)
        if same_shape == inf:
            first_full_step = steps + 1
        now = int(min(left, same_shape))
        steps += now
        tokens += now * shape.num_tokens
        dropped += now * shape.num_dropped_tokens
