"""Folders that Hugging Face's `datasets` itself has written, beside the rows that it reads (make test-clients)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.test_dataset_folder import READ, TEXTS, texts_of

datasets = pytest.importorskip("datasets", reason="one of the clients' libraries")


def rows() -> Any:
    return datasets.Dataset.from_dict({"text": TEXTS, "number": list(range(len(TEXTS)))})


CHANGES = {
    "as it is": lambda dataset: dataset,
    "shuffled": lambda dataset: dataset.shuffle(seed=3),
    "some rows": lambda dataset: dataset.select(range(5, 30, 2)),
    "filtered": lambda dataset: dataset.filter(lambda row: row["number"] % 3 > 0),
    "mapped": lambda dataset: dataset.map(lambda row: {"text": (row["text"] or "").upper()}),
    "two after each other": lambda dataset: datasets.concatenate_datasets([dataset, dataset.select([7, 3])]),
    "large strings": lambda dataset: dataset.cast_column("text", datasets.Value("large_string")),
}


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_its_rows_are_read_in_its_order(tmp_path, change, num_shards):
    dataset = CHANGES[change](rows())
    dataset.save_to_disk(tmp_path / "set", num_shards=num_shards)
    saved = [row["text"] for row in datasets.load_from_disk(str(tmp_path / "set"))]
    assert texts_of(tmp_path / "set", tmp_path / "cache") == [text for text in saved if text]


def test_of_its_splits_train_is_read(tmp_path):
    splits = rows().train_test_split(test_size=10, seed=5)
    splits.save_to_disk(tmp_path / "sets")
    read = texts_of(tmp_path / "sets", tmp_path / "cache")
    assert read == [text for text in splits["train"]["text"] if text] and len(read) > 20
    assert texts_of(tmp_path / "sets" / "test", tmp_path / "cache") == [text for text in splits["test"]["text"] if text]


def test_what_it_keeps_beside_the_rows_is_not_read(tmp_path):
    folder = tmp_path / "set"
    rows().save_to_disk(folder)
    datasets.load_from_disk(str(folder)).map(lambda row: {"text": f"mapped {row['number']}"})
    assert list(folder.glob("cache-*.arrow"))
    assert texts_of(folder, tmp_path / "cache") == READ
