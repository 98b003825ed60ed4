"""`parallel3d evaluate MODEL --tasks NAMES`: tasks of lm-evaluation-harness on a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel3d.commands.trained_model import (
    TrainedModel,
    compute_config,
    continue_prompts,
    default_window,
    find_tokenizer,
    score_rows,
)
from parallel3d.config.schema import Config
from parallel3d.data.tokenizer import Tokenizer
from parallel3d.decoding.rank_decoder import DecodingRule
from parallel3d.decoding.sampling import SamplingRule
from parallel3d.decoding.texts import Continuation, EndRule, Prompt
from parallel3d.errors import UserError
from parallel3d.evaluation.rows import RowScore, ScoredRow


@dataclass(frozen=True, kw_only=True)
class TaskModel:
    """The model as tasks use it (evaluation/harness_model.py)."""

    trained: TrainedModel
    config: Config
    tokenizer: Tokenizer
    prefix: tuple[int, ...]
    window: int
    device: torch.device
    batch_size: int

    def score(self, rows: Sequence[ScoredRow]) -> list[RowScore]:
        return score_rows(self.config, self.trained, rows, self.device, batch_size=self.batch_size)

    def continue_texts(self, prompts: Sequence[Prompt], sampling: SamplingRule, end: EndRule) -> list[Continuation]:
        uses_cache = not self.trained.model.module
        rule = DecodingRule(sampling=sampling, end=end, batch_size=self.batch_size, uses_cache=uses_cache)
        return continue_prompts(self.config, self.trained, prompts, rule, self.device)


def open_task_model(options: argparse.Namespace, trained: TrainedModel) -> TaskModel:
    tokenizer, window = find_tokenizer(trained, options.tokenizer), options.window or default_window(trained)
    refusal = f"--window {window}: the model has learned {trained.model.max_position_embeddings} positions"
    return TaskModel(
        trained=trained,
        config=compute_config(trained, options, window, refusal=refusal),
        tokenizer=tokenizer,
        prefix=trained.prefix_of(tokenizer),
        window=window,
        device=torch.device(options.device),
        batch_size=options.batch_size,
    )


def run_tasks(options: argparse.Namespace, model: TaskModel) -> dict[str, dict[str, Any]]:
    """The figures of each task, as the library names them. Raises UserError without the library, or for unknown
    tasks."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        from parallel3d.evaluation.harness_model import HarnessModel
    except ImportError as error:
        raise UserError(f"--tasks needs lm-evaluation-harness, pip install lm_eval ({error})") from None
    manager = TaskManager(include_path=None if options.task_path is None else str(options.task_path))
    names = [name for name in options.tasks.split(",") if name]
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise UserError(f"--tasks {unknown[0]}: the library knows no such task; --task-path names a folder with others")
    found = simple_evaluate(
        model=HarnessModel(model),
        tasks=names,
        task_manager=manager,
        num_fewshot=options.fewshot,
        limit=options.limit,
        log_samples=False,
    )
    assert found is not None, "this process is the library's first"
    return {task: figures_of(figures) for task, figures in found["results"].items()}


def figures_of(figures: dict[str, Any]) -> dict[str, Any]:
    """The library's keys are "metric,filter", and say `none` where nothing filters the answers."""
    numbers = {name.removesuffix(",none"): value for name, value in figures.items() if "," in name}
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}
