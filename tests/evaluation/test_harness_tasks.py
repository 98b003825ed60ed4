"""lm-evaluation-harness itself on a checkpoint of ours, with tasks that are made here."""

from __future__ import annotations

import json

import pytest

from parallel3d.commands.evaluate import main
from parallel3d.commands.harness_tasks import TaskModel, open_task_model
from parallel3d.commands.parsers import parse
from parallel3d.commands.trained_model import open_trained
from parallel3d.decoding.sampling import SamplingRule
from parallel3d.decoding.texts import EndRule
from parallel3d.evaluation.rows import continuation_row

QUESTIONS = [
    {"question": f"{first} comes before", "choices": [" " + chr(ord(first) + 1), " a number"], "answer": 0}
    for first in "bdfh"
]


def write_task(folder, name, **settings):
    """A task on QUESTIONS; lines of YAML, whose values are JSON."""
    (folder / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    fields = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "questions.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{question}}",
        **settings,
    }
    (folder / f"{name}.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in fields.items()))


@pytest.fixture
def tasks(tmp_path):
    pytest.importorskip("lm_eval")
    metric = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    choice = dict(output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target="answer")
    write_task(tmp_path, "our_choice", metric_list=metric, **choice)
    rolling = dict(output_type="loglikelihood_rolling", doc_to_target="{{question}}", doc_to_text="")
    write_task(
        tmp_path, "our_text", metric_list=[{"metric": "byte_perplexity"}, {"metric": "word_perplexity"}], **rolling
    )
    until = dict(until=["\n"], max_gen_toks=6, do_sample=False)
    exact = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    write_task(
        tmp_path,
        "our_words",
        output_type="generate_until",
        doc_to_target="{{choices[0]}}",
        generation_kwargs=until,
        metric_list=exact,
    )
    return tmp_path


@pytest.mark.parametrize("layout", ["tp1", "tp2.pp2"])
def test_the_library_runs_its_three_kinds_of_tasks(saved_run, tasks, capsys, layout):
    """Its perplexity of texts is that of our own command on the same texts."""
    names = "our_choice,our_text,our_words"
    common = [str(saved_run.folder), "--layout", layout]
    out = str(tasks / "tasks.json")
    assert main([*common, "--tasks", names, "--task-path", str(tasks), "--out", out]) == 0, capsys.readouterr().err
    found = json.loads((tasks / "tasks.json").read_text())["results"]
    assert found["our_choice"]["acc"] in (0, 0.25, 0.5, 0.75, 1) and found["our_words"]["exact_match"] in (0, 0.25)
    lines = tasks / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": each["question"]}) + "\n" for each in QUESTIONS))
    assert main([*common, str(lines), "--out", out]) == 0
    ours = json.loads((tasks / "tasks.json").read_text())["results"][str(lines)]
    for name in ("byte_perplexity", "word_perplexity"):
        assert found["our_text"][name] == pytest.approx(ours[name], rel=1e-6)
    capsys.readouterr()


def test_likelihoods_and_texts_are_those_of_the_model(saved_run, tasks, monkeypatch):
    """A text that the model continues greedily is, as a continuation, greedy; another one isn't. Of a context that is
    too long the end is seen."""
    from lm_eval.api.instance import Instance

    from parallel3d.evaluation.harness_model import HarnessModel

    computed = open_task_model(parse("evaluate", [str(saved_run.folder)]), open_trained(saved_run.folder))
    model, asked = HarnessModel(computed), []
    continue_texts = TaskModel.continue_texts

    def watch(self, prompts, sampling, end):
        asked.extend(prompts)
        return continue_texts(self, prompts, sampling, end)

    monkeypatch.setattr(TaskModel, "continue_texts", watch)
    contexts = ["the import of", "what comes after this is a longer context"]
    settings = {"until": ["\n\n"], "max_gen_toks": 5}
    requests = [Instance(request_type="generate_until", doc={}, arguments=(each, settings), idx=0) for each in contexts]
    texts = model.generate_until(requests)
    ids = [list(each.encode()) for each in contexts]
    assert [prompt.ids for prompt in asked] == [tuple(each[-(computed.window - 5) :]) for each in ids]
    end = EndRule(max_tokens=5, end_ids=frozenset({256}))
    raw = continue_texts(computed, asked, SamplingRule(), end)
    assert [computed.tokenizer.decode(text.ids) for text in raw] == texts and all(texts)

    other = [(raw[0].ids[0] + 1) % 256, *raw[0].ids[1:]]
    asked_for = [(ids[0], raw[0].ids), (ids[0], other), (ids[1], raw[1].ids)]
    likely, unlikely, cut = model._loglikelihood_tokens([(("", ""), *each) for each in asked_for])
    assert likely == (pytest.approx(sum(raw[0].log_probs), abs=1e-5), True)
    assert unlikely[0] < likely[0] and not unlikely[1]
    (alone,) = computed.score([continuation_row(ids[1][-28:], raw[1].ids)])  # 32 inputs: 28, and 4 of the 5 tokens
    assert cut[0] == pytest.approx(alone.log_prob, abs=1e-5)


def test_unknown_tasks_are_named(saved_run, tasks, capsys):
    code = main([str(saved_run.folder), "--tasks", "our_choice,no_such_task", "--task-path", str(tasks)])
    assert code == 2 and "no_such_task: the library knows no such task" in capsys.readouterr().err
