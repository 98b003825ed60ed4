"""evaluation.every_tokens, and `parallel3d evaluate RUN --follow`: a real run whose checkpoints are evaluated."""

import json
import subprocess

import pytest

from parallel3d.child_process import command_line
from parallel3d.commands.evaluate import main as evaluate
from tests.support.launch_runs import finish, metrics, start

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_checkpoints_are_evaluated_beside_the_run_and_by_hand(config_file, tmp_path, text, capsys):
    """Its numbers are those of evaluations by hand; a set that fails is named once, and the run does not notice it."""
    run, page = tmp_path / "run", tmp_path / "page.txt"
    page.write_text(text.read_text()[:2000])
    (tmp_path / "empty.txt").write_text("")
    sets = {"seen": "", "page": str(page), "empty": str(tmp_path / "empty.txt")}
    asked = (f"evaluation.sets={json.dumps(sets)}", "evaluation.every_tokens=2000", "checkpoint.every=2")
    code, out, err = finish(start("--config", config_file, *asked, "parallel.dp_size=1"))
    assert code == 0 and [line["step"] for line in metrics(run)] == [*range(1, 13)], out + err
    assert err.count("evaluation: ") == 1 and "could not be evaluated" in err and "holds no text" in err, err
    assert not list((run / "checkpoints").glob("*.evaluating-*"))

    assert evaluate([str(run), "--history", "--json"]) == 0
    history = json.loads(capsys.readouterr().out)
    assert history["empty"] == [] and {history[name][-1]["step"] for name in ("seen", "page")} == {12}
    assert all(row["tokens"] == 8 * 32 * row["step"] for row in history["seen"] + history["page"])
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = next(line for line in last if line.get("event") == "evaluation" and line["step"] == 12)
    assert history["seen"][-1]["results"]["held-out text"]["loss"] == pytest.approx(trained["loss"], rel=1e-6)
    data = json.loads((run / "report.html").read_text().split('id="data">')[1].split("</script>")[0])
    charts = {chart["title"]: chart["series"][0]["curve"] for chart in data["charts"]}
    for name, group in (("seen", "held-out text"), ("page", str(page))):
        curve = charts[f"{name}: {group}"]
        rows = [(row["step"], row["results"][group]["loss"]) for row in history[name]]
        assert [*zip(curve["x"], curve["mean"])] == rows, "what was evaluated after the last step is on the page too"

    command = command_line("evaluate", str(run), str(page), "--follow", "--every-tokens", "1")
    done = subprocess.run([*command, "--name", "again"], capture_output=True, text=True)
    assert done.returncode == 0 and "again, step 12" in done.stdout, done.stdout + done.stderr
    done = subprocess.run([*command, "--name", "seen"], capture_output=True, text=True)
    assert done.returncode == 2 and "other settings" in done.stderr
    assert evaluate([str(run), "--history", "--json"]) == 0
    history = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in history["again"]][-1] == 12
    assert history["again"][-1]["results"] == history["page"][-1]["results"]


def test_each_domain_has_a_curve_of_its_own(config_file, tmp_path, text):
    """Of a set with --by domain: during training, in the results and on the page, and all tokens of both are `all`."""
    words, numbers, run = tmp_path / "words.txt", tmp_path / "numbers.txt", tmp_path / "run"
    words.write_text(text.read_text()[:60_000])
    numbers.write_text("\n".join(f"{n} squared is {n * n}" for n in range(2000)))
    asked = ["data.document_chars=500", "data.validation_fraction=0.2", f'data.sources=["{words}", "{numbers}"]']
    asked += ['evaluation.sets={"domains": "--slice all --by domain"}', "evaluation.every_tokens=1000"]
    code, out, err = finish(start("--config", config_file, *asked, "checkpoint.every=4", "parallel.dp_size=1"))
    assert code == 0, out + err

    results = {}
    for path in sorted((run / "evaluations" / "domains").glob("step-*.json")):
        saved = json.loads(path.read_text())
        results[saved["model"]["step"]] = saved["results"]
    data = json.loads((run / "report.html").read_text().split('id="data">')[1].split("</script>")[0])
    charts = {chart["title"]: chart["series"][0]["curve"] for chart in data["charts"]}
    names = {name for each in results.values() for name in each}
    assert len(results) >= 2 and max(results) == 12 and len(names) == 3 and "all" in names
    for name in names:
        curve = charts[f"domains: {name}"]
        points = [(step, found[name]["loss"]) for step, found in sorted(results.items())]
        assert [*zip(curve["x"], curve["mean"])] == points, name
    for found in results.values():
        parts = [found[name] for name in names - {"all"}]
        total = sum(part["loss"] * part["tokens"] for part in parts)
        assert found["all"]["loss"] == pytest.approx(total / found["all"]["tokens"], rel=1e-9)
        assert parts[0]["loss"] != parts[1]["loss"]
