"""Rules of the configuration's section `data`: sources, mixtures, slices, tokenizers."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from math import fsum
from os.path import exists
from pathlib import Path

from parallel3d.config.rule import excludes, rule, too_large, without_credentials
from parallel3d.config.sections.data import SOURCE_GROUP, BlendConfig, BlendStageConfig, DataConfig, SliceConfig
from parallel3d.config.sections.section import expand_home
from parallel3d.errors import Problem
from parallel3d.user_code import names_object

NUM_BYTE_TOKENS = 257
SUM_TOLERANCE = 1e-6
"""Tolerance of a sum of weights, which are written with a few digits."""

SOURCES = "data: sources blend"


@rule(SOURCES)
def check_sources(data: DataConfig) -> Iterator[Problem]:
    """All sources exist."""
    yield from _missing_paths("data.sources", data.sources, "without data.sources the built-in corpus is used")
    for name, paths in (data.blend or BlendConfig()).sources.items():
        field = f"data.blend.sources.{name}"
        yield from _missing_paths(field, paths, "or remove the source")
        if not paths:
            rule_text, fix = "must name a file, a folder or a glob", "Add one, or remove the source"
            yield Problem(field=field, value=paths, rule=rule_text, fix=fix)


def _missing_paths(field: str, sources: list[str], otherwise: str) -> Iterator[Problem]:
    for index, source in enumerate(sources):
        if "://" in source:
            yield from without_credentials(f"{field}.{index}", source)
            continue
        path = expand_home(source)
        if not (exists(path) or glob.glob(path, recursive=True) or names_object(source, SOURCE_GROUP)):
            rule_text = f"no such file or folder (relative to {Path.cwd()})"
            yield Problem(field=f"{field}.{index}", value=source, rule=rule_text, fix=f"Correct the path; {otherwise}")


@rule(SOURCES)
def check_blend(data: DataConfig) -> Iterator[Problem]:
    """A mixture has sources, and stages in order; every source is read in one of them."""
    blend = data.blend
    if blend is None:
        return
    if data.sources:
        yield excludes("data.sources", data.sources, "data.blend", "{...}", "data.blend names its own sources")
    if not blend.stages or not blend.sources:
        name = "stages" if blend.sources else "sources"
        fix = 'Give {"sources": {NAME: [PATH, ...], ...}, "stages": [{"weights": {NAME: SHARE, ...}}]}'
        yield Problem(field=f"data.blend.{name}", value=getattr(blend, name), rule="must not be empty", fix=fix)
        return
    for number, stage in enumerate(blend.stages):
        yield from _check_stage(f"data.blend.stages.{number}", stage, blend)
        yield from _check_stage_order(number, blend.stages)
    for name in blend.sources:
        if not any(stage.weights.get(name) for stage in blend.stages):
            rule_text = "has no weight in any stage"
            yield Problem(field="data.blend.sources", value=name, rule=rule_text, fix="Give it a weight, or remove it")


def _check_stage_order(number: int, stages: list[BlendStageConfig]) -> Iterator[Problem]:
    field, start = f"data.blend.stages.{number}.from_token", stages[number].from_token
    if number == 0 and start > 0:
        yield Problem(field=field, value=start, rule="must be 0 for the first stage", fix="Use 0, or remove it")
    elif number > 0 and start <= stages[number - 1].from_token:
        rule_text = f"must be above {stages[number - 1].from_token}, where the previous stage starts"
        yield Problem(field=field, value=start, rule=rule_text, fix="List the stages in the order of their tokens")


def _check_stage(field: str, stage: BlendStageConfig, blend: BlendConfig) -> Iterator[Problem]:
    for name in stage.weights:
        if name not in blend.sources:
            rule_text = f"is not a source: data.blend.sources has {', '.join(blend.sources)}"
            yield Problem(field=f"{field}.weights", value=name, rule=rule_text, fix="Correct the name")
    total = fsum(stage.weights.values())
    if total == 0 or (abs(total - 1) > SUM_TOLERANCE and not blend.renormalise):
        fix = "Correct them"
        if total > 0:
            fix += ", or set data.blend.renormalise to true to have them divided by their sum"
        rule_text = f"must sum to 1, as shares of the tokens; their sum is {total:.6g}"
        yield Problem(field=f"{field}.weights", value=stage.weights, rule=rule_text, fix=fix)


@rule("data.slice", "data.sources", "data.blend", "warmup.batch_size.start")
def check_slice(
    part: SliceConfig | None, sources: list[str], blend: BlendConfig | None, first_batch: int | None
) -> Iterator[Problem]:
    """A slice has tokens, comes from one file, and is read in whole global batches."""
    if part is None:
        return
    if part.min_tokens == 0:
        rule_text, fix = "must not be 0", "Give a number of tokens, or -1 for as many global batches as fit"
        yield Problem(field="data.slice.min_tokens", value=0, rule=rule_text, fix=fix)
    if first_batch is not None:
        why = "a slice is read in whole global batches, and the first ones would be smaller"
        yield excludes("data.slice", part.model_dump(), "warmup.batch_size.start", first_batch, why)
    if blend is not None or len(sources) != 1:
        yield Problem(
            field="data.slice",
            value=part.model_dump(),
            rule="must be a part of one file of tokens",
            fix="Set data.sources to that file, or to its folder as launch/prepare.py makes it, and remove data.blend",
        )


@rule("data: validation_fraction test_fraction", "data.slice")
def check_held_out(data: DataConfig, part: SliceConfig | None) -> Iterator[Problem]:
    """Something is left to train on, and what a run reads in the file's order holds nothing out."""
    held_out = data.validation_fraction + data.test_fraction
    if held_out >= 1:
        rule_text = f"leaves nothing to train on: data.validation_fraction and this are {held_out:g} of all documents"
        fix = "Lower one of them: 0.05 and 0.1, say"
        yield Problem(field="data.test_fraction", value=data.test_fraction, rule=rule_text, fix=fix)
    if data.test_fraction and part is not None:
        why = "a slice covers all of its range in the file"
        yield excludes("data.test_fraction", data.test_fraction, "data.slice", part.model_dump(), why)


@rule("data.tokenizer.vocab_size", "model.vocab_size")
def check_tokenizer(pieces: int | None, rows: int) -> Iterator[Problem]:
    """The model has a row for every piece."""
    if pieces is not None and pieces > rows:
        yield too_large("data.tokenizer.vocab_size", pieces, "model.vocab_size", rows)


@rule("data.tokenizer.kind", "data.tokenizer.path", "model.vocab_size")
def check_bytes(kind: str, path: str | None, rows: int) -> Iterator[Problem]:
    """The model has a row for every byte and EOS, and bytes read no tokenizer file."""
    if kind != "bytes":
        return
    if rows < NUM_BYTE_TOKENS:
        yield Problem(
            field="model.vocab_size",
            value=rows,
            rule=f"must be at least {NUM_BYTE_TOKENS} for data.tokenizer.kind bytes: the bytes and EOS",
            fix=f"Use {NUM_BYTE_TOKENS} or more",
        )
    if path is not None:
        yield excludes("data.tokenizer.path", path, "data.tokenizer.kind", "bytes", "bytes need no tokenizer file")


@rule("data.tokenizer.path")
def check_tokenizer_path(path: str | None) -> Iterator[Problem]:
    """The tokenizer's file or folder exists; that of a remote one is seen when it is fetched."""
    if path is not None and "://" in path:
        yield from without_credentials("data.tokenizer.path", path)
    elif path is not None and not exists(expand_home(path)):
        yield Problem(
            field="data.tokenizer.path",
            value=path,
            rule=f"no such file or folder (relative to {Path.cwd()})",
            fix="Correct the path; without it a tokenizer is trained on the corpus",
        )
