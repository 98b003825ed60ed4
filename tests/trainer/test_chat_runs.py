"""Training on conversations: the loss is that of the replies alone, whatever the layout, also after a death."""

from __future__ import annotations

import gzip
import json
import re
from functools import cache, partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard

from parallel3d.config.schema import FaultConfig
from parallel3d.data.run_data import (
    build_evaluation_lanes,
    build_reader,
    describe_data,
    fingerprint_data,
    open_run_corpus,
)
from parallel3d.errors import ConfigError, DataError
from parallel3d.inprocess.harness import ElasticRunResult, run_elastic_in_threads, run_in_threads
from parallel3d.parallel.abort import AbortToken
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.plans import build_grid
from parallel3d.worker.fault_injection import FaultInjector
from tests.support import tiny_runs
from tests.support.chats import chat_lanes, plain_step, records
from tests.support.thread_kills import assert_same_run, fault_hooks

LENGTH = 150
LAYOUTS = {
    "dp2": dict(dp_size=2),
    "pp2": dict(pp_size=2),
    "tp2": dict(tp_size=2),
    "tp2-sp": dict(tp_size=2, sequence_parallel=True),
    "pp2-dp2": dict(pp_size=2, dp_size=2),
    "zb-v": dict(pp_size=2, schedule="zb-v", virtual_stages=2),
    "stages-1-3": dict(pp_size=2, stage_replicas=[1, 3]),
}


def make_config(**changes):
    sections = dict(
        batch=dict(global_batch_size=4, micro_batch_size=1, sequence_length=LENGTH),
        data=dict(chat={}, document_mask=True, tokenizer=dict(kind="bytes")),
    )
    return tiny_runs.make_config(**{**sections, **changes})


@cache
def run(layout: str | None, precision: str = "fp64", sums: str = "float"):
    config = make_config(parallel=LAYOUTS[layout] if layout else {}, precision=dict(policy=precision, sums=sums))
    grid = build_grid(config)
    lanes = chat_lanes(config.run.seed, config.batch.global_batch_size)
    return run_in_threads(grid, partial(tiny_runs.build, config, grid, train_lanes=lanes), 3)


def test_the_loss_is_a_hand_written_one():
    """fp64, 1e-10: the same arithmetic in another order; attention of conversations never meets."""
    done, config = run(None), make_config()
    loss, norm, count = plain_step(config, done.initial)
    assert 0 < count < 0.6 * 4 * LENGTH
    assert done.entries[0].num_loss_tokens == count
    assert done.entries[0].num_target_tokens == 4 * LENGTH
    assert done.losses[0] == pytest.approx(loss, rel=1e-11)
    assert done.grad_norms[0] == pytest.approx(norm, rel=1e-10)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_process(layout: str):
    """fp64, 1e-10: the order of additions."""
    one, ours = run(None), run(layout)
    assert ours.losses == pytest.approx(one.losses, rel=1e-11)
    assert [each.num_masked_tokens for each in ours.entries] == [each.num_masked_tokens for each in one.entries]
    for name, weight in one.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-9, atol=1e-10)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["dp2", "pp2", "pp2-dp2", "stages-1-3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_exact_sums_make_it_bitwise(layout: str, precision: str):
    one, ours = run(None, precision, "exact"), run(layout, precision, "exact")
    assert ours.losses == one.losses
    assert all(torch.equal(ours.weights[name], weight) for name, weight in one.weights.items())


def run_with_deaths(faults: list[FaultConfig]) -> ElasticRunResult:
    exact = dict(policy="fp32", sums="exact")
    config = make_config(parallel=dict(pp_size=2, dp_size=2), precision=exact, run=dict(num_steps=4))
    grid = build_grid(config)

    def prepare(rank: int, injector: FaultInjector) -> RankContext:
        lanes = chat_lanes(config.run.seed, config.batch.global_batch_size)
        return tiny_runs.prepare(config, grid, rank, lanes, hooks=fault_hooks(injector, config))

    return run_elastic_in_threads(config, prepare, faults)


@pytest.mark.parametrize("phase", ["forward", "all_reduce", "update"])
def test_a_death_changes_nothing(phase: str):
    """Of the leader, whose masked targets are counted by another rank then."""
    ours, theirs = run_with_deaths([FaultConfig(rank=0, step=2, phase=phase)]), run_with_deaths([])
    assert_same_run(ours, theirs)
    assert ours.num_changes == 1 and min(entry.num_masked_tokens for entry in ours.run.entries) > 0


# --- from files -------------------------------------------------------------------------------------------------------


def write_chats(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def file_config(path: Path, cache: Path, **data):
    settings = dict(chat={}, document_mask=True, tokenizer=dict(kind="bytes"), validation_fraction=0.1)
    return make_config(data={**settings, "sources": [str(path)], "cache_directory": str(cache), **data})


def open_corpus(config):
    return open_run_corpus(config, AbortToken(), lambda text: None)


def test_a_file_of_chats_becomes_lanes(tmp_path: Path):
    """What a run reads is what conversations in memory give; opened again from the cache too."""
    config = file_config(write_chats(tmp_path / "chat.jsonl", records(200)), tmp_path / "cache")
    for _ in range(2):
        corpus = open_corpus(config)
        (line,) = describe_data(config, corpus)
        assert re.fullmatch(r"chat: 1\d\d conversations; of the first 1\d\d, [1-5]\d% of the tokens are learned", line)
        assert len(corpus.train) + len(corpus.validation) == 200
        row = build_reader(config, corpus).read(1, (0, 0, 0), LENGTH)[0]
        assert (row < 0).any() and (row >= 0).any()
        evaluation = build_evaluation_lanes(config, corpus)
        assert evaluation is not None and (evaluation.read(0, (0, 0, 0), LENGTH)[0] < 0).any()


def test_packing_is_part_of_what_a_checkpoint_recognises(tmp_path: Path):
    path = write_chats(tmp_path / "chat.jsonl", records(200))
    packed, apart = (file_config(path, tmp_path / "cache", chat=dict(pack=pack)) for pack in (True, False))
    corpus = open_corpus(packed)
    assert open_corpus(apart).folder == corpus.folder
    assert fingerprint_data(packed, corpus)["fingerprint"] == corpus.fingerprint
    assert fingerprint_data(apart, corpus)["fingerprint"] != corpus.fingerprint


def test_the_template_is_part_of_the_corpus(tmp_path: Path):
    path = write_chats(tmp_path / "chat.jsonl", records(200))
    (tmp_path / "short.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    one = open_corpus(file_config(path, tmp_path / "cache"))
    other = open_corpus(file_config(path, tmp_path / "cache", chat=dict(template=str(tmp_path / "short.jinja"))))
    assert one.fingerprint != other.fingerprint and one.num_train_tokens > other.num_train_tokens


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"text": "no chat"}, "neither 'messages', nor 'conversations', nor 'prompt' and 'completion'; it has 'text'"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": "alone"}]}, "no message has the role 'assistant'"),
        ({"messages": [{"role": "assistant", "content": ["part"]}]}, "'content' of message 1 must be text"),
        ({"messages": [{"content": "x"}]}, "'role' of message 1 must be text, and is missing"),
        ({"messages": ["x"]}, "message 1 is of type str"),
        ({"prompt": "x", "completion": ""}, "'completion' is empty"),
        ({"prompt": 1, "completion": "x"}, "'prompt' must be text"),
        ([1], "must be a JSON object"),
        ({"prompt": "x", "completion": "\ud800"}, "not valid UTF-8"),
    ],
)
@pytest.mark.sample(4)
def test_a_malformed_line_is_named(line: object, expected: str, tmp_path: Path):
    path = write_chats(tmp_path / "chat.jsonl", [*records(150), line, *records(3)])
    with pytest.raises(DataError) as error:
        open_corpus(file_config(path, tmp_path / "cache"))
    assert f"{path}:151: " in str(error.value) and expected in str(error.value)


def table_of(lines: list[dict[str, object]]) -> pa.Table:
    """With a null where a conversation is in other columns, and a column that nobody asked for."""
    columns = {name: [line.get(name) for line in lines] for name in ("messages", "prompt", "completion")}
    return pa.table({"number": list(range(len(lines))), **columns})


def write_kind(folder: Path, kind: str, lines: list[object]) -> Path:
    """The conversations as a source of this kind."""
    plain, path = write_chats(folder / "plain.jsonl", lines).read_bytes(), folder / f"chat.{kind}"
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress(plain))
    elif kind == "jsonl.zst":
        path.write_bytes(zstandard.ZstdCompressor().compress(plain))
    elif kind == "json":
        path.write_text(json.dumps(lines, indent=1))
    elif kind == "parquet":
        pq.write_table(table_of(lines), path, row_group_size=7)
    else:
        name = "data-00000-of-00001.arrow"
        path.mkdir()
        table = table_of(lines)
        with pa.ipc.new_stream(path / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=290)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    return path


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "json", "parquet", "datasets"])
def test_other_kinds_of_files_hold_the_same(kind: str, tmp_path: Path):
    """The same tokens, targets and split as from lines, and the same text to a checkpoint."""
    path = write_kind(tmp_path, kind, records(300))
    plain, ours = (open_corpus(file_config(each, tmp_path / "cache")) for each in (tmp_path / "plain.jsonl", path))
    assert len(ours.train) + len(ours.validation) == 300
    for name in ("train", "validation"):
        one, other = getattr(plain, name), getattr(ours, name)
        assert [one.tokens(index).tolist() for index in range(len(one))] == [
            other.tokens(index).tolist() for index in range(len(other))
        ]
    assert plain.fingerprint == ours.fingerprint


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("jsonl.gz", r"chat\.jsonl\.gz:151: no message has the role 'assistant'"),
        ("json", r"chat\.json: object 151: no message has"),
        ("parquet", r"chat\.parquet, row 150 \(from 0\): no message has"),
        ("datasets", r"data-00000-of-00001\.arrow, row 150 \(from 0\): no message has"),
    ],
)
def test_a_malformed_conversation_in_them_is_named(kind: str, expected: str, tmp_path: Path):
    alone = {"messages": [{"role": "user", "content": "alone"}]}
    path = write_kind(tmp_path, kind, [*records(150), alone, *records(3)])
    with pytest.raises(DataError, match=expected):
        open_corpus(file_config(path, tmp_path / "cache"))


def test_other_files_are_refused(tmp_path: Path):
    (tmp_path / "plain.txt").write_text("some text\n" * 1000)
    with pytest.raises(DataError, match=r"plain\.txt: with data\.chat all sources must be files of conversations"):
        open_corpus(file_config(tmp_path / "plain.txt", tmp_path / "cache"))
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "texts.parquet")
    missing = r"texts\.parquet: no column 'messages' or 'conversations', nor 'prompt' and 'comp.*it has 'text'"
    with pytest.raises(DataError, match=missing):
        open_corpus(file_config(tmp_path / "texts.parquet", tmp_path / "cache"))


def test_the_rules():
    with pytest.raises(ConfigError, match=r"data\.chat.*needs data\.document_mask"):
        make_config(data=dict(chat={}))
    with pytest.raises(ConfigError, match=r"data\.chat\.template.*must be chatml"):
        make_config(data=dict(chat=dict(template="nowhere"), document_mask=True))
