"""Schedules of sequence length and batch size, as functions of the steps and tokens before a step. Pure.

Sequence-length warmup (Li, Zhang and He 2022, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup
for Training GPT Models") starts with short sequences, batch-size warmup (GPT-3) with few. Each is a size schedule: a
value for each position, where the position is the number of the step, or of the step's first token, counted from 1.

    Polynomial  first + (last - first) * min(position / duration, 1) ** exponent, down to a multiple: linear and root
    Discrete    sizes[i] up to position until[i], then the last one: Shortformer has two
    Periodic    sizes[i] in a cycle: the paper's Figure 2
    Adaptive    one multiple more while the validation perplexity stays near its best
    VarianceDriven  one multiple more after some steps in which Adam's largest sqrt(v) did not jump
    Custom      a function of the user's

The paper's root takes the exponent itself, DeepSpeed's `root_degree` is its inverse. Polynomial and Discrete equal
DeepSpeed's curriculum scheduler at every position; its first step is 1, too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import floor, inf, isfinite, log
from typing import Any, Literal, Protocol, Self

from parallel3d.errors import UserError

SizeUnit = Literal["steps", "tokens"]


class SizeSchedule(Protocol):
    """A size as a function of the position in the run."""

    def at(self, position: int) -> int:
        """Returns the value at `position`; the first position is 1."""

    def constant_until(self, position: int) -> float:
        """Returns a position up to which (inclusive) the value is that at `position`; infinity if it never changes."""

    def values(self) -> tuple[int, ...]:
        """Returns all possible values, in increasing order; empty if they are unknown."""


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
    """From `first` to `last`, both multiples of `multiple`; `last` is reached at position `duration`."""

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
    """`sizes[i]` up to and including position `until[i]`; one more size than ends."""

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
    """`sizes[i]` up to and including position `until[i]`, in a cycle; as many sizes as ends."""

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
    """A function of the user's, whose values are checked."""

    function: Callable[[int], int]
    name: str
    last: int
    multiple: int

    def at(self, position: int) -> int:
        """Raises UserError unless the function returns a multiple of `multiple` between that and `last`."""
        try:
            value = self.function(position)
        except Exception as error:  # whatever the user's function raises
            raise UserError(
                f"warmup.sequence_length.function = {self.name!r}: raised {type(error).__name__} at {position}: {error}"
            ) from error
        if type(value) is not int or not 0 < value <= self.last or value % self.multiple:
            raise UserError(
                f"warmup.sequence_length.function = {self.name!r}: returned {value!r} at {position}: a length must be"
                f" a multiple of {self.multiple} from {self.multiple} to {self.last}"
            )
        return value

    def constant_until(self, position: int) -> float:
        return position

    def values(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class FollowsRun:
    """A length that only the run itself knows: one multiple longer or shorter, from `first` to `last`.

    It changes with values of the entries and evaluations that all ranks apply, so it is the same on all of them, and
    after a repeated step.
    """

    first: int
    last: int
    multiple: int
    tolerance: float = 1.3
    shrinks: bool = True
    value: int

    def at(self, position: int) -> int:
        return self.value

    def constant_until(self, position: int) -> float:
        return position

    def values(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.last + 1, self.multiple))

    def longer(self) -> int:
        return min(self.value + self.multiple, self.last)

    def after_fluctuation(self) -> int:
        """The length after a value above the tolerance."""
        return max(self.value - self.multiple, self.first) if self.shrinks else self.value

    def after_evaluation(self, loss: float) -> Self:
        """Returns the schedule after an evaluation with the loss `loss`."""
        return self

    def after_step(self, variance_max: float) -> Self:
        """Returns the schedule after a step with this maximum of sqrt(v) before its update."""
        return self

    def to_json(self) -> dict[str, Any]:
        """The state that the run has changed."""
        return {"length": self.value}

    def resumed(self, saved: dict[str, Any]) -> Self:
        """Returns the schedule in a saved state, of this kind or of another one that follows the run: its length is the
        nearest of ours that is not longer."""
        value = min(max(saved["length"], self.first), self.last)
        return replace(self, value=value - (value - self.first) % self.multiple)


@dataclass(frozen=True, kw_only=True)
class Adaptive(FollowsRun):
    """One multiple longer after each evaluation whose perplexity is at most `tolerance` x the previous best, otherwise
    one multiple shorter (or the same).

    The rule is ours: the paper tried pacing by losses, gives no formula, and calls 1.3 x the best perplexity a
    significant fluctuation.
    """

    best_loss: float = inf
    """Lowest evaluation loss so far, in nats a token."""

    def after_evaluation(self, loss: float) -> Self:
        is_near = isfinite(loss) and (self.best_loss == inf or loss - self.best_loss <= log(self.tolerance))
        value = self.longer() if is_near else self.after_fluctuation()
        return replace(self, value=value, best_loss=min(self.best_loss, loss) if isfinite(loss) else self.best_loss)

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"best_loss": self.best_loss if isfinite(self.best_loss) else None}

    def resumed(self, saved: dict[str, Any]) -> Self:
        best_loss = saved.get("best_loss")
        return replace(super().resumed(saved), best_loss=inf if best_loss is None else best_loss)


@dataclass(frozen=True, kw_only=True)
class VarianceDriven(FollowsRun):
    """One multiple longer after `interval` calm steps in a row; after one that is not calm one multiple shorter (or the
    same), and the count begins again.

    A step is calm if the largest element of Adam's sqrt(v), before its update, is at most `tolerance` x the mean of the
    `interval` values before it, or of as many as there are. The rule is ours: the paper finds that this maximum goes
    with spikes of the loss, and does not use it.
    """

    interval: int = 20
    recent: tuple[float, ...] = ()
    """The last values, at most `interval` of them."""
    num_calm: int = 0
    """Calm steps in a row at this length."""

    def after_step(self, variance_max: float) -> Self:
        """A value that is not finite is not calm, and not remembered."""
        limit = self.tolerance * sum(self.recent) / len(self.recent) if self.recent else inf
        is_known = isfinite(variance_max)
        recent = (*self.recent, variance_max)[-self.interval :] if is_known else self.recent
        if not (is_known and variance_max <= limit):
            return replace(self, value=self.after_fluctuation(), recent=recent, num_calm=0)
        if self.num_calm + 1 == self.interval:
            return replace(self, value=self.longer(), recent=recent, num_calm=0)
        return replace(self, recent=recent, num_calm=self.num_calm + 1)

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"recent": list(self.recent), "num_calm": self.num_calm}

    def resumed(self, saved: dict[str, Any]) -> Self:
        recent, num_calm = tuple(saved.get("recent", ())), saved.get("num_calm", 0)
        kept = recent[-self.interval :]
        return replace(super().resumed(saved), recent=kept, num_calm=min(num_calm, self.interval - 1))


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Shape of one step's batch."""

    num_sequences: int
    """Number of slots in use, from the first one; the other lanes don't advance."""
    sequence_length: int
    read_length: int
    """Tokens by which each of these lanes advances; those beyond sequence_length are dropped."""

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
    """Tokens by which a lane advances each step. None: by those trained on, so that none are dropped."""

    def shape(self, steps: int, tokens: int) -> BatchShape:
        """Returns the shape of the step after `steps` steps with `tokens` target tokens."""
        first = {"steps": steps + 1, "tokens": tokens + 1}
        length = self.length.at(first[self.length_unit])
        return BatchShape(
            num_sequences=self.size.at(first[self.size_unit]),
            sequence_length=length,
            read_length=self.read_length or length,
        )

    def num_steps_of_same_shape(self, steps: int, tokens: int) -> float:
        """Returns how many steps from the next one on are sure to have its shape; infinity if all do."""
        shape, counts = self.shape(steps, tokens), []
        for size_schedule, unit in ((self.length, self.length_unit), (self.size, self.size_unit)):
            done, per_step = {"steps": (steps, 1), "tokens": (tokens, shape.num_tokens)}[unit]
            left = size_schedule.constant_until(done + 1) - done
            counts.append(left if left == inf else -(-left // per_step))
        return min(counts)

    def after_evaluation(self, loss: float | None) -> BatchShapeSchedule:
        """Returns the schedule after an evaluation with the loss `loss`; None: without a validation text."""
        if loss is None or not isinstance(self.length, FollowsRun):
            return self
        return replace(self, length=self.length.after_evaluation(loss))

    def after_step(self, variance_max: float | None) -> BatchShapeSchedule:
        """Returns the schedule after a step with this maximum of sqrt(v) before its update; None: not measured."""
        if variance_max is None or not isinstance(self.length, FollowsRun):
            return self
        return replace(self, length=self.length.after_step(variance_max))

    def to_json(self) -> dict[str, Any] | None:
        """Returns the state that the run has changed; None for schedules that don't depend on it."""
        return self.length.to_json() if isinstance(self.length, FollowsRun) else None

    def resumed(self, saved: dict[str, Any] | None) -> BatchShapeSchedule:
        """Returns this schedule in the state that `saved` describes; unchanged if either doesn't depend on the run."""
        if saved is None or not isinstance(self.length, FollowsRun):
            return self
        return replace(self, length=self.length.resumed(saved))


CONSTANT_SHAPE = BatchShapeSchedule()
"""For states from which no batch is made."""


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """Length of a run."""

    num_steps: int
    num_tokens: int
    """Target tokens of all steps."""
    num_dropped_tokens: int = 0
    first_full_step: int | None = None
    """The first step with the same shape as all later ones; None: there is none."""


def compute_run_length(
    shape_schedule: BatchShapeSchedule, *, num_steps: int | None, num_tokens: int | None
) -> RunLength:
    """Returns the length of the run that ends at `num_steps` or `num_tokens`, whichever comes first; not for
    lengths that follow the run."""
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
