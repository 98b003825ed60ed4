"""`parallel3d generate` on a small model that was trained here, as a user calls it."""

from __future__ import annotations

import io
import json
import sys

import pytest

from parallel3d.commands.convert import main as convert
from parallel3d.commands.evaluate import main as evaluate
from parallel3d.commands.generate import main
from parallel3d.decoding.rank_decoder import RankDecoder
from tests.support import tiny_runs
from tests.support.saved_layouts import run_layout, save

PROMPT = "Every effort moves you"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny_runs.make_config(
        model=dict(initializer_range=0.2, max_position_embeddings=64),
        parallel=dict(tp_size=2),
        precision=dict(policy="fp32"),
        data=dict(tokenizer=dict(kind="bytes")),
    )
    _, snapshots, runtimes = run_layout(config, steps=1)
    return save(tmp_path_factory.mktemp("model"), snapshots, runtimes[0])


@pytest.fixture(scope="module")
def dropout_folders(tmp_path_factory):
    """Checkpoints of the same weights, of a run with dropout and of one without."""

    def make(rate):
        config = tiny_runs.make_config(
            model=dict(initializer_range=0.2, max_position_embeddings=64, hidden_dropout=rate),
            precision=dict(policy="fp32"),
            data=dict(tokenizer=dict(kind="bytes")),
        )
        _, snapshots, runtimes = run_layout(config, steps=0)
        return save(tmp_path_factory.mktemp("dropout"), snapshots, runtimes[0], step=1)

    return make(0.5), make(0.0)


def generate(capsys, *arguments):
    """(exit code, standard output, standard error)"""
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def lines(capsys, *arguments):
    code, out, err = generate(capsys, *arguments)
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_twenty_tokens_of_the_25_likeliest(capsys, folder):
    """With temperature 0 top-k changes nothing; with 1 it draws, the same on another layout."""
    common = (folder, PROMPT, "--max-tokens", 20, "--top-k", 25, "--json")
    (cold,), (again,) = (lines(capsys, *common, "--temperature", 0, *more) for more in ((), ("--top-k", 1)))
    assert cold["tokens"] == again["tokens"] and len(cold["tokens"]) == 20 and cold["prompt"] == PROMPT
    (warm,) = lines(capsys, *common, "--temperature", 1)
    (elsewhere,) = lines(capsys, *common, "--temperature", 1, "--layout", "tp2.pp2")
    (other,) = lines(capsys, *common, "--temperature", 1, "--seed", 1)
    assert warm["tokens"] == elsewhere["tokens"] != other["tokens"] and warm["tokens"] != cold["tokens"]
    assert cold["perplexity"] < warm["perplexity"] and cold["ended_by"] == "length"


def test_a_single_text_appears_as_text(capsys, folder):
    (whole,) = lines(capsys, folder, PROMPT, "--max-tokens", 20, "--json")
    code, out, err = generate(capsys, folder, PROMPT, "--max-tokens", 20)
    assert code == 0 and out == whole["text"] + "\n"
    assert "20 tokens" in err and f"{whole['perplexity']:.3f}" in err


@pytest.mark.parametrize("layout", ["tp1", "tp2.pp2"])
def test_nothing_is_dropped_after_training(capsys, dropout_folders, tmp_path, layout):
    """A model that was trained with dropout generates and evaluates as one without, every time."""
    (tmp_path / "page.txt").write_text("Every effort moves you, and every one of them counts.")
    texts, losses = [], []
    for folder in (dropout_folders[0], *dropout_folders):
        texts += lines(capsys, folder, PROMPT, "--max-tokens", 20, "--json", "--layout", layout)
        out = tmp_path / "found.json"
        assert evaluate([str(folder), str(tmp_path / "page.txt"), "--layout", layout, "--out", str(out)]) == 0
        losses += [each["loss"] for each in json.loads(out.read_text())["results"].values()]
        capsys.readouterr()
    assert texts[0] == texts[1] == texts[2] and len(set(texts[0]["tokens"])) > 5
    assert losses[0] == losses[1] == losses[2] > 0


class Recorder(io.StringIO):
    """A terminal that notes what it has shown by each flush."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def flush(self):
        self.events.append(self.getvalue())


def test_a_long_text_appears_while_it_is_computed(folder, monkeypatch):
    """Between the choices of two tokens, not only at the end."""
    events, choose = [], RankDecoder._choose

    def note(self, step, logits):
        events.append(None)
        return choose(self, step, logits)

    monkeypatch.setattr(RankDecoder, "_choose", note)
    monkeypatch.setattr(sys, "stdout", Recorder(events))
    assert main([str(folder), PROMPT, "--max-tokens", "30"]) == 0
    last_choice = len(events) - 1 - events[::-1].index(None)
    shown = [text for text in events[:last_choice] if text]
    assert events.count(None) == 30 and len(set(shown)) > 5
    assert sys.stdout.getvalue().startswith(shown[-1]) and shown == sorted(shown, key=len)


def test_files_standard_input_and_samples(capsys, folder, tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\ntwo\n')
    options = (folder, "--max-new-tokens", 5, "--temperature", 1)
    by_file = lines(capsys, *options, "--prompts", tmp_path / "prompts.jsonl")
    assert [line["prompt"] for line in by_file] == ["one", "two"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert lines(capsys, *options, "--prompts", "-") == by_file
    sampled = lines(capsys, *options, "one", "--samples", 3, "--batch-size", 2, "--layout", "dp2")
    assert sampled[0]["tokens"] == by_file[0]["tokens"] and len({tuple(line["tokens"]) for line in sampled}) == 3
    code, out, _ = generate(capsys, *options, "one", "--out", tmp_path / "out.jsonl")
    assert code == 0 and out == ""
    assert json.loads((tmp_path / "out.jsonl").read_text())["tokens"] == by_file[0]["tokens"]


def test_a_stop_ends_a_text_and_is_left_out(capsys, folder):
    (whole,) = lines(capsys, folder, "ab", "--max-tokens", 20, "--temperature", 1, "--json")
    stop = whole["text"][4:6]
    (ended,) = lines(capsys, folder, "ab", "--max-tokens", 20, "--temperature", 1, "--json", "--stop", stop)
    assert ended["text"] == whole["text"][: whole["text"].index(stop)]
    assert ended["ended_by"] == "stop" and len(ended["tokens"]) < 20


def test_a_hugging_face_folder_gives_the_same(capsys, folder, tmp_path):
    assert convert(["to-hf", str(folder), str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    ours, theirs = (lines(capsys, each, PROMPT, "--json")[0] for each in (folder, tmp_path / "hf"))
    for name in ("prompt", "tokens", "ended_by", "perplexity"):  # bytes that are not UTF-8 have another text there
        assert ours[name] == theirs[name]


def test_mistakes(capsys, folder, tmp_path):
    for arguments, said in (
        ((tmp_path, "a"), "neither a checkpoint"),
        ((folder, "a", "--layout", "tp3"), "parallel.tp_size (3)"),
        ((folder, "a", "--layout", "gpipe"), "consists of tp, pp and dp"),
        ((folder, "a", "--top-p", 0), "--top-p 0.0: must be above 0"),
        ((folder, "a", "--temperature", -1), "--temperature -1.0: must be 0 or more"),
        ((folder, "a", "--chat"), "needs a template"),
        ((folder, "--prompts", tmp_path / "no"), "No such file"),
        ((folder, "a", "--tokenizer", tmp_path / "no"), "can't be read"),
    ):
        code, out, err = generate(capsys, *arguments)
        assert code == 2 and said in err and not out, err
