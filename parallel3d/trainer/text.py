"""From the configuration and the corpus to what feeds training: lanes over all text, or a blend of its sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.config.blend import BlendConfig
from parallel3d.config.schema import Config, DataConfig
from parallel3d.data.blend import Blend, BlendStage, Selection
from parallel3d.data.corpus import Corpus, load_corpus
from parallel3d.data.lanes import Lanes
from parallel3d.data.reader import Reader
from parallel3d.data.recipe import choose_document_chars
from parallel3d.data.sources import find_files
from parallel3d.errors import DataError


def all_sources(data: DataConfig) -> list[str]:
    """Files, folders and globs of the whole text, those of a blend one source after the other."""
    if data.blend is None:
        return data.sources
    return [path for paths in data.blend.sources.values() for path in paths]


def document_chars(data: DataConfig, num_lanes: int) -> int | None:
    """Where plain text is cut; of a blend so that the smallest source feeds every lane. None: as the corpus says."""
    if data.document_chars is not None or data.blend is None:
        return data.document_chars
    sizes = [sum(file.path.stat().st_size for file in find_files(paths)) for paths in data.blend.sources.values()]
    return choose_document_chars(min(sizes), num_lanes, data.validation_fraction)


def build_reader(config: Config, corpus: Corpus) -> Reader:
    """What feeds the training slots; DataError where a source is too small."""
    seed, num_lanes, blend = config.run.seed, config.batch.global_batch_size, config.data.blend
    assert num_lanes is not None, "needs a resolved configuration"
    if blend is None:
        return Lanes(corpus.train, seed, num_lanes)
    sources = []
    for name, indices in zip(blend.sources, _documents_by_source(blend, corpus), strict=True):
        try:
            sources.append(Lanes(Selection(corpus.train, indices), seed, num_lanes))
        except DataError as error:
            raise DataError(f"data.blend.sources.{name}: {error}") from None
    return Blend(sources, blend_stages(blend), seed)


def open_reader(config: Config, folder: Path) -> Reader:
    """The same in another process of this host, from the corpus' folder."""
    return build_reader(config, load_corpus(folder))


def blend_stages(blend: BlendConfig) -> list[BlendStage]:
    """Stages with the weights of all sources, in the sources' order."""
    return [
        BlendStage(from_token=stage.from_token, weights=tuple(stage.weights.get(name, 0.0) for name in blend.sources))
        for stage in blend.stages
    ]


def describe_blend(config: Config, corpus: Corpus) -> Iterator[str]:
    """Lines for a person: what each source has, and the weights of each stage."""
    blend = config.data.blend
    if blend is None:
        return
    counts = [len(indices) for indices in _documents_by_source(blend, corpus)]
    yield "blend: " + ", ".join(f"{name} {count:,} documents" for name, count in zip(blend.sources, counts))
    for stage in blend.stages:
        shares = ", ".join(
            f"{name} {weight / sum(stage.weights.values()):.4g}" for name, weight in stage.weights.items()
        )
        yield f"blend: from token {stage.from_token:,} on {shares} of the tokens"


def identify(config: Config, corpus: Corpus) -> dict[str, Any]:
    """What tells this text, cut, tokenised and dealt to lanes as it is, from another."""
    identity: dict[str, Any] = {
        "fingerprint": corpus.fingerprint,
        "num_train_tokens": corpus.num_train_tokens,
        "num_documents": len(corpus.train),
        "document_chars": corpus.document_chars,
        "vocab_size": corpus.vocab_size,
    }
    if config.data.blend is None:
        return identity
    counts = {
        name: len(indices)
        for name, indices in zip(config.data.blend.sources, _documents_by_source(config.data.blend, corpus))
    }
    both = hashlib.sha256(json.dumps([corpus.fingerprint, counts]).encode()).hexdigest()
    return {**identity, "fingerprint": both, "blend": counts}


def _documents_by_source(blend: BlendConfig, corpus: Corpus) -> list[np.ndarray]:
    """Indices of the training documents of each source, in order; a corpus numbers its files as they are found."""
    last_files = np.cumsum([len(find_files(paths)) for paths in blend.sources.values()])
    by_document = np.searchsorted(last_files, corpus.train_places[:, 0], side="right")
    return [np.flatnonzero(by_document == number) for number in range(len(blend.sources))]
