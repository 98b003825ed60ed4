"""The data of a run from real files: all text, blends, slices; its description and its fingerprint."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from parallel3d.commands.prepare import main
from parallel3d.config.load import dump_config
from parallel3d.data.run_data import (
    _open_reader,
    build_evaluation_lanes,
    build_reader,
    build_reader_processes,
    describe_begun_stages,
    describe_data,
    fingerprint_data,
    open_run_corpus,
)
from parallel3d.data.token_file import TokenWriter
from parallel3d.errors import DataError
from parallel3d.parallel.abort import AbortToken
from tests.support import tiny_runs

NUM_LANES, LENGTH = 4, 16


@pytest.fixture
def make(tmp_path):
    """make(blend=..., slice=..., ...) -> (configuration, corpus); bytes are tokens, so that nothing is trained."""

    def build(*, num_steps=10, **data):
        config = tiny_runs.make_config(
            batch=dict(global_batch_size=NUM_LANES, sequence_length=LENGTH),
            data=dict(tokenizer=dict(kind="bytes"), cache_directory=str(tmp_path / "cache")) | data,
            run=dict(num_steps=num_steps),
        )
        return config, open_run_corpus(config, AbortToken(), lambda text: None)

    return build


@pytest.fixture
def books(tmp_path):
    """Two sources of 30 and 12 documents, distinguished by their letters; a blend of them."""
    for name, letter, count in (("large", "a", 30), ("small", "b", 12)):
        lines = [json.dumps({"text": letter * (20 + number)}) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return dict(
        sources={name: [str(tmp_path / f"{name}.jsonl")] for name in ("large", "small")},
        stages=[dict(weights=dict(large=0.25, small=0.75)), dict(from_token=640, weights=dict(large=1.0))],
    )


@pytest.fixture
def prepared(tmp_path):
    """A folder of tokens that are numbers from 1 to 199, in turn; each 0 ends a document."""
    return write_tokens(tmp_path / "prepared", train=np.arange(1001) % 200, validation=np.arange(200))


def write_tokens(folder, **files):
    folder.mkdir()
    for name, tokens in files.items():
        with TokenWriter(folder / f"{name}.safetensors", 257) as writer:
            writer.append(tokens)
            writer.finish({"eos_id": "0"})
    return folder


def sequences(config, reader, num_steps):
    """(steps, lanes): what each step reads, as bytes."""
    cursors = [reader.start(lane) for lane in range(NUM_LANES)]
    steps = []
    for step in range(num_steps):
        row = []
        for lane in range(NUM_LANES):
            cursor = reader.cursor_at(cursors[lane], (step * NUM_LANES + lane) * LENGTH)
            tokens, cursors[lane] = reader.read(lane, cursor, LENGTH)
            row.append(tokens)
        steps.append(row)
    return np.array(steps)


def test_a_blend_reads_its_files_by_their_weights(make, books):
    config, corpus = make(blend=books)
    steps = sequences(config, build_reader(config, corpus), 20)
    letters = (steps == ord("b")).any(axis=2)
    assert not (letters & (steps == ord("a")).any(axis=2)).any(), "a sequence of two sources"
    assert letters[:10].sum() == 30 and not letters[10:].any()


def test_a_blend_of_prepared_folders_trains_on_their_files_for_training(make, tmp_path):
    """Each folder has a file for evaluation too, which stands between the others in the corpus' list of files."""
    sources = {}
    for name, token in (("ones", 1), ("twos", 2), ("threes", 3)):
        tokens = np.where(np.arange(400) % 20 == 19, 0, token)
        sources[name] = [str(write_tokens(tmp_path / name, train=tokens, validation=np.where(tokens, 9, 0)))]
    config, corpus = make(blend=dict(sources=sources, stages=[dict(weights=dict(ones=0.25, twos=0.5, threes=0.25))]))
    steps = sequences(config, build_reader(config, corpus), 20)
    counts = [(steps == token).any(axis=2).sum() for token in (1, 2, 3)]
    assert np.abs(np.array(counts) - (20, 40, 20)).max() <= 2 and not (steps == 9).any()
    assert build_evaluation_lanes(config, corpus).read(0, (0, 0, 0), 8)[0].tolist() == [9] * 9


def test_a_blend_is_not_prepared_into_one_folder(make, books, tmp_path, capsys):
    (tmp_path / "run.json").write_text(dump_config(make(blend=books)[0]))
    assert main(["--config", str(tmp_path / "run.json"), "--out", str(tmp_path / "out")]) == 2
    assert "prepare each source into a folder of its own" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_process_reads_the_same(make, books, prepared):
    for data in (dict(blend=books), dict(sources=[str(prepared)], slice={})):
        config, corpus = make(**data)
        ours, theirs = (
            sequences(config, reader, 5)
            for reader in (build_reader(config, corpus), _open_reader(config, corpus.folder))
        )
        assert np.array_equal(ours, theirs)
    assert build_reader_processes(config, corpus, AbortToken(), print) == []


def test_a_source_that_is_too_small_is_named(make, books, tmp_path):
    (tmp_path / "small.jsonl").write_text('{"text": "b"}\n{"text": "bb"}')
    with pytest.raises(DataError, match=r"data.blend.sources.small: 2 documents can't feed 4 sequences"):
        build_reader(*make(blend=books, validation_fraction=0.0))


def test_plain_text_is_cut_so_that_the_smallest_source_feeds_every_lane(make, tmp_path):
    for name, count in (("large", 40_000), ("small", 1_000)):
        (tmp_path / f"{name}.txt").write_text("a line of some text\n" * (count // 20))
    sources = {name: [str(tmp_path / f"{name}.txt")] for name in ("large", "small")}
    config, corpus = make(blend=dict(sources=sources, stages=[dict(weights=dict(large=0.5, small=0.5))]))
    assert corpus.document_chars == 256
    build_reader(config, corpus)


def test_what_is_told_of_a_blend(make, books):
    lines = [*describe_data(*make(blend=books, validation_fraction=0.0))]
    assert lines == [
        "blend: large 30 documents, small 12 documents",
        "blend: from token 0 on large 0.25, small 0.75 of the tokens",
        "blend: from token 640 on large 1 of the tokens",
    ]


def test_a_further_stage_is_told_in_the_step_in_which_it_begins(make, books):
    blend = make(blend=books)[0].data.blend
    described = [[*describe_begun_stages(blend, step, range(64 * (step - 1), 64 * step))] for step in range(1, 20)]
    assert [step for step, lines in enumerate(described, 1) if lines] == [11]
    assert described[10] == ["step 11: data.blend is now large 1 of the tokens, from token 640 on"]


def test_a_text_is_known_by_its_sources_not_by_their_weights(make, books, tmp_path):
    first = fingerprint_data(*make(blend=books))
    assert fingerprint_data(*make(blend=books | dict(stages=books["stages"][:1]))) == first
    renamed = dict(sources={"b" + name: paths for name, paths in books["sources"].items()})
    stages = dict(stages=[dict(weights=dict(blarge=0.5, bsmall=0.5))])
    other = fingerprint_data(*make(blend=renamed | stages))
    assert other["fingerprint"] != first["fingerprint"] and other["blend"] != first["blend"]
    plain = fingerprint_data(*make(sources=[path for paths in books["sources"].values() for path in paths]))
    assert plain["fingerprint"] != first["fingerprint"] and "blend" not in plain


def test_a_slice_is_the_file_in_its_order(make, prepared):
    config, corpus = make(sources=[str(prepared)], slice=dict(start_token=7, min_tokens=200), num_steps=6)
    steps = sequences(config, build_reader(config, corpus), 4)
    assert np.array_equal(steps[:, :, :-1].ravel(), np.arange(7, 7 + 4 * 64) % 200)
    assert [*describe_data(config, corpus)] == [
        "slice: tokens 7 to 263 of 1,001, 4 global batches, which the 6 steps of this run read 1.5 times; "
        "to continue after it, set data.slice.start_token to 263"
    ]
    assert build_evaluation_lanes(config, corpus) is not None


def test_a_run_on_a_slice_is_known_by_its_start_and_length(make, prepared):
    data = dict(sources=[str(prepared)])
    first = fingerprint_data(*make(**data, slice=dict(start_token=7, min_tokens=64)))
    assert fingerprint_data(*make(**data, slice=dict(start_token=7, min_tokens=640))) == first
    assert fingerprint_data(*make(**data, slice=dict(start_token=8)))["fingerprint"] != first["fingerprint"]
    assert fingerprint_data(*make(**data))["fingerprint"] != first["fingerprint"]


def test_from_a_file_of_its_own_nothing_is_evaluated_that_is_trained_on(make, prepared):
    config, corpus = make(sources=[str(prepared / "train.safetensors")], slice={})
    assert build_evaluation_lanes(config, corpus) is None
    assert "no evaluation" in [*describe_data(config, corpus)][-1]
    assert build_evaluation_lanes(*make(sources=[str(prepared / "train.safetensors")])) is not None


def test_a_slice_needs_no_end_of_documents(make, tmp_path):
    """It reads no documents, so neither an id that ends them nor one in the file is required."""
    path = tmp_path / "tokens.safetensors"
    save_file({"tokens": np.arange(1000, dtype=np.uint16) % 200}, path)
    config, corpus = make(sources=[str(path)], slice={}, tokenizer={})
    ids, _ = build_reader(config, corpus).read(0, (0,), config.batch.sequence_length)
    assert ids.tolist() == [number % 200 for number in range(config.batch.sequence_length + 1)]
    with pytest.raises(DataError, match="doesn't record which id ends a document"):
        make(sources=[str(path)], slice={}, tokenizer={}, document_mask=True)
    with pytest.raises(DataError, match="doesn't record which id ends a document"):
        make(sources=[str(path)], tokenizer={})


def test_a_slice_of_text_or_of_several_files_is_refused(make, books, prepared, tmp_path):
    with pytest.raises(DataError, match=r"one file of tokens, and data.sources has 1 files \(small.jsonl"):
        build_reader(*make(sources=[str(tmp_path / "small.jsonl")], slice={}))
    (prepared / "more.safetensors").write_bytes((prepared / "train.safetensors").read_bytes())
    with pytest.raises(DataError, match="data.sources has 2 files"):
        build_reader(*make(sources=[str(prepared)], slice={}))


def test_a_slice_that_does_not_fit_is_told_from_the_file(make, prepared):
    with pytest.raises(DataError, match="from token 990 on the file has 10 tokens"):
        build_reader(*make(sources=[str(prepared)], slice=dict(start_token=990)))
