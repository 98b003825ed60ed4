"""The package as users have it: sdist and wheel, built from a copy of the tree, installed into an empty folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata as metadata_of_packages
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from parallel3d import __version__
from tests.support.hf_tokenizers import write_folder
from tests.support.launch_runs import STARTED, metrics, wait_for_change, wait_for_step

ROOT = Path(__file__).parents[2]
SOURCES = ("parallel3d", "configs", "launch", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
OFFLINE = ("--no-deps", "--no-index", "--disable-pip-version-check", "-q")
OURS = ("parallel3d", f"parallel3d-{__version__}.dist-info")
TIMEOUT_S = 300
SIZES = dict(
    vocab_size=512,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
HUGGING_FACE = {
    "qwen3": ("gpt2", dict(SIZES, head_dim=16, tie_word_embeddings=True)),
    "llama": ("llama3", dict(SIZES, rope_parameters=LLAMA3_ROPE)),
}
"""By model_type: the kind of the tokenizer, and the fields of config.json."""
LINE = "{0} is followed by {1}.\n"
CHANGE = "membership"


@dataclass(frozen=True, kw_only=True)
class Installation:
    wheel: Path
    sdist: Path
    folder: Path
    """What `pip install --target` has filled."""

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        return {**kept, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.folder / "bin" / "parallel3d"), *arguments]
        process = subprocess.Popen(
            command, cwd=cwd, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        STARTED.append(process)
        return process

    def run(self, *arguments: str, cwd: Path) -> str:
        """The command's output; it must succeed."""
        process = self.start(*arguments, cwd=cwd)
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, err
        return out


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    top = tmp_path_factory.mktemp("package")
    tree, built, folder = top / "tree", top / "built", top / "site"
    tree.mkdir()
    for name in SOURCES:  # a copy: a build leaves folders in its tree
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, tree / name, **({"ignore": ignore} if (ROOT / name).is_dir() else {}))
    build = "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", build, str(built)], cwd=tree)
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:  # the wheel is made from the sdist: it must hold all that a build needs
        archive.extractall(top / "unpacked", filter="data")
    (unpacked,) = (top / "unpacked").iterdir()
    run([sys.executable, "-m", "pip", "wheel", "--no-build-isolation", *OFFLINE, "-w", str(built), "."], cwd=unpacked)
    (wheel,) = built.glob("*.whl")
    run([sys.executable, "-m", "pip", "install", *OFFLINE, "--target", str(folder), str(wheel)], cwd=top)
    yield Installation(wheel=wheel, sdist=sdist, folder=folder)


def run(command: list[str], *, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_the_wheel_holds_what_the_tree_has(installation: Installation):
    names = set(zipfile.ZipFile(installation.wheel).namelist())
    package = ROOT / "parallel3d"
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert {Path(name).suffix for name in expected} == {".py", ".c", ".h", ".css", ".js", ".typed"}
    configs = {
        f"parallel3d/configs/{path.relative_to(ROOT / 'configs').as_posix()}"
        for path in (ROOT / "configs").rglob("*.json")
    }
    assert "parallel3d/configs/schema.json" in configs
    assert not (expected | configs) - names
    assert {name.partition("/")[0] for name in names} == set(OURS)  # no top-level models, launch or tests
    assert {path.name for path in installation.folder.iterdir()} == {*OURS, "bin"}


@pytest.mark.full
def test_the_metadata_is_what_the_project_says(installation: Installation):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = metadata_of_packages.distributions(path=[str(installation.folder)])
    metadata = found.metadata
    assert (metadata["Name"], metadata["Version"]) == (project["name"], __version__)
    assert metadata["Summary"] == project["description"]
    assert metadata["Requires-Python"] == project["requires-python"]
    assert metadata["License"] == project["license"]["text"] == "Apache-2.0"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert set(metadata.get_all("Classifier")) == set(project["classifiers"])
    requirements = [Requirement(line) for line in found.requires or ()]
    always = {str(each) for each in requirements if each.marker is None}
    assert always == {str(Requirement(line)) for line in project["dependencies"]}
    extras = project["optional-dependencies"]
    assert set(metadata.get_all("Provides-Extra")) == set(extras)
    for extra, lines in extras.items():
        chosen = {each.name for each in requirements if each.marker and each.marker.evaluate({"extra": extra})}
        assert chosen == {Requirement(line).name for line in lines}, extra
    (command,) = found.entry_points.select(group="console_scripts")
    assert (command.name, command.value) == ("parallel3d", "parallel3d.commands.main:main")


@pytest.mark.full
def test_commands_run_from_an_empty_folder(installation: Installation, tmp_path: Path):
    def ask(*arguments: str) -> str:
        return installation.run(*arguments, cwd=tmp_path)

    assert ask("--version").startswith(f"parallel3d {__version__} (torch ")
    assert "quickstart_muon" in ask("configs")
    assert ask("configs", "quickstart") == (ROOT / "configs" / "quickstart.json").read_text()
    assert ask("configs", "schema") == (ROOT / "configs" / "schema.json").read_text()
    assert "bubble" in ask("plan", "--config", "quickstart")
    assert ask("completion", "bash").startswith("_parallel3d()")
    program = "import parallel3d, parallel3d.models.make; print(parallel3d.models.make.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=installation.environment(), capture_output=True, text=True
    )
    assert Path(done.stdout.strip()).is_relative_to(installation.folder), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_an_installed_package_trains_and_a_killed_worker_comes_back(installation: Installation, tmp_path: Path):
    (tmp_path / "mine.txt").write_text("".join(f"{number} is followed by {number + 1}.\n" for number in range(20_000)))
    sources = 'data.sources=["mine.txt"]'
    process = installation.start(
        "train",
        "--config",
        "quickstart",
        sources,
        "data.tokenizer.kind=bytes",
        "run.num_steps=100000",
        "run.directory=run",
        "elastic.max_rejoins=1",
        cwd=tmp_path,
    )
    try:
        wait_for_step(tmp_path / "run", 5)
        line = (tmp_path / "run" / "logs" / "rank-3.log").read_text().splitlines()[0]
        pid = int(line.split("process ")[1].split()[0].rstrip(","))
        modules = Path(f"/proc/{pid}/environ").read_bytes()
        assert f"PYTHONPATH={installation.folder}".encode() in modules
        os.kill(pid, signal.SIGKILL)
        wait_for_change(tmp_path / "run", 2)  # the loss, then the return
        seen = len(metrics(tmp_path / "run"))
        wait_for_step(tmp_path / "run", seen + 3)
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "lost rank 3" in out and "joins" in out, out
    steps = [line["step"] for line in metrics(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    assert f"{len(steps):,}" in installation.run("report", "run", cwd=tmp_path)


def write_hugging_face(folder: Path, model_type: str) -> None:
    """A model with random weights and a tokenizer, as transformers saves them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds to import

    kind, fields = HUGGING_FACE[model_type]
    write_folder(folder, kind=kind)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).save_pretrained(folder)


SHORT = (
    *("batch.sequence_length=64", "batch.global_batch_size=4", "optimizer.learning_rate=3e-3"),
    *("run.threads_per_rank=1", "monitor.charts=false", "run.directory=run", "data.cache_directory=cache"),
    *("parallel.tp_size=2", "parallel.pp_size=2", 'data.sources=["my_text.txt"]'),
)


def kill(rank: int) -> str:
    return f"elastic.faults={json.dumps([{'rank': rank, 'step': 5, 'phase': 'forward'}])}"


def train_through_a_restart(installation: Installation, folder: Path) -> None:
    """Without a replica all four start again, from the newest checkpoint if there is one by then."""
    more = ("run.num_steps=8", "checkpoint.every=1", "restart.max_restarts=1")
    said = installation.run("train", "--config", "mine", kill(rank=3), *SHORT, *more, cwd=folder)
    assert "lost pp1 dp0 tp1 (rank 3)" in said and "restart 1 of 1" in said
    assert metrics(folder / "run")[-1]["step"] == 8


def train_through_a_return(installation: Installation, folder: Path) -> None:
    """With a replica the others train on, without a checkpoint, until all of the grid is back; then it is stopped."""
    more = ("parallel.dp_size=2", "run.num_tokens=null", "run.num_steps=100000", "elastic.max_rejoins=1")
    process = installation.start("train", "--config", "mine", kill(rank=5), *SHORT, *more, cwd=folder)
    run = folder / "run"
    try:
        wait_for_change(run, 2)  # the loss, then the return
        wait_for_step(run, len(metrics(run)) + 3)
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM, err
    lost, *_, back = [line for line in map(json.loads, (run / "metrics.jsonl").open()) if line.get("event") == CHANGE]
    assert (lost["step"], [who["coordinates"] for who in lost["who"]]) == (5, ["pp1 dp0 tp1"])
    assert (lost["widths"], lost["lost"], back["widths"], back["live"]) == ([2, 1], 1, [2, 2], 8)
    steps = [line["step"] for line in metrics(run)]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize(
    ("model_type", "train"), [("qwen3", train_through_a_return), ("llama", train_through_a_restart)]
)
def test_from_hugging_face_to_hugging_face(
    installation: Installation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    train: Callable[[Installation, Path], None],
):
    """A user's folder and text, each step one command: trained on tp 2 x pp 2 with a worker that is killed, exported,
    and the same model in transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_hugging_face(tmp_path / "mine", model_type)
    (tmp_path / "my_text.txt").write_text("".join(LINE.format(number, number + 1) for number in range(2000)))
    (tmp_path / "other.txt").write_text(LINE.format(7, 8))
    train(installation, tmp_path)
    lines = metrics(tmp_path / "run")
    assert lines[-1]["loss"] < lines[0]["loss"]
    installation.run("convert", "to-hf", "run", "out", cwd=tmp_path)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == model_type
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = tokenizer(LINE.format(7, 8), add_special_tokens=False)["input_ids"]
    found = json.loads(installation.run("evaluate", "run", "other.txt", "--json", "--threads", "1", cwd=tmp_path))
    row, end = found["results"]["other.txt"], found["tokenizer"]["eos_id"]
    inputs = torch.tensor([[end, *ids]])
    output = model(inputs, labels=inputs)
    assert output.logits.isfinite().all() and row["tokens"] == len(ids)
    assert row["loss"] == pytest.approx(output.loss.item(), rel=1e-5)  # fp32, summed in another order

    arguments = ["generate", "out", "7 is followed", "--max-tokens", "8", "--json", "--threads", "1"]
    written = json.loads(installation.run(*arguments, cwd=tmp_path))
    prompt = torch.tensor([tokenizer("7 is followed")["input_ids"]])  # BOS included, as `generate` has it
    theirs = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert written["tokens"] == theirs and written["text"]
