"""`parallel3d evaluate` on a small model that was trained here, as a user calls it."""

from __future__ import annotations

import json
from math import exp, log
from string import ascii_lowercase, printable

import pytest

from parallel3d.commands.convert import main as convert
from parallel3d.commands.evaluate import main

LAYOUTS = ["tp2", "pp2", "tp2.pp2", "tp2.pp2.dp2", "pp4"]


def evaluate(capsys, *arguments):
    """(exit code, standard output, standard error)"""
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def report(capsys, tmp_path):
    """Runs the command and returns its JSON file."""

    def run(*arguments):
        code, out, err = evaluate(capsys, *arguments, "--out", tmp_path / "found.json")
        assert code == 0, err
        return json.loads((tmp_path / "found.json").read_text())

    return run


def test_without_files_it_is_the_loss_of_training(report, saved_run):
    """The same sequences in fp32, other products: 1e-6."""
    found = report(saved_run.folder)
    assert found["slice"] == "seen" and found["model"]["step"] == 2
    (figures,) = found["results"].values()
    assert figures["tokens"] == 2 * 4 * 32
    assert figures["loss"] == pytest.approx(saved_run.evaluation_loss, rel=1e-6)
    assert figures["perplexity"] == pytest.approx(exp(figures["loss"]))


@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_finds_the_same(report, saved_run, tmp_path, layout):
    """Held-out text and last words; sums in another order, 1e-6."""
    (tmp_path / "passages.txt").write_text("\n".join(f"the number after {n} is {n + 1}" for n in range(9, 14)))
    for arguments in ((), ("--slice", "all", "--by", "domain"), (tmp_path / "passages.txt", "--last-word")):
        one, many = (report(saved_run.folder, *arguments, "--layout", each)["results"] for each in ("tp1", layout))
        assert one.keys() == many.keys()
        for name, figures in one.items():
            assert many[name] == pytest.approx(figures, rel=1e-6), name


def test_domains_and_files_add_up(report, saved_run):
    """All held-out documents, whichever way they are divided; each group's first token is no target."""
    whole = report(saved_run.folder, "--slice", "all")["results"]["held-out text"]
    documents = saved_run.corpus.validation
    num_tokens = sum(len(documents.tokens(number)) + 1 for number in range(len(documents)))
    assert whole["tokens"] == num_tokens - 1
    by_domain = report(saved_run.folder, "--by", "domain")["results"]
    by_file = report(saved_run.folder, "--by", "file")["results"]
    assert list(by_domain) == ["code", "lines", "all"]
    assert list(by_file) == ["abc.txt", "bisect.txt", "lines.jsonl", "all"]
    assert by_domain["all"]["tokens"] == num_tokens - 2 and by_file["all"]["tokens"] == num_tokens - 3
    assert by_domain["lines"] == pytest.approx(by_file["lines.jsonl"], rel=1e-6)
    for found in (by_domain, by_file):
        parts = [figures for name, figures in found.items() if name != "all"]
        total = sum(part["loss"] * part["tokens"] for part in parts)
        assert found["all"]["loss"] == pytest.approx(total / found["all"]["tokens"], rel=1e-9)
    few = report(saved_run.folder, "--by", "domain", "--tokens", 100)["results"]
    assert {few[name]["tokens"] for name in ("code", "lines")} == {96}  # 3 sequences


def test_windows_decide_what_is_seen_and_not_what_is_scored(report, saved_run, tmp_path):
    text = saved_run.corpus.tokenizer.decode(saved_run.corpus.validation.tokens(0)) * 2
    (tmp_path / "page.txt").write_text(text)
    (tmp_path / "page.jsonl").write_text(json.dumps({"text": text}) + "\n")
    name = str(tmp_path / "page.txt")
    by_stride = {
        stride: report(saved_run.folder, name, "--window", 48, "--stride", stride)["results"][name]
        for stride in (1, 16, 48)
    }
    for found in by_stride.values():
        assert found["tokens"] == found["bytes"] == len(text.encode()) and found["words"] == len(text.split())
        assert log(found["word_perplexity"]) * found["words"] == pytest.approx(found["loss"] * found["tokens"])
        assert log(found["byte_perplexity"]) == pytest.approx(found["loss"])
        assert found["bits_per_byte"] == pytest.approx(found["loss"] / log(2))
    assert len({found["loss"] for found in by_stride.values()}) == 3
    lines = str(tmp_path / "page.jsonl")
    found = report(saved_run.folder, f"a={name}", f"b={lines}")
    assert found["window"] == found["stride"] == 32 and [*found["results"]] == [name, lines, "a", "b", "all"]
    assert found["results"]["b"] == pytest.approx(found["results"][name], rel=1e-6)
    assert found["results"]["all"]["bytes"] == 2 * len(text.encode())


def test_a_hugging_face_folder_gives_the_same(report, saved_run, tmp_path, capsys):
    """And transformers its loss of a text: 1e-5."""
    hf = tmp_path / "hf"
    assert convert(["to-hf", str(saved_run.checkpoint), str(hf)]) == 0
    capsys.readouterr()
    page = tmp_path / "page.txt"
    page.write_text("def compare(a, b):\n    return (a > b) - (a < b)\n")
    ours, theirs = (report(folder, page, "--window", 64)["results"][str(page)] for folder in (saved_run.folder, hf))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert ours["loss"] == pytest.approx(loss_of_transformers(hf, page.read_text()), rel=1e-5)


def loss_of_transformers(folder, text):
    import torch
    from transformers import AutoModelForCausalLM  # takes seconds to import

    ids = torch.tensor([[256, *text.encode()]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))


def test_the_accuracy_of_last_words_is_that_of_transformers_argmax(report, saved_run, tmp_path, capsys):
    """Of 5 passages: a word is right if each of its tokens, the blank included, is the likeliest after those before."""
    hf = tmp_path / "hf"
    assert convert(["to-hf", str(saved_run.checkpoint), str(hf)]) == 0
    capsys.readouterr()
    likeliest = argmax_with_frequent_blanks(hf)
    contexts = [first + second for first in ascii_lowercase for second in ascii_lowercase]
    words = {context: word for context in contexts if (word := likeliest(context + " ")) in printable.strip()}
    right = [f"{context} {word}" for context, word in words.items() if likeliest(context) == " "]
    wrong_blank = next(f"{context} {word}" for context, word in words.items() if likeliest(context) != " ")
    wrong_word = right[1][:-1] + ("a" if right[1][-1] != "a" else "b")
    passages = [right[0], wrong_word, right[2], wrong_blank, right[3]]
    (tmp_path / "passages.txt").write_text("\n".join(passages) + "\n")
    for layout in ("tp1", "tp2.pp2"):
        found = report(hf, tmp_path / "passages.txt", "--last-word", "--layout", layout)["results"]
        figures = found[str(tmp_path / "passages.txt")]
        assert (figures["passages"], figures["tokens"], figures["accuracy"]) == (5, 10, 3 / 5)


def argmax_with_frequent_blanks(folder):
    """Makes blanks likelier in the folder's model, else almost no word begins; returns the likeliest next character."""
    import torch
    from transformers import AutoModelForCausalLM  # takes seconds to import

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        model.lm_head.weight[ord(" ")] *= 4
    model.save_pretrained(folder)

    def likeliest(text):
        with torch.no_grad():
            return chr(int(model(torch.tensor([[*text.encode()]])).logits[0, -1].argmax()))

    return likeliest


def test_the_file_says_what_was_measured(capsys, saved_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = evaluate(capsys, saved_run.checkpoint)
    assert code == 0 and "held-out text" in out and "perplexity" in out and "evaluation-run-2.json" in err
    found = json.loads((tmp_path / "evaluation-run-2.json").read_text())
    assert found["tokenizer"]["kind"] == "bytes" and found["tokenizer"]["vocab_size"] == 257
    assert found["model"]["step"] == 2 and len(found["model"]["config_hash"]) == 16
    code, out, _ = evaluate(capsys, saved_run.checkpoint, "--json")
    assert json.loads(out)["results"] == found["results"]
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation-run-2.json"]
    code, _, err = evaluate(capsys, saved_run.checkpoint, "--slice", "all")
    assert code == 0 and "evaluation-run-2-2.json" in err
    assert json.loads((tmp_path / "evaluation-run-2.json").read_text())["results"] == found["results"]


def test_mistakes(capsys, saved_run, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "word.txt").write_text("one\n")
    (tmp_path / "long.txt").write_text("word " * 60)
    (tmp_path / "text.jsonl").write_text('{"content": "a b"}\n')
    (tmp_path / "bad.jsonl").write_text("{\n")
    folder = saved_run.folder
    for arguments, said in (
        ((tmp_path,), "neither a checkpoint"),
        ((folder, tmp_path / "no.txt"), "no.txt: no such file"),
        ((folder, tmp_path / "word.txt", f"a={tmp_path / 'word.txt'}"), "word.txt is named twice"),
        ((folder, tmp_path / "empty.txt"), "empty.txt: holds no text"),
        ((folder, tmp_path / "empty.txt", "--last-word"), "empty.txt: holds no passage"),
        ((folder, tmp_path / "word.txt", "--last-word"), "passage 1: has no last word after others: 'one'"),
        ((folder, tmp_path / "long.txt", "--last-word"), "passage 1: has 298 tokens before its end, more than"),
        ((folder, tmp_path / "text.jsonl"), "Set --text-column to its text"),
        ((folder, tmp_path / "bad.jsonl"), "not valid JSON"),
        ((folder, tmp_path / "word.txt", "--stride", 40), "more than the model's window of 32"),
        ((folder, tmp_path / "word.txt", "--slice", "all"), "--slice has no effect with files"),
        ((folder, "--stride", 4), "--stride has no effect on a run's held-out text"),
        ((folder, "--slice", "seen", "--by", "file"), "--slice seen is what the run's evaluations read"),
        ((folder, "--layout", "tp3"), "parallel.tp_size (3)"),
        ((folder, "--set", "data.document_chars=100"), "holds another text than the run was trained on"),
        ((folder, tmp_path / "word.txt", "--tokenizer", tmp_path / "no"), "can't be read"),
    ):
        code, out, err = evaluate(capsys, *arguments, "--out", tmp_path / "out.json")
        assert code == 2 and said in err and not out, err
    assert not (tmp_path / "out.json").exists()
