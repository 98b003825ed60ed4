"""Builds the corpus of a configuration, and the readers of it.

Training reads the lanes of all text, a mixture of its sources, or a slice of one file of tokens. Evaluation reads the
lanes of the text that is held out for it.
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
from parallel3d.data.conversation_lanes import ConversationLanes
from parallel3d.data.corpus import Corpus, load_corpus, open_corpus
from parallel3d.data.corpus_spec import choose_document_chars
from parallel3d.data.documents import TokenDocuments
from parallel3d.data.lanes import Lanes
from parallel3d.data.reader import Reader
from parallel3d.data.reader_process import ReaderProcess
from parallel3d.data.remote import fetch, local_path
from parallel3d.data.sources import SourceFile, find_files
from parallel3d.data.token_file import TokenFile
from parallel3d.data.token_formats import open_tokens
from parallel3d.data.token_slice import TokenSlice, TokenSliceReader, plan_slice
from parallel3d.errors import DataError
from parallel3d.parallel.abort import AbortToken

BUILT_IN = "the built-in text"
NUM_DESCRIBED = 256
"""Conversations that are read for a description."""


def open_run_corpus(config: Config, token: AbortToken, log: Callable[[str], None]) -> Corpus:
    """Returns the corpus. On first use one process of each host builds it, and logs that."""
    data, num_lanes = config.data, config.batch.global_batch_size
    assert data.cache_directory is not None and num_lanes is not None, "needs a resolved configuration"
    cache, path = Path(data.cache_directory), data.tokenizer.path
    fetch([*_all_sources(data), *([] if path is None else [path])], cache, token, log)
    return open_corpus(
        sources=_local(data, _all_sources(data)),
        text_column=data.text_column,
        document_chars=_document_chars(data, num_lanes),
        validation_fraction=data.validation_fraction,
        test_fraction=data.test_fraction,
        num_lanes=num_lanes,
        tokenizer=data.tokenizer.model_copy(update={"path": path and _local_tokenizer(path, cache)}),
        chat=data.chat,
        own_formats=data.formats,
        needs_eos=data.slice is None or data.document_mask,
        cache_directory=cache,
        token=token,
        log=log,
    )


def lanes_of(config: Config) -> Callable[[TokenDocuments, int, int], Lanes]:
    """The kind of lanes: text continues from one sequence to the next, a conversation does not."""
    chat = config.data.chat
    return Lanes if chat is None else partial(ConversationLanes, packs=chat.pack)


def build_reader(config: Config, corpus: Corpus) -> Reader:
    """Returns the reader of the training data; DataError if there is too little text."""
    seed, num_lanes, blend = config.run.seed, config.batch.global_batch_size, config.data.blend
    assert num_lanes is not None, "needs a resolved configuration"
    if config.data.slice is not None:
        return TokenSliceReader(*_slice(config))
    if blend is None:
        return lanes_of(config)(corpus.train, seed, num_lanes)
    sources = []
    for name, indices in zip(blend.sources, _documents_by_source(config.data, blend, corpus), strict=True):
        try:
            sources.append(lanes_of(config)(Subset(corpus.train, indices), seed, num_lanes))
        except DataError as error:
            raise DataError(f"data.blend.sources.{name}: {error}") from None
    return BlendedReader(sources, blend_stages(blend), seed)


def build_reader_processes(
    config: Config, corpus: Corpus, token: AbortToken, log: Callable[[str], None]
) -> list[ReaderProcess]:
    """Returns the processes that read ahead, as many as the configuration sets; none for a slice of tokens."""
    make_reader = partial(_open_reader, config, corpus.folder)
    count = config.data.num_processes if config.data.slice is None else 0
    return [ReaderProcess(make_reader, token, log) for _ in range(count)]


def _open_reader(config: Config, folder: Path) -> Reader:
    return build_reader(config, load_corpus(folder))


def build_evaluation_lanes(config: Config, corpus: Corpus) -> Lanes | None:
    """Returns as many lanes as the validation text can feed; None if there is none.

    A slice covers all of its range in the file, so evaluation can't hold out a part of it.
    """
    assert config.batch.global_batch_size is not None, "needs a resolved configuration"
    num_lanes = min(config.batch.global_batch_size, len(corpus.validation))
    files = _files(config.data, config.data.sources)
    is_apart = config.data.slice is None or any(file.format == "tokens for validation" for file in files)
    return lanes_of(config)(corpus.validation, config.run.seed, num_lanes) if num_lanes and is_apart else None


def blend_stages(blend: BlendConfig) -> list[BlendStage]:
    """Returns the stages, each with the weights of all sources in the sources' order."""
    return [
        BlendStage(from_token=stage.from_token, weights=tuple(stage.weights.get(name, 0.0) for name in blend.sources))
        for stage in blend.stages
    ]


def describe_data(config: Config, corpus: Corpus) -> Iterator[str]:
    """Yields lines to log if training reads a mixture, a slice or conversations."""
    if config.data.blend is not None:
        yield from _describe_blend(config.data, config.data.blend, corpus)
    if config.data.slice is not None:
        yield from _describe_slice(config, corpus)
    if config.data.chat is not None:
        yield _describe_chat(corpus.train, config.batch.sequence_length)


def _describe_blend(data: DataConfig, blend: BlendConfig, corpus: Corpus) -> Iterator[str]:
    """Yields the size of each source, and the weights of each stage."""
    counts = _counts_by_source(data, blend, corpus)
    yield "blend: " + ", ".join(f"{name} {count:,} documents" for name, count in counts.items())
    for stage in blend.stages:
        yield f"blend: from token {stage.from_token:,} on {_shares(stage)} of the tokens"


def describe_begun_stages(blend: BlendConfig, step: int, tokens: range) -> Iterator[str]:
    """Yields a line for each further stage that starts within the run's `tokens` of this step."""
    for stage in blend.stages[1:]:
        if stage.from_token in tokens:
            yield f"step {step}: data.blend is now {_shares(stage)} of the tokens, from token {stage.from_token:,} on"


def _shares(stage: BlendStageConfig) -> str:
    total = sum(stage.weights.values())
    return ", ".join(f"{name} {weight / total:.4g}" for name, weight in stage.weights.items())


def _describe_chat(conversations: TokenDocuments, sequence_length: int) -> str:
    """The share of the tokens that are learned, and how many conversations are cut, of the first ones."""
    first = [conversations.tokens(index) for index in range(min(len(conversations), NUM_DESCRIBED))]
    num_tokens, num_learned = (sum(counts) for counts in zip(*((len(each), int((each >= 0).sum())) for each in first)))
    num_cut = sum(len(each) > sequence_length for each in first)
    cut = f"; {num_cut:,} of them lose their end, which batch.sequence_length does not hold" if num_cut else ""
    learned = f"of the first {len(first):,}, {num_learned / num_tokens:.0%} of the tokens are learned"
    return f"chat: {len(conversations):,} conversations; {learned}{cut}"


def _describe_slice(config: Config, corpus: Corpus) -> Iterator[str]:
    """Yields its range, how often the run reads it, and where another run would continue."""
    file, part = _slice(config)
    steps = num_steps(config)
    passes = steps / part.num_batches
    yield (
        f"slice: tokens {part.start:,} to {part.stop:,} of {file.num_tokens:,}, {part.num_batches:,} global batches, "
        f"which the {steps:,} steps of this run read {passes:.3g} times; to continue after it, set "
        f"data.slice.start_token to {part.stop}"
    )
    if build_evaluation_lanes(config, corpus) is None:
        yield "slice: no evaluation, because the folder of the training file has no validation.safetensors"


def fingerprint_data(config: Config, corpus: Corpus) -> dict[str, Any]:
    """Identifies the text as it is split, tokenised and distributed to lanes."""
    identity: dict[str, Any] = {
        "fingerprint": corpus.fingerprint,
        "num_train_tokens": corpus.num_train_tokens,
        "num_documents": len(corpus.train),
        "document_chars": corpus.document_chars,
        "vocab_size": corpus.vocab_size,
    }
    if config.data.chat is not None and not config.data.chat.pack:
        identity = _extend_fingerprint(identity, pack=False)
    if config.data.blend is not None:
        return _extend_fingerprint(identity, blend=_counts_by_source(config.data, config.data.blend, corpus))
    if config.data.slice is not None:
        part = _slice(config)[1]
        return _extend_fingerprint(identity, slice={"start_token": part.start, "sequence_length": part.sequence_length})
    return identity


def _extend_fingerprint(identity: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Adds entries to the identity of a text, and to what its fingerprint covers."""
    both = hashlib.sha256(json.dumps([identity["fingerprint"], more]).encode()).hexdigest()
    return {**identity, "fingerprint": both, **more}


# --- sources ----------------------------------------------------------------------------------------------------------


def _all_sources(data: DataConfig) -> list[str]:
    """Files, folders and globs of the whole text, those of a mixture one source after the other."""
    if data.blend is None:
        return data.sources
    return [path for paths in data.blend.sources.values() for path in paths]


def _local(data: DataConfig, sources: list[str]) -> list[str]:
    """The sources with remote ones replaced by their copies in the cache."""
    return [local_path(source, Path(str(data.cache_directory))) for source in sources]


def _local_tokenizer(path: str, cache_directory: Path) -> str:
    """Where a tokenizer is: of a remote one the copy, which is the only file of its folder or a folder."""
    local = local_path(path, cache_directory)
    files = [] if local == path else [*Path(local).iterdir()]
    return str(files[0]) if len(files) == 1 else local


def _files(data: DataConfig, sources: list[str]) -> list[SourceFile]:
    return find_files(_local(data, sources), data.formats)


def source_files(data: DataConfig) -> dict[str, list[Path]]:
    """The files of each source in the corpus' order: by the source's name in a mixture, else as data.sources has it."""
    sources = data.blend.sources if data.blend is not None else {source: [source] for source in data.sources}
    return {name: [file.path for file in _files(data, paths)] for name, paths in (sources or {BUILT_IN: []}).items()}


def _document_chars(data: DataConfig, num_lanes: int) -> int | None:
    """Length of documents of plain text; for a mixture, short enough that the smallest source feeds every lane. None:
    the corpus decides."""
    if data.document_chars is not None or data.blend is None:
        return data.document_chars
    sizes = [sum(file.path.stat().st_size for file in _files(data, paths)) for paths in data.blend.sources.values()]
    return choose_document_chars(min(sizes), num_lanes, data.validation_fraction)


def _documents_by_source(data: DataConfig, blend: BlendConfig, corpus: Corpus) -> list[np.ndarray]:
    """Indices of the training documents of each source, in order; a corpus numbers its files in the order of
    sources."""
    last_files = np.cumsum([len(_files(data, paths)) for paths in blend.sources.values()])
    by_document = np.searchsorted(last_files, corpus.train_document_index[:, 0], side="right")
    return [np.flatnonzero(by_document == number) for number in range(len(blend.sources))]


def _counts_by_source(data: DataConfig, blend: BlendConfig, corpus: Corpus) -> dict[str, int]:
    """Number of training documents of each source."""
    by_source = _documents_by_source(data, blend, corpus)
    return {name: len(each) for name, each in zip(blend.sources, by_source, strict=True)}


def _slice(config: Config) -> tuple[TokenFile, TokenSlice]:
    """The file to train on, and the part of it."""
    part, batch = config.data.slice, config.batch
    assert part is not None and batch.global_batch_size is not None
    files = [file for file in _files(config.data, config.data.sources) if not file.format.startswith("tokens for")]
    if [file.format for file in files] != ["tokens"]:
        names = ", ".join(file.path.name for file in files[:3])
        raise DataError(
            f"data.slice needs one file of tokens, and data.sources has {len(files)} files ({names} ...): name a folder"
            " that launch/prepare.py has made, or one file of tokens"
        )
    opened = open_tokens(files[0].path)
    return opened, plan_slice(
        opened.num_tokens,
        start_token=part.start_token,
        min_tokens=part.min_tokens,
        global_batch_size=batch.global_batch_size,
        sequence_length=batch.sequence_length,
    )
