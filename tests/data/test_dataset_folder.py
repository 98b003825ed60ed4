"""Folders of Hugging Face's `datasets`: the listed rows in their order, the split for training, damage by name."""

import json

import numpy as np
import pyarrow as pa
import pytest

from parallel3d.config.sections.data import TokenizerConfig
from parallel3d.data.corpus import load_corpus, open_corpus
from parallel3d.data.dataset_folder import dataset_files
from parallel3d.data.sources import find_files
from parallel3d.errors import DataError
from parallel3d.parallel.abort import AbortToken
from tests.support.word_corpus import lines, open_words

FEATURES = {"text": {"dtype": "string", "_type": "Value"}, "n": {"dtype": "int64", "_type": "Value"}}


def save_to_disk(folder, texts, num_shards=3):
    """Writes the files that datasets 5.2.0 writes (compared by hand with a folder of its own)."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{number:05}-of-{num_shards:05}.arrow" for number in range(num_shards)]
    size, first = -(-len(texts) // num_shards), 0
    info = {"info": {"features": FEATURES}, "fingerprint": "36aebc99d7577e09"}
    for name in names:
        part = texts[first : first + size]
        table = pa.table({"text": pa.array(part, pa.string()), "n": list(range(first, first + len(part)))})
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
        first += size
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "36aebc99d7577e09", "_split": None}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "features": FEATURES}))
    return folder


def save_splits(folder, **splits):
    for name, texts in splits.items():
        save_to_disk(folder / name, texts, num_shards=1)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def texts_of(source, cache):
    settings = dict(tokenizer=TokenizerConfig(kind="bytes"), validation_fraction=0.0, num_lanes=1)
    corpus = load_corpus(open_words(source, cache, **settings).folder)
    return [corpus.train.documents.read(index) for index in range(len(corpus.train))]


TEXTS = ["one\n", "", None, "zwei 😀 größe", *lines(40), "end"]
READ = [text for text in TEXTS if text]


def test_all_rows_are_read_in_the_order_of_the_list(tmp_path):
    folder = save_to_disk(tmp_path / "set", TEXTS)
    save_to_disk(tmp_path / "other", ["a row of map"], num_shards=1)
    (tmp_path / "other" / "data-00000-of-00001.arrow").rename(folder / "cache-0123.arrow")
    assert texts_of(folder, tmp_path / "cache") == READ
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state))
    thirds = np.split(np.array(TEXTS, object), [15, 30])
    assert texts_of(folder, tmp_path / "cache") == [text for part in reversed(thirds) for text in part if text]


def test_of_several_splits_train_is_read(tmp_path):
    folder = save_splits(tmp_path / "sets", train=TEXTS, validation=["held out"], test=["tested"])
    assert texts_of(folder, tmp_path / "cache") == READ
    assert texts_of(folder / "validation", tmp_path / "cache") == ["held out"]
    with pytest.raises(DataError, match=r"without a split 'train'; it has 'a', 'b': name the folder of one"):
        dataset_files(save_splits(tmp_path / "no", a=["x"], b=["y"]))


def test_the_split_validation_is_for_evaluation(tmp_path):
    """And nothing else, whatever the fraction; without it, a share of the rows is held out."""
    folder = save_splits(tmp_path / "sets", train=TEXTS, validation=["held out", None, "too"], test=["tested"])
    (tmp_path / "more.jsonl").write_text('{"text": "of another source"}\n')
    settings = dict(tokenizer=TokenizerConfig(kind="bytes"), validation_fraction=0.1, num_lanes=1)

    def splits_of(*sources):
        found = open_corpus(
            **settings,
            sources=[*map(str, sources)],
            text_column="text",
            document_chars=0,
            cache_directory=tmp_path / "cache",
            token=AbortToken(),
            log=lambda text: None,
        )
        return [[each.documents.read(index) for index in range(len(each))] for each in (found.train, found.validation)]

    both = [[*READ, "of another source"], ["held out", "too"]]
    assert splits_of(folder, tmp_path / "more.jsonl") == both
    train, validation = splits_of(folder / "train", folder / "validation", tmp_path / "more.jsonl")
    assert len(validation) == 5 and sorted(train + validation) == sorted(both[0] + both[1])  # named one by one
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    train, validation = splits_of(folder, tmp_path / "more.jsonl")
    assert len(validation) == 4 and sorted(train + validation) == sorted(both[0])
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation"]}))
    (folder / "validation" / "state.json").unlink()
    with pytest.raises(DataError, match=r"validation/state.json: missing, and dataset_dict.json lists the split"):
        splits_of(folder)


def test_another_state_json_is_no_dataset(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "a.txt").write_text("text")
    assert [file.path.name for file in find_files([str(tmp_path)])] == ["a.txt"]


def truncate(folder):
    path = folder / "data-00001-of-00003.arrow"
    batch = pa.ipc.open_stream(path)
    batch.read_next_batch()  # what is left of a copy that ended between two batches
    with pa.ipc.new_stream(folder / "whole", batch.schema) as writer:
        writer.write_batch(batch.read_next_batch())
    data = (folder / "whole").read_bytes()
    path.write_bytes(data[:-8])


@pytest.mark.parametrize(
    "damage, problem",
    [
        (truncate, r"data-00001-of-00003.arrow: truncated: the stream has no end at byte [\d,]+"),
        (
            lambda folder: (folder / "data-00002-of-00003.arrow").unlink(),
            r"00002-of-00003.arrow: missing, and state.js",
        ),
        (lambda folder: (folder / "state.json").write_text('{"_data_files'), r"state.json: not valid JSON"),
        (lambda folder: (folder / "state.json").write_text('{"_data_files": []}'), r"state.json: lists no files"),
        (
            lambda folder: (folder / "state.json").write_text('{"_data_files": [{"filename": "../a"}]}'),
            r"state.json: lists '../a', which is not the name of a file in its folder",
        ),
        (
            lambda folder: (folder / "state.json").write_text('{"_data_files": [1], "_indices_data_files": [1]}'),
            r"a selection of rows by an older version of datasets",
        ),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, damage, problem):
    folder = save_to_disk(tmp_path / "set", TEXTS)
    damage(folder)
    with pytest.raises(DataError, match=problem):
        find_files([str(folder)])
