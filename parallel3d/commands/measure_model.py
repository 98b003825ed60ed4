"""What `parallel3d evaluate` computes: figures of one model, on held-out text, files or tasks; a table, a JSON file."""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from parallel3d.commands.harness_tasks import open_task_model, run_tasks
from parallel3d.commands.trained_model import (
    TrainedModel,
    compute_config,
    default_window,
    find_tokenizer,
    log,
    open_trained,
    score_rows,
)
from parallel3d.config.json_file import apply_override
from parallel3d.config.schema import Config
from parallel3d.data.corpus import Corpus
from parallel3d.data.run_data import fingerprint_data, open_run_corpus
from parallel3d.data.tokenizer import Tokenizer
from parallel3d.errors import CheckpointError, ConfigError, DataError, UserError
from parallel3d.evaluation.held_out import HeldOutDocuments, HeldOutText, Slice, text_of_test
from parallel3d.evaluation.results import GroupResult, format_table
from parallel3d.evaluation.rows import RowScore, ScoredRow
from parallel3d.evaluation.text_files import NamedFile, last_word_rows, parse_files, text_rows
from parallel3d.parallel.abort import AbortToken

PROGRESS_S = 10.0
Figures = dict[str, dict[str, Any]]


def evaluate(options: argparse.Namespace) -> None:
    """Prints the figures and writes them into a file; raises UserError and OSError."""
    trained = open_trained(options.at or options.source)
    began = time.monotonic()
    if options.tasks:
        figures, more = evaluate_tasks(options, trained)
    elif options.files:
        figures, more = evaluate_files(options, trained)
    else:
        figures, more = evaluate_held_out(options, trained)
    settings = {"model": describe_model(options, trained), **more}
    report = {**settings, "results": figures, "seconds": round(time.monotonic() - began, 3)}
    text = json.dumps(report, indent=1, ensure_ascii=False)
    path = options.out or free_path(f"evaluation-{name_of(trained)}", settings)
    path.write_text(text + "\n", encoding="utf-8")
    print(text if options.json else format_table(figures))
    log(f"written to {path}, after {report['seconds']:.1f} s")


# --- what the run has held out ----------------------------------------------------------------------------------------


def evaluate_held_out(options: argparse.Namespace, trained: TrainedModel) -> tuple[Figures, dict[str, Any]]:
    """The run's own text: what its evaluations read, what they never touched, or its test."""
    run = run_config(options, trained)
    corpus = open_run_corpus(run, AbortToken(), log)
    check_text(trained, run, corpus)
    part: Slice = options.slice or ("all" if options.by or options.tokens else "seen")
    if part == "test":
        text = text_of_test(run, corpus, options.by, options.tokens)
    else:
        documents = HeldOutDocuments(run, corpus)
        text = documents.seen_text() if part == "seen" else documents.packed_text(part, options.by, options.tokens)
    length = max(row.length for row in text.rows)
    config = compute_config(trained, options, length, refusal=f"sequences of {length} tokens: too long for the model")
    document_end = corpus.train.eos_id if run.data.document_mask else None
    figures = held_out_figures(text, score(options, trained, config, text.rows, document_end))
    about = {"task": "held-out text", "slice": part, "by": options.by, "sequence_length": length}
    return figures, {**about, **describe_tokens(options, corpus.tokenizer, config)}


def held_out_figures(text: HeldOutText, scores: Sequence[RowScore]) -> Figures:
    groups = [
        GroupResult.of(name, (score for row, score in zip(text.rows, scores) if row.group == number))
        for number, name in enumerate(text.names)
    ]
    groups += [GroupResult.sum_of("all", groups)] if len(groups) > 1 else []
    return {group.name: group.text_figures() for group in groups}


def run_config(options: argparse.Namespace, trained: TrainedModel) -> Config:
    """The configuration of the run that saved the checkpoint, with the fields that --set replaces."""
    if trained.index is None or trained.data is None:
        raise UserError(f"{trained.folder} is not of a run of ours, which would have held out text: name files")
    raw = copy.deepcopy(trained.index.facts.config)
    if problems := [problem for override in options.set for problem in apply_override(raw, override)]:
        raise ConfigError(problems)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise CheckpointError(f"{trained.folder} holds a configuration that can't be read: {error}") from None


def check_text(trained: TrainedModel, run: Config, corpus: Corpus) -> None:
    """Raises DataError if the sources are not the text that the run was trained on: held out may mean trained on."""
    before = trained.index.facts.text.get("fingerprint") if trained.index is not None else None
    if before is not None and before != fingerprint_data(run, corpus)["fingerprint"]:
        raise DataError(
            "data.sources holds another text than the run was trained on, so what is held out now was trained on, "
            "perhaps: give the text's place with --set, or name files"
        )


# --- files ------------------------------------------------------------------------------------------------------------


def evaluate_files(options: argparse.Namespace, trained: TrainedModel) -> tuple[Figures, dict[str, Any]]:
    """Every token of files, or the last word of each passage in them."""
    files = parse_files(options.files)
    tokenizer = find_tokenizer(trained, options.tokenizer)
    check_vocabulary(trained, tokenizer)
    prefix = trained.prefix_of(tokenizer)
    window = options.window or default_window(trained)
    stride = options.stride or window
    if stride > window:
        raise UserError(f"--stride {stride}: is more than the model's window of {window}")
    refusal = f"--window {window}: the model has learned {trained.model.max_position_embeddings} positions"
    config = compute_config(trained, options, window, refusal=refusal)
    rows, sizes = [], []
    for number, file in enumerate(files):
        common: dict[str, Any] = dict(window=window, text_column=options.text_column, group=number)
        if options.last_word:
            rows += last_word_rows(file, tokenizer, prefix=prefix, **common)
        else:
            first = prefix[-1] if prefix else tokenizer.eos_id
            found, size = text_rows(file, tokenizer, first=first, stride=stride, **common)
            rows += found
            sizes.append((size.num_words, size.num_bytes))
    scores = score(options, trained, config, rows, None)
    groups = []
    for number, file in enumerate(files):
        mine = (each for row, each in zip(rows, scores) if row.group == number)
        words, num_bytes = sizes[number] if sizes else (None, None)
        groups.append(GroupResult.of(str(file.path), mine, words=words, num_bytes=num_bytes))
    named = group_by_domain(files, groups)
    figures = {each.name: each.last_word_figures() if options.last_word else each.text_figures() for each in named}
    about = {"task": "last word" if options.last_word else "text", "window": window}
    about |= {} if options.last_word else {"stride": stride}
    return figures, {**about, **describe_tokens(options, tokenizer, config)}


def group_by_domain(files: Sequence[NamedFile], groups: Sequence[GroupResult]) -> list[GroupResult]:
    """Each file, then each domain of several, then all."""
    domains = dict.fromkeys(file.domain for file in files if file.domain is not None)
    sums = [
        GroupResult.sum_of(str(domain), [each for file, each in zip(files, groups) if file.domain == domain])
        for domain in domains
    ]
    whole = [GroupResult.sum_of("all", groups)] if len(groups) > 1 else []
    return [*groups, *sums, *whole]


def check_vocabulary(trained: TrainedModel, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > trained.model.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, and the model a vocabulary of "
            f"{trained.model.vocab_size:,}: it belongs to another model, give the right one with --tokenizer"
        )


# --- tasks ------------------------------------------------------------------------------------------------------------


def evaluate_tasks(options: argparse.Namespace, trained: TrainedModel) -> tuple[Figures, dict[str, Any]]:
    """Tasks of lm-evaluation-harness."""
    model = open_task_model(options, trained)
    check_vocabulary(trained, model.tokenizer)
    figures = run_tasks(options, model)
    about = {"task": options.tasks, "window": model.window, "limit": options.limit, "fewshot": options.fewshot}
    return figures, {**about, **describe_tokens(options, model.tokenizer, model.config)}


# --- both -------------------------------------------------------------------------------------------------------------


def score(
    options: argparse.Namespace,
    trained: TrainedModel,
    config: Config,
    rows: Sequence[ScoredRow],
    document_end: int | None,
) -> list[RowScore]:
    device = torch.device(options.device)
    heard = progress(sum(row.num_targets for row in rows))
    return score_rows(
        config,
        trained,
        rows,
        device,
        batch_size=options.batch_size,
        document_end=document_end,
        on_batch=heard,
    )


def progress(total: int) -> Callable[[int], None]:
    """Logs now and then how much is done."""
    done, last_s = 0, time.monotonic()

    def hear(num_tokens: int) -> None:
        nonlocal done, last_s
        done += num_tokens
        if time.monotonic() - last_s >= PROGRESS_S:
            last_s = time.monotonic()
            log(f"{done:,} of {total:,} tokens")

    return hear


def name_of(trained: TrainedModel) -> str:
    """The run's name and the step, as in quickstart-200; of weights of others the name of their folder."""
    if trained.index is None:
        return trained.folder.resolve().name
    directory = trained.index.facts.config.get("run", {}).get("directory")
    return f"{Path(directory).name if directory else 'model'}-{trained.index.step}"


def free_path(stem: str, settings: Mapping[str, Any]) -> Path:
    """The first of STEM.json, STEM-2.json, ... that does not exist, or holds an evaluation with the same settings."""
    asked, number = json.loads(json.dumps(settings)), 1
    path = Path(f"{stem}.json")
    while path.exists() and not _holds(path, asked):
        number += 1
        path = Path(f"{stem}-{number}.json")
    return path


def _holds(path: Path, settings: Mapping[str, Any]) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(found, dict) and all(found.get(name) == value for name, value in settings.items())


def describe_model(options: argparse.Namespace, trained: TrainedModel) -> dict[str, Any]:
    """Where the weights are from; `config_hash` is that of the run's configuration."""
    folder = trained.folder
    if options.at is not None:  # held for this command
        folder = folder.with_name(folder.name.partition(".")[0])
    found: dict[str, Any] = {"source": str(options.source), "folder": str(folder)}
    if trained.index is not None:
        facts = trained.index.facts
        found |= {"step": trained.index.step, "tokens": facts.state.get("tokens_trained")}
        found |= {"saved_at": trained.index.created_at, "config_hash": hash_of(facts.config)}
    else:
        found |= {"config_hash": hash_of(trained.model.model_dump())}
    return {**found, "layout": options.layout}


def describe_tokens(options: argparse.Namespace, tokenizer: Tokenizer | None, config: Config) -> dict[str, Any]:
    about: dict[str, Any] = {"policy": config.precision.policy, "files": options.files}
    if tokenizer is not None:
        digest = hashlib.sha256()
        for name, data in sorted(tokenizer.files.items()):
            digest.update(name.encode() + b"\0" + data)
        about["tokenizer"] = {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "hash": digest.hexdigest()[:16],
        }
    return about


def hash_of(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]
