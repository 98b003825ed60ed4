"""From the configuration to what feeds a run: the corpus, and readers of it.

Training reads the lanes of all text, a blend of its sources, or a slice of one file of tokens; evaluation the lanes of
the text that is kept for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.config.schema import Config
from parallel3d.config.sections.data import BlendConfig, BlendStageConfig, DataConfig
from parallel3d.config.warmup_builder import num_steps
from parallel3d.data.blend import BlendedReader, BlendStage, Subset
from parallel3d.data.corpus import Corpus, load_corpus, open_corpus
from parallel3d.data.corpus_spec import choose_document_chars
from parallel3d.data.lanes import Lanes
from parallel3d.data.reader import Reader
from parallel3d.data.reader_process import ReaderProcess
from parallel3d.data.sources import find_files
from parallel3d.data.token_file import TokenFile, open_token_file
from parallel3d.data.token_slice import TokenSlice, TokenSliceReader, plan_slice
from parallel3d.errors import DataError
from parallel3d.parallel.abort import AbortToken


def open_run_corpus(config: Config, token: AbortToken, log: Callable[[str], None]) -> Corpus:
    """The corpus; built by one process of each host on first use, which gives `notice` of it."""
    data, num_lanes = config.data, config.batch.global_batch_size
    assert data.cache_directory is not None and num_lanes is not None, "needs a resolved configuration"
    return open_corpus(
        sources=_all_sources(data),
        text_column=data.text_column,
        document_chars=_document_chars(data, num_lanes),
        validation_fraction=data.validation_fraction,
        num_lanes=num_lanes,
        tokenizer=data.tokenizer,
        cache_directory=Path(data.cache_directory),
        token=token,
        log=log,
    )


def build_reader(config: Config, corpus: Corpus) -> Reader:
    """What feeds the training slots; DataError where there is too little text."""
    seed, num_lanes, blend = config.run.seed, config.batch.global_batch_size, config.data.blend
    assert num_lanes is not None, "needs a resolved configuration"
    if config.data.slice is not None:
        return TokenSliceReader(*_slice(config))
    if blend is None:
        return Lanes(corpus.train, seed, num_lanes)
    sources = []
    for name, indices in zip(blend.sources, _documents_by_source(blend, corpus), strict=True):
        try:
            sources.append(Lanes(Subset(corpus.train, indices), seed, num_lanes))
        except DataError as error:
            raise DataError(f"data.blend.sources.{name}: {error}") from None
    return BlendedReader(sources, blend_stages(blend), seed)


def build_reader_processes(
    config: Config, corpus: Corpus, token: AbortToken, log: Callable[[str], None]
) -> list[ReaderProcess]:
    """Processes that read ahead, as many as the configuration asks for. Tokens as they lie in a file need none."""
    make_reader = partial(_open_reader, config, corpus.folder)
    count = config.data.num_processes if config.data.slice is None else 0
    return [ReaderProcess(make_reader, token, log) for _ in range(count)]


def _open_reader(config: Config, folder: Path) -> Reader:
    return build_reader(config, load_corpus(folder))


def build_evaluation_lanes(config: Config, corpus: Corpus) -> Lanes | None:
    """As many lanes as the validation text can feed; None when there is none.

    A slice is read as it lies in its file: what evaluation would take out of that file is trained on.
    """
    assert config.batch.global_batch_size is not None, "needs a resolved configuration"
    num_lanes = min(config.batch.global_batch_size, len(corpus.validation))
    is_apart = config.data.slice is None or any(file.format != "tokens" for file in find_files(config.data.sources))
    return Lanes(corpus.validation, config.run.seed, num_lanes) if num_lanes and is_apart else None


def blend_stages(blend: BlendConfig) -> list[BlendStage]:
    """Stages with the weights of all sources, in the sources' order."""
    return [
        BlendStage(from_token=stage.from_token, weights=tuple(stage.weights.get(name, 0.0) for name in blend.sources))
        for stage in blend.stages
    ]


def describe_data(config: Config, corpus: Corpus) -> Iterator[str]:
    """Lines for a person, where training reads anything else than all of the text."""
    if config.data.blend is not None:
        yield from _describe_blend(config.data.blend, corpus)
    if config.data.slice is not None:
        yield from _describe_slice(config, corpus)


def _describe_blend(blend: BlendConfig, corpus: Corpus) -> Iterator[str]:
    """What each source has, and the weights of each stage."""
    counts = _counts_by_source(blend, corpus)
    yield "blend: " + ", ".join(f"{name} {count:,} documents" for name, count in counts.items())
    for stage in blend.stages:
        yield f"blend: from token {stage.from_token:,} on {_shares(stage)} of the tokens"


def describe_begun_stages(blend: BlendConfig, step: int, tokens: range) -> Iterator[str]:
    """A line for each further stage that has begun among the run's `tokens`, those of this step."""
    for stage in blend.stages[1:]:
        if stage.from_token in tokens:
            yield f"step {step}: data.blend is now {_shares(stage)} of the tokens, from token {stage.from_token:,} on"


def _shares(stage: BlendStageConfig) -> str:
    total = sum(stage.weights.values())
    return ", ".join(f"{name} {weight / total:.4g}" for name, weight in stage.weights.items())


def _describe_slice(config: Config, corpus: Corpus) -> Iterator[str]:
    """Where it lies, how often the run reads it, and where another run would go on."""
    file, part = _slice(config)
    steps = num_steps(config)
    passes = steps / part.num_batches
    yield (
        f"slice: tokens {part.start:,} to {part.stop:,} of {file.num_tokens:,}, {part.num_batches:,} global batches, "
        f"which this run's {steps:,} steps read {passes:.3g} times; a run that goes on behind it has "
        f"data.slice.start_token {part.stop}"
    )
    if build_evaluation_lanes(config, corpus) is None:
        yield "slice: no evaluation, for want of a validation.safetensors beside the file that is trained on"


def fingerprint_data(config: Config, corpus: Corpus) -> dict[str, Any]:
    """What tells this text, cut, tokenised and dealt to lanes as it is, from another."""
    identity: dict[str, Any] = {
        "fingerprint": corpus.fingerprint,
        "num_train_tokens": corpus.num_train_tokens,
        "num_documents": len(corpus.train),
        "document_chars": corpus.document_chars,
        "vocab_size": corpus.vocab_size,
    }
    if config.data.blend is not None:
        return _extend_fingerprint(identity, blend=_counts_by_source(config.data.blend, corpus))
    if config.data.slice is not None:
        part = _slice(config)[1]
        return _extend_fingerprint(identity, slice={"start_token": part.start, "sequence_length": part.sequence_length})
    return identity


def _extend_fingerprint(identity: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The identity of a text of which more is to be told: its fingerprint covers that, too."""
    both = hashlib.sha256(json.dumps([identity["fingerprint"], more]).encode()).hexdigest()
    return {**identity, "fingerprint": both, **more}


# --- sources ----------------------------------------------------------------------------------------------------------


def _all_sources(data: DataConfig) -> list[str]:
    """Files, folders and globs of the whole text, those of a blend one source after the other."""
    if data.blend is None:
        return data.sources
    return [path for paths in data.blend.sources.values() for path in paths]


def _document_chars(data: DataConfig, num_lanes: int) -> int | None:
    """Where plain text is cut; of a blend so that the smallest source feeds every lane. None: as the corpus says."""
    if data.document_chars is not None or data.blend is None:
        return data.document_chars
    sizes = [sum(file.path.stat().st_size for file in find_files(paths)) for paths in data.blend.sources.values()]
    return choose_document_chars(min(sizes), num_lanes, data.validation_fraction)


def _documents_by_source(blend: BlendConfig, corpus: Corpus) -> list[np.ndarray]:
    """Indices of the training documents of each source, in order; a corpus numbers its files as they are found."""
    last_files = np.cumsum([len(find_files(paths)) for paths in blend.sources.values()])
    by_document = np.searchsorted(last_files, corpus.train_document_index[:, 0], side="right")
    return [np.flatnonzero(by_document == number) for number in range(len(blend.sources))]


def _counts_by_source(blend: BlendConfig, corpus: Corpus) -> dict[str, int]:
    """Training documents of each source."""
    return {name: len(each) for name, each in zip(blend.sources, _documents_by_source(blend, corpus), strict=True)}


def _slice(config: Config) -> tuple[TokenFile, TokenSlice]:
    """The one file to train on, and which part of it."""
    part, batch = config.data.slice, config.batch
    assert part is not None and batch.global_batch_size is not None
    files = [file for file in find_files(config.data.sources) if file.format != "tokens for validation"]
    if [file.format for file in files] != ["tokens"]:
        names = ", ".join(file.path.name for file in files[:3])
        raise DataError(
            f"data.slice is a part of one file of tokens, and data.sources has {len(files)} files ({names} ...): name a"
            " folder that launch/prepare.py has made, or one .safetensors file"
        )
    opened = open_token_file(files[0].path)
    return opened, plan_slice(
        opened.num_tokens,
        start_token=part.start_token,
        min_tokens=part.min_tokens,
        global_batch_size=batch.global_batch_size,
        sequence_length=batch.sequence_length,
    )
