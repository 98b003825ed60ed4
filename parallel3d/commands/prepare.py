"""Prepares data before a run: `python launch/prepare.py --config FILE [--out FOLDER] [--tokenizer-out PATH] ...`

Reads the text that the section `data` names, trains a tokenizer unless the section names one, and

  --out FOLDER           tokenises all of it into FOLDER: with 'data.sources=["FOLDER"]' a run sees the same batches
  --tokenizer-out PATH   keeps the tokenizer, for data.tokenizer.path of this and other runs: a file for a SentencePiece
                         model, a new folder for Hugging Face's files

Ctrl-C and SIGTERM leave no partial output. Exit codes: 0 done, 2 invalid input, 130 stopped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from tqdm import tqdm

from parallel3d.commands.parsers import make_parser, parse
from parallel3d.config.load import load_config, resolve
from parallel3d.data.corpus import Corpus
from parallel3d.data.documents import TokenizedDocuments
from parallel3d.data.formats import DocumentSet
from parallel3d.data.prepare import prepare, refuse_existing
from parallel3d.data.run_data import open_run_corpus
from parallel3d.data.tokenizer import MODEL_FILE
from parallel3d.data.tokenizer_files import save_tokenizer
from parallel3d.errors import DataError, UserError
from parallel3d.parallel.abort import AbortToken

EXIT_INTERRUPTED = 130
MIXED = (
    "data.blend has several sources, and the folder of --out would mix them: keep one tokenizer (--tokenizer-out), then"
    " prepare each source into a folder of its own, with data.sources instead of data.blend and data.tokenizer.path"
)
MASKED = (
    "data.chat marks which tokens are learned, and files of tokens do not hold that: train on the .jsonl files;"
    " --tokenizer-out keeps their tokenizer"
)


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        config = resolve(load_config(options.config, options.overrides), config_path=options.config)
        if config.data.blend is not None and options.out is not None:
            raise DataError(MIXED)
        if config.data.chat is not None and options.out is not None:
            raise DataError(MASKED)
        if options.out is not None:
            refuse_existing(options.out)
        corpus = open_run_corpus(config, AbortToken(), log)
        if options.tokenizer_out is not None:
            keep_tokenizer(corpus, options.tokenizer_out)
        if options.out is not None:
            tokenise(corpus, options.out, options.processes)
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    options = parse("prepare", arguments)
    error = make_parser("prepare").error
    if options.out is None and options.tokenizer_out is None:
        error("give --out FOLDER, --tokenizer-out PATH, or both")
    if options.processes < 1:
        error("--processes must be at least 1")
    return options


def keep_tokenizer(corpus: Corpus, path: Path) -> None:
    """Writes the SentencePiece model to a file, or Hugging Face's files to a new folder: all or nothing."""
    tokenizer = corpus.tokenizer
    if tokenizer is None or not tokenizer.files:
        raise DataError("data.tokenizer.kind bytes has no model: nothing to write to --tokenizer-out")
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if MODEL_FILE in tokenizer.files:
            temporary.write_bytes(tokenizer.files[MODEL_FILE])
            temporary.replace(path)
        else:
            temporary.mkdir()
            save_tokenizer(tokenizer, temporary)
            temporary.rename(path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True) if temporary.is_dir() else temporary.unlink(missing_ok=True)
        raise DataError(f"can't write {path} ({error})") from error
    log(f"tokenizer of {corpus.vocab_size:,} pieces: {path} (data.tokenizer.path)")


def tokenise(corpus: Corpus, out: Path, num_processes: int) -> None:
    """Writes the tokens with a progress bar, and prints what was written."""
    total = sum(
        int(each.documents.num_bytes.sum())
        for each in (corpus.train, corpus.validation, corpus.test)
        if isinstance(each, TokenizedDocuments) and isinstance(each.documents, DocumentSet)
    )
    started, num_tokens = time.perf_counter(), 0
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, desc="tokenising") as bar:

        def progress(text_bytes: int, tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            bar.set_postfix_str(f"{num_tokens:,} tokens", refresh=False)
            bar.update(text_bytes)

        prepared = prepare(corpus, out, num_processes=num_processes, progress=progress)
    seconds = time.perf_counter() - started
    for_test = f"{prepared.num_test_tokens:,} for a test, " if prepared.num_test_tokens else ""
    log(
        f"{out}: {prepared.num_documents:,} documents, {prepared.num_train_tokens:,} tokens to train on, "
        f"{prepared.num_validation_tokens:,} to evaluate with, {for_test}{prepared.num_bytes / 1e6:,.1f} MB, "
        f"in {seconds:.1f} s ({num_tokens / seconds:,.0f} tokens/s). Train on it with 'data.sources=[\"{out}\"]'"
    )


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
