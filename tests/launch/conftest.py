"""A small run as a user starts it: a text, a cache, a configuration file."""

import json
import os
from pathlib import Path

import pytest

from tests.support.launch_runs import STARTED, finish, last_words, start


@pytest.fixture(autouse=True)
def no_run_is_left(tmp_path):
    """A run that a failed test leaves would train on, on the cores of the tests after it. It says what it did."""
    yield
    for process in STARTED:
        if process.poll() is None:
            print(last_words(process, tmp_path))
    STARTED.clear()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text file: sources of the standard library, about 1 MB."""
    path = tmp_path_factory.mktemp("text") / "library.txt"
    sources = sorted(Path(os.__file__).parent.glob("[a-d]*.py"))
    path.write_text("\n".join(source.read_text(errors="replace") for source in sources))
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def config_file(tmp_path, text, cache):
    config = {
        "model": {
            "vocab_size": 512,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "parallel": {"pp_size": 2, "dp_size": 2},
        "batch": {"global_batch_size": 8, "micro_batch_size": 1, "sequence_length": 32},
        "optimizer": {"learning_rate": 1e-2},
        "data": {"sources": [str(text)], "cache_directory": str(cache)},
        "elastic": {"max_rejoins": 0},  # tests of workers that return ask for it
        "monitor": {"charts": False},
        "run": {
            "num_steps": 12,
            "threads_per_rank": 1,
            "evaluate_every": 6,
            "evaluate_batches": 1,
            "directory": str(tmp_path / "run"),
            "timeout_s": 300.0,
        },
    }
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, request):
    """The losses of the module's run, with the flags UNDISTURBED, when nothing happens to it; made for the first test
    that asks."""
    known = {}

    def run(config_file, *more):
        if more not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            flags = (*request.module.UNDISTURBED, *more, f"run.directory={folder}")
            code, out, err = finish(start("--config", config_file, *flags))
            assert code == 0, out + err
            known[more] = request.module.losses(folder)
        return known[more]

    return run
