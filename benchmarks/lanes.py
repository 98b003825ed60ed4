"""Measures how fast one thread reads lanes of the built-in corpus, vocabulary 4096. `python benchmarks/lanes.py`"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parallel3d.config.sections.data import TokenizerConfig
from parallel3d.data.corpus import Corpus, open_corpus
from parallel3d.data.lanes import Cursor, Lanes
from parallel3d.parallel.abort import AbortToken

NUM_LANES, NUM_TOKENS, NUM_STEPS = 16, 512, 100


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for what in ("built", "reopened"):
            started = time.perf_counter()
            corpus = open_built_in(Path(folder))
            print(f"{what} in {time.perf_counter() - started:.2f} s")
        documents = len(corpus.train) + len(corpus.validation)
        print(
            f"{documents:,} documents, {corpus.num_train_tokens:,} training tokens, "
            f"unigram entropy {corpus.unigram_entropy:.3f} nats"
        )
        lanes = Lanes(corpus.train, 1, NUM_LANES)
        cursors = [Cursor.start()] * NUM_LANES
        started = time.perf_counter()
        for _ in range(NUM_STEPS):
            cursors = [lanes.read(lane, cursor, NUM_TOKENS)[1] for lane, cursor in enumerate(cursors)]
        speed = NUM_LANES * NUM_TOKENS * NUM_STEPS / (time.perf_counter() - started)
        print(f"read at {speed:,.0f} tokens/s")


def open_built_in(folder: Path) -> Corpus:
    return open_corpus(
        sources=[],
        text_column="text",
        document_chars=None,
        validation_fraction=0.01,
        num_lanes=NUM_LANES,
        tokenizer=TokenizerConfig(vocab_size=4096),
        cache_directory=folder,
        token=AbortToken(),
        log=lambda text: None,
    )


if __name__ == "__main__":
    main()
