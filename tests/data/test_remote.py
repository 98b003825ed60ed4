"""Remote sources: the same text as local ones, copied once; retries are seen, credentials are not."""

import uuid

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from parallel3d import remote_files
from parallel3d.config.sections.data import DataConfig
from parallel3d.data.remote import fetch, local_path, name_of
from parallel3d.data.run_data import build_reader, fingerprint_data, open_run_corpus
from parallel3d.data.sources import find_files
from parallel3d.data.tokenizer import train_tokenizer
from parallel3d.errors import ConfigError, DataError
from parallel3d.parallel.abort import AbortToken
from parallel3d.remote_address import redacted
from tests.support import tiny_runs
from tests.support.hf_tokenizers import write_folder
from tests.support.word_corpus import write_words


class Flaky(MemoryFileSystem):
    """Memory whose files fail to open as many times as `failures` says, with this error."""

    protocol = "flaky"
    store, pseudo_dirs = {}, [""]
    failures, error, opened = 0, ConnectionError, 0
    shortened = 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def _open(self, path, *arguments, **options):
        Flaky.opened += 1
        if Flaky.failures:
            Flaky.failures -= 1
            raise Flaky.error("the store said flaky://user:secret@host/x")
        return super()._open(path, *arguments, **options)

    def info(self, path, **options):
        found = super().info(path, **options)
        return {**found, "size": found["size"] + Flaky.shortened}


@pytest.fixture
def flaky(monkeypatch):
    """Writes text into the store, and returns the function that fetches a source of it: (files, logged lines)."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    for name, value in {"failures": 0, "error": ConnectionError, "opened": 0, "shortened": 0}.items():
        monkeypatch.setattr(Flaky, name, value)
    monkeypatch.setattr(remote_files, "RETRY_S", (0.0, 0.0, 0.0))
    root = uuid.uuid4().hex
    store = fsspec.filesystem("flaky", skip_instance_cache=True)
    for name, text in {"a/one.txt": "one\n", "a/b/two.jsonl": '{"text": "two"}\n', "c.txt": "three\n"}.items():
        store.pipe_file(f"/{root}/{name}", text.encode())
    return f"flaky://{root}"


def fetched(source, cache):
    logged = []
    fetch([source], cache, AbortToken(), logged.append)
    files = find_files([local_path(source, cache)])
    return {file.path.name: file.path.read_text() for file in files}, logged


def test_a_folder_a_glob_and_a_file(tmp_path, flaky):
    assert fetched(flaky + "/a", tmp_path)[0] == {"one.txt": "one\n", "two.jsonl": '{"text": "two"}\n'}
    assert fetched(flaky + "/*/*.txt", tmp_path)[0] == {"one.txt": "one\n"}
    files, logged = fetched(flaky + "/c.txt", tmp_path)
    assert files == {"c.txt": "three\n"} and len(logged) == 1 and "1 files, 0.0 MB, into the cache" in logged[0]


def test_it_is_copied_once_and_retries_are_seen(tmp_path, flaky):
    Flaky.failures = 3
    files, logged = fetched(flaky + "/c.txt", tmp_path)
    opened = Flaky.opened
    assert files == {"c.txt": "three\n"} and not Flaky.failures
    assert [line.partition("; ")[2] for line in logged[1:]] == [f"retry {n} of 3 in 0 s" for n in (1, 2, 3)]
    assert not any("secret" in line for line in logged)
    assert fetched(flaky + "/c.txt", tmp_path) == (files, []) and Flaky.opened == opened


@pytest.mark.parametrize(
    "failures, error, shortened, problem",
    [
        (4, ConnectionError, 0, r"c.txt: ConnectionError, after 3 retries$"),
        (1, PermissionError, 0, r"c.txt: access denied: check the credentials"),
        (0, None, 5, r"ConnectionError \(6 of 11 bytes arrived\), after 3 retries"),
    ],
)
def test_what_stays_wrong_is_named_and_leaves_nothing(tmp_path, flaky, failures, error, shortened, problem):
    Flaky.failures, Flaky.error, Flaky.shortened = failures, error, shortened
    with pytest.raises(DataError, match=problem) as caught:
        fetched(flaky + "/c.txt", tmp_path)
    assert "secret" not in str(caught.value)
    Flaky.failures = Flaky.shortened = 0
    assert fetched(flaky + "/c.txt", tmp_path)[0] == {"c.txt": "three\n"}


def test_a_missing_file_driver_or_protocol(tmp_path, flaky, monkeypatch):
    with pytest.raises(DataError, match=r"none.txt: not found there \(404\)"):
        fetched(flaky + "/none.txt", tmp_path)

    def lacks(source):
        raise ImportError("Please install")

    with pytest.raises(DataError, match=r"nothing://x: nothing:// can't be opened; known are s3://"):
        fetched("nothing://x", tmp_path)
    monkeypatch.setattr(fsspec.core, "url_to_fs", lacks)
    with pytest.raises(DataError, match=r"^s3://host/a.txt: s3:// needs a driver: pip install s3fs$"):
        fetched("s3://key:secret@host/a.txt?versionId=1", tmp_path)


def test_credentials_are_not_in_the_name():
    assert redacted("https://user:pass@host:81/a/b.txt?sig=abc#x") == "https://host:81/a/b.txt"
    assert name_of("https://host/a/b.jsonl?sig=abc", "") == "b.jsonl"
    assert name_of("bucket/a/what?.txt", "bucket/a") == "what?.txt"


def test_a_run_reads_the_copy(tmp_path):
    """The same text, batches and identity as from the local file, in a blend as well."""
    path, url = write_words(tmp_path / "words.txt"), f"memory://{uuid.uuid4().hex}/words.txt"
    fsspec.filesystem("memory").pipe_file(url.removeprefix("memory:/"), path.read_bytes())
    found = {}
    for source in (str(path), url):
        config = tiny_runs.make_config(
            batch=dict(global_batch_size=4, sequence_length=16),
            data=dict(sources=[source], tokenizer=dict(kind="bytes"), cache_directory=str(tmp_path / "cache")),
        )
        corpus = open_run_corpus(config, AbortToken(), lambda text: None)
        reader = build_reader(config, corpus)
        found[source] = (corpus.fingerprint, reader.read(1, reader.start(1), 500)[0].tolist())
    assert found[str(path)] == found[url]
    blend = dict(sources={"far": [url], "near": [str(path)]}, stages=[dict(weights=dict(far=0.5, near=0.5))])
    config = config.model_copy(update={"data": DataConfig(**config.data.model_dump() | dict(sources=[], blend=blend))})
    corpus = open_run_corpus(config, AbortToken(), lambda text: None)
    counts, reader = fingerprint_data(config, corpus)["blend"], build_reader(config, corpus)
    assert abs(counts["far"] - counts["near"]) <= 1 < counts["far"]  # the same text, but for one held out
    assert len(reader.read(1, reader.start(1), 16)[0]) == 17


@pytest.mark.parametrize("kind", ["folder", "tokenizer.json", "bpe.model"])
def test_a_remote_tokenizer(tmp_path, kind):
    """The same ids as from the local one."""
    words, folder = write_words(tmp_path / "words.txt"), tmp_path / "tokenizer"
    if kind == "bpe.model":
        folder.mkdir()
        (folder / kind).write_bytes(train_tokenizer(words.read_text().splitlines(), 300))
    else:
        write_folder(folder, kind="gpt2")
    url, store = f"memory://{uuid.uuid4().hex}/t", fsspec.filesystem("memory")
    for file in folder.iterdir():
        store.pipe_file(f"{url.removeprefix('memory:/')}/{file.name}", file.read_bytes())
    ending = "" if kind == "folder" else f"/{kind}"
    found = []
    for path in (f"{folder}{ending}", f"{url}{ending}"):
        config = tiny_runs.make_config(
            model=dict(vocab_size=512),
            batch=dict(global_batch_size=4, sequence_length=16),
            data=dict(sources=[str(words)], tokenizer=dict(path=path), cache_directory=str(tmp_path / "cache")),
        )
        corpus = open_run_corpus(config, AbortToken(), lambda text: None)
        found.append((corpus.fingerprint, corpus.train.tokens(0).tolist(), dict(corpus.tokenizer.files).keys()))
    assert found[0] == found[1]


def test_a_password_in_an_address_is_refused():
    with pytest.raises(ConfigError, match=r"data.sources.0 = 's3://...': must not have a user") as caught:
        tiny_runs.make_config(data=dict(sources=["s3://key:secret@host/a.txt"]))
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"data.tokenizer.path = 's3://...': must not have a user"):
        tiny_runs.make_config(data=dict(tokenizer=dict(path="s3://key:secret@host/tokenizer.json")))
