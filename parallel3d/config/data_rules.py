"""Rules on the text that is read: sources, blends, slices, tokenizers."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from math import fsum
from os.path import expanduser
from pathlib import Path

from parallel3d.config.schema import Config
from parallel3d.config.sections.data import BlendConfig, BlendStageConfig
from parallel3d.errors import Problem

NUM_BYTE_TOKENS = 257
SUM_TOLERANCE = 1e-6
"""Of weights, written with a few digits."""


def check_sources(config: Config, world_size: int | None) -> Iterator[Problem]:
    yield from _missing_paths("data.sources", config.data.sources, "without data.sources the built-in corpus is used")
    for name, paths in (config.data.blend or BlendConfig()).sources.items():
        field = f"data.blend.sources.{name}"
        yield from _missing_paths(field, paths, "or take the source out")
        if not paths:
            yield Problem(
                field=field, value=paths, rule="names no file, folder or glob", fix="Give one, or take it out"
            )


def _missing_paths(field: str, sources: list[str], otherwise: str) -> Iterator[Problem]:
    for index, source in enumerate(sources):
        path = expanduser(source)
        if not (Path(path).exists() or glob.glob(path, recursive=True)):
            rule = f"no such file or folder, seen from {Path.cwd()}"
            yield Problem(field=f"{field}.{index}", value=source, rule=rule, fix=f"Correct the path; {otherwise}")


def check_blend(config: Config, world_size: int | None) -> Iterator[Problem]:
    blend = config.data.blend
    if blend is None:
        return
    if config.data.sources:
        rule = "stands beside data.blend, which names its sources itself"
        yield Problem(field="data.sources", value=config.data.sources, rule=rule, fix="Leave one of them out")
    if not blend.stages or not blend.sources:
        field = "data.blend.stages" if blend.sources else "data.blend.sources"
        fix = 'Give {"sources": {NAME: [PATH, ...], ...}, "stages": [{"weights": {NAME: SHARE, ...}}]}'
        yield Problem(field=field, value=getattr(blend, field.split(".")[-1]), rule="must not be empty", fix=fix)
        return
    for number, stage in enumerate(blend.stages):
        yield from _check_stage(f"data.blend.stages.{number}", stage, blend)
        before = blend.stages[number - 1].from_token if number else -1
        if stage.from_token <= before or (number == 0 and stage.from_token):
            yield Problem(
                field=f"data.blend.stages.{number}.from_token",
                value=stage.from_token,
                rule=f"must be more than the stage before's, {before}" if number else "the first stage begins the run",
                fix="List the stages in the order of their tokens" if number else "Take 0, or leave it out",
            )
    for name in blend.sources:
        if not any(stage.weights.get(name) for stage in blend.stages):
            rule = "has no weight in any stage"
            yield Problem(field="data.blend.sources", value=name, rule=rule, fix="Give it one, or take it out")


def _check_stage(field: str, stage: BlendStageConfig, blend: BlendConfig) -> Iterator[Problem]:
    for name in stage.weights:
        if name not in blend.sources:
            rule = f"there is no such source: data.blend.sources has {', '.join(blend.sources)}"
            yield Problem(field=f"{field}.weights", value=name, rule=rule, fix="Correct the name")
    total = fsum(stage.weights.values())
    if total == 0 or (abs(total - 1) > SUM_TOLERANCE and not blend.renormalise):
        yield Problem(
            field=f"{field}.weights",
            value=stage.weights,
            rule=f"must sum to 1, being shares of the tokens; their sum is {total:.6g}",
            fix="Correct them" + (", or set data.blend.renormalise to true to have them divided by it" * (total > 0)),
        )


def check_slice(config: Config, world_size: int | None) -> Iterator[Problem]:
    part, data = config.data.slice, config.data
    if part is None:
        return
    if part.min_tokens == 0:
        rule, fix = "is nothing to train on", "Give a number of tokens, or -1 for as many global batches as fit"
        yield Problem(field="data.slice.min_tokens", value=0, rule=rule, fix=fix)
    if config.warmup.batch_size.start is not None:
        yield Problem(
            field="data.slice",
            value=part.model_dump(),
            rule="is read in whole global batches, and warmup.batch_size reads smaller ones at first",
            fix="Leave one of them out",
        )
    if data.blend is not None or len(data.sources) != 1:
        yield Problem(
            field="data.slice",
            value=part.model_dump(),
            rule="is a part of one file of tokens",
            fix="Give data.sources that file, or its folder as launch/prepare.py makes it, and no data.blend",
        )


def check_tokenizer(config: Config, world_size: int | None) -> Iterator[Problem]:
    pieces, rows = config.data.tokenizer.vocab_size, config.model.vocab_size
    if pieces is not None and pieces > rows:
        yield Problem(
            field="data.tokenizer.vocab_size",
            value=pieces,
            rule=f"is more than the model's model.vocab_size = {rows} tokens",
            fix=f"Take at most {rows}, or raise model.vocab_size",
        )


def check_bytes(config: Config, world_size: int | None) -> Iterator[Problem]:
    tokenizer, rows = config.data.tokenizer, config.model.vocab_size
    if tokenizer.kind != "bytes":
        return
    if rows < NUM_BYTE_TOKENS:
        yield Problem(
            field="model.vocab_size",
            value=rows,
            rule=f"data.tokenizer.kind bytes has {NUM_BYTE_TOKENS} tokens: the bytes and EOS",
            fix=f"Take {NUM_BYTE_TOKENS} or more",
        )
    if tokenizer.path is not None:
        yield Problem(
            field="data.tokenizer.path",
            value=tokenizer.path,
            rule="data.tokenizer.kind bytes reads no file",
            fix="Leave one of them out",
        )


def check_tokenizer_path(config: Config, world_size: int | None) -> Iterator[Problem]:
    path = config.data.tokenizer.path
    if path is not None and not Path(expanduser(path)).is_file():
        yield Problem(
            field="data.tokenizer.path",
            value=path,
            rule=f"no such file, seen from {Path.cwd()}",
            fix="Correct the path; without it a tokenizer is trained on the corpus",
        )
