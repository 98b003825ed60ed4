"""The configuration's section `evaluation`, and its rules."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import PositiveFloat, PositiveInt

from parallel3d.config.rule import rule
from parallel3d.config.sections.section import Section
from parallel3d.errors import Problem

SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class EvaluationConfig(Section):
    """Evaluations of a run's checkpoints on further texts and tasks, by a process of its own on the first host. Those
    of section `run`, on the text that the run holds out, are part of training."""

    every_tokens: PositiveInt | None = None
    """Tokens between two checkpoints that are evaluated: the first one after each multiple, and the last one of a run
    that reaches its end. Null: none."""
    sets: dict[str, str] = {"held-out": ""}
    """What each checkpoint is evaluated on: a name, under which results are kept in evaluations/ in the run's folder,
    and arguments of `parallel3d evaluate`, such as "--slice unseen --by domain" or "wiki.txt --stride 512"."""
    threads: PositiveInt = 1
    """CPU threads of the process, which has the lowest priority."""
    end_wait_s: PositiveFloat = 600.0
    """Longest wait in seconds, after the run has reached its end, for the evaluations that are due."""


@rule("evaluation.every_tokens", "evaluation.sets", "checkpoint.every", "checkpoint.keep_every")
def check_evaluated(
    every_tokens: int | None, sets: dict[str, str], every: int | None, keep_every: int | None
) -> Iterator[Problem]:
    """There are checkpoints, and sets with names for folders."""
    if every_tokens is not None and every is None and keep_every is None:
        rule_text, fix = "applies to checkpoints, and checkpoint.every is null", "Set checkpoint.every, or remove this"
        yield Problem(field="evaluation.every_tokens", value=every_tokens, rule=rule_text, fix=fix)
    if not sets:
        fix = 'Give at least one, such as {"held-out": ""}; evaluation.every_tokens null turns evaluations off'
        yield Problem(field="evaluation.sets", value=sets, rule="is empty", fix=fix)
    for name in sets:
        if not SET_NAME.fullmatch(name):
            fix = "Use letters, digits, - and _"
            yield Problem(field="evaluation.sets", value=name, rule="is not a name for a folder", fix=fix)
