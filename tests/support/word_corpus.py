"""A corpus of words, opened as training opens it."""

import random

from parallel3d.config.sections.data import TokenizerConfig
from parallel3d.data.corpus import open_corpus
from parallel3d.parallel.abort import AbortToken

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "an", "old", "dog", "run", "to", "its", "house", "of"]


def lines(num_lines=1500):
    generator = random.Random(3)
    return [" ".join(generator.choices(WORDS, k=8)) + "\n" for _ in range(num_lines)]


def write_words(path):
    """About 40 kB of lines of words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines()))
    return path


def open_words(source, cache, *, log=lambda text: None, token=None, **settings):
    arguments = {
        "sources": [str(source)],
        "text_column": "text",
        "document_chars": None,
        "validation_fraction": 0.01,
        "num_lanes": 4,
        "tokenizer": TokenizerConfig(vocab_size=320),
        **settings,
    }
    return open_corpus(**arguments, cache_directory=cache, token=token or AbortToken(), log=log)
