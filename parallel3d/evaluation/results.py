"""Losses and perplexities by group and in all, as figures and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any

from parallel3d.evaluation.rows import RowScore

MAX_EXPONENT = 700.0


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """Sums over the rows of a group; a text's size is known where whole texts were scored."""

    name: str
    num_rows: int = 0
    num_tokens: int = 0
    log_prob: float = 0.0
    num_greedy: int = 0
    """Rows of which every target is the likeliest token."""
    num_words: int | None = None
    num_bytes: int | None = None
    products: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Sums over the rows of: log_prob squared, log_prob times targets, targets squared."""

    @staticmethod
    def of(
        name: str, scores: Iterable[RowScore], *, words: int | None = None, num_bytes: int | None = None
    ) -> GroupResult:
        scores = [*scores]
        return GroupResult(
            name=name,
            num_rows=len(scores),
            num_tokens=sum(score.num_targets for score in scores),
            log_prob=sum(score.log_prob for score in scores),
            num_greedy=sum(score.is_greedy for score in scores),
            num_words=words,
            num_bytes=num_bytes,
            products=(
                sum(score.log_prob**2 for score in scores),
                sum(score.log_prob * score.num_targets for score in scores),
                float(sum(score.num_targets**2 for score in scores)),
            ),
        )

    @staticmethod
    def sum_of(name: str, parts: Sequence[GroupResult]) -> GroupResult:
        """The group of all tokens together, which is not the mean of the groups."""

        def size(values: list[int | None]) -> int | None:
            return sum(value or 0 for value in values) if None not in values else None

        return GroupResult(
            name=name,
            num_rows=sum(part.num_rows for part in parts),
            num_tokens=sum(part.num_tokens for part in parts),
            log_prob=sum(part.log_prob for part in parts),
            num_greedy=sum(part.num_greedy for part in parts),
            num_words=size([part.num_words for part in parts]),
            num_bytes=size([part.num_bytes for part in parts]),
            products=(
                sum(part.products[0] for part in parts),
                sum(part.products[1] for part in parts),
                sum(part.products[2] for part in parts),
            ),
        )

    @property
    def loss(self) -> float:
        """Nats per token."""
        return -self.log_prob / self.num_tokens

    @property
    def loss_stderr(self) -> float | None:
        """Standard error of `loss`, in nats per token, from the spread between rows; None with one row.

        Tokens of a row are not independent, rows nearly are: the loss is a ratio of two sums over rows, whose standard
        error is sqrt(R / (R - 1) * sum (nll_i - loss * targets_i)^2) / targets (Cochran, Sampling Techniques, 6.4).
        """
        if self.num_rows < 2:
            return None
        squared, crossed, targets = self.products
        residual = squared + 2 * self.loss * crossed + self.loss**2 * targets
        return sqrt(max(residual, 0.0) * self.num_rows / (self.num_rows - 1)) / self.num_tokens

    @property
    def accuracy_stderr(self) -> float | None:
        """Standard error of the share of greedy rows; None with one row."""
        share = self.num_greedy / self.num_rows
        return sqrt(share * (1 - share) / (self.num_rows - 1)) if self.num_rows > 1 else None

    def perplexity_per(self, count: int) -> float | None:
        """None where it is beyond the range of numbers."""
        exponent = -self.log_prob / count
        return exp(exponent) if exponent < MAX_EXPONENT else None

    def text_figures(self) -> dict[str, Any]:
        """Loss and perplexity by token; by word and byte where these are known."""
        figures: dict[str, Any] = {"tokens": self.num_tokens, "loss": self.loss, "loss_stderr": self.loss_stderr}
        figures["perplexity"] = self.perplexity_per(self.num_tokens)
        if self.num_words:
            figures |= {"words": self.num_words, "word_perplexity": self.perplexity_per(self.num_words)}
        if self.num_bytes:
            figures |= {
                "bytes": self.num_bytes,
                "byte_perplexity": self.perplexity_per(self.num_bytes),
                "bits_per_byte": -self.log_prob / self.num_bytes / log(2),
            }
        return figures

    def last_word_figures(self) -> dict[str, Any]:
        """Accuracy and perplexity of last words, of which each counts as one, whatever its tokens."""
        return {
            "passages": self.num_rows,
            "tokens": self.num_tokens,
            "accuracy": self.num_greedy / self.num_rows,
            "accuracy_stderr": self.accuracy_stderr,
            "perplexity": self.perplexity_per(self.num_rows),
        }


def format_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each group, with the columns that any has."""
    columns = list(dict.fromkeys(column for row in figures.values() for column in row))
    cells = [["", *(column.replace("_", " ") for column in columns)]]
    cells += [[name, *(format_cell(row.get(column)) for column in columns)] for name, row in figures.items()]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in cells
    )


def format_cell(value: object) -> str:
    """A figure as tables show it."""
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.4g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
