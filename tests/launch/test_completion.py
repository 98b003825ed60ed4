"""Completion in a real bash, help without torch, and commands whose reader goes away."""

from __future__ import annotations

import os
import pty
import select
import shlex
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from shutil import which

import pytest

from parallel3d.commands.completion import complete
from parallel3d.commands.main import COMMANDS
from parallel3d.commands.parsers import PARSERS, make_parser
from tests.support.launch_runs import PATIENCE_S

ROOT = Path(__file__).parents[2]


def test_every_command_has_a_parser_and_a_module():
    assert set(PARSERS) == set(COMMANDS)
    for name in COMMANDS:
        assert (ROOT / "parallel3d" / "commands" / f"{name.replace('-', '_')}.py").is_file()
        assert make_parser(name).description


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["tr"], ["train", "track"]),
        (["train", "--conf"], ["--config"]),
        (["train", "--config", "quickstart_l"], ["quickstart_lion"]),
        (["train", "--config=quickstart_l"], ["--config=quickstart_lion"]),
        (["train", "precision.pol"], ["precision.policy="]),
        (["train", "--config", "quickstart", "precision.sums="], ["precision.sums=float", "precision.sums=exact"]),
        (["train", "data.tokenizer.ki"], ["data.tokenizer.kind="]),
        (["convert", ""], ["to-hf", "to-safetensors", "from-hf", "model", "config"]),
        (["convert", "to-hf", "a", "b", "--dtype", "b"], ["bf16"]),
        (["configs", "sch"], ["schema"]),
        (["report", "ru"], []),
        (["nothing", ""], []),
    ],
)
def test_candidates(line: list[str], expected: list[str]):
    assert complete(line) == expected


def test_configurations_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text("{}")
    (tmp_path / "minor").mkdir()
    assert complete(["train", "--config", "mi"]) == ["mistral_7b", "mine.json", "minor/"]


def environment_in(folder: Path) -> dict[str, str]:
    """That of a shell in which `parallel3d` is this tree's."""
    command = folder / "parallel3d"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m parallel3d "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def in_bash(line: str, folder: Path) -> list[str]:
    """The words that bash would offer after Tab at the end of `line`, in a real bash with the printed script."""
    ask = (
        'eval "$(parallel3d completion bash)"; complete -p parallel3d > /dev/null || exit 9; compopt() { :; }; '
        f"COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}; _parallel3d; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = environment_in(folder)
    done = subprocess.run(["bash", "-c", ask], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("parallel3d tune", ["tune-warmup"]),
        ("parallel3d train --config quickstart_m", ["quickstart_muon"]),
        ("parallel3d convert ", ["to-hf", "to-safetensors", "from-hf", "model", "config"]),
        ("parallel3d train precision.policy=bf16_", ["bf16_sr", "bf16_pure"]),  # bash replaces what follows the =
        ("parallel3d report no-such", []),
    ],
)
@pytest.mark.sample(2)
def test_in_bash(line: str, expected: list[str], tmp_path: Path):
    assert in_bash(line, tmp_path) == expected


@pytest.mark.skipif(not which("fish"), reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("parallel3d tune", ["tune-warmup"]),
        ("parallel3d convert ", ["from-hf", "model", "to-hf", "to-safetensors"]),  # and no files
        ("parallel3d train precision.policy=bf16_", ["precision.policy=bf16_pure", "precision.policy=bf16_sr"]),
        ("parallel3d report no-", ["no-such/"]),
    ],
)
def test_in_fish(line: str, expected: list[str], tmp_path: Path):
    (tmp_path / "no-such").mkdir()
    ask = ["fish", "--no-config", "-c", f"parallel3d completion fish | source; complete -C {shlex.quote(line)}"]
    environment = environment_in(tmp_path)
    done = subprocess.run(ask, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.split() == expected


ZSHRC = """
autoload -Uz compinit
compinit -u -D
eval "$(parallel3d completion zsh)"
unsetopt BEEP
PS1='ready> '
answer() { print -r -- "$BUFFER" > answer; }
zle -N answer
bindkey '^X' answer
"""


@pytest.mark.skipif(not which("zsh"), reason="zsh is not installed")
@pytest.mark.parametrize(
    ("line", "expected", "listed"),
    [
        ("parallel3d tune", "parallel3d tune-warmup ", ""),
        ("parallel3d train precision.pol", "parallel3d train precision.policy=", ""),  # and no space
        ("parallel3d convert ", "parallel3d convert ", f"{'from-hf':16}{'model':16}{'to-hf':16}to-safetensors"),
        ("parallel3d report no-", "parallel3d report no-such/", ""),
    ],
)
def test_in_zsh(line: str, expected: str, listed: str, tmp_path: Path):
    """An interactive zsh at a terminal, in which Tab is pressed, then a key that writes down what stands there."""
    (tmp_path / "no-such").mkdir()
    (tmp_path / ".zshrc").write_text(ZSHRC)
    ours, theirs = pty.openpty()
    environment = {**environment_in(tmp_path), "ZDOTDIR": str(tmp_path), "TERM": "dumb"}
    shell = subprocess.Popen(
        ["zsh", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=tmp_path, start_new_session=True
    )
    seen, answer = "", tmp_path / "answer"
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not answer.exists() or not answer.read_text():
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 0.1)[0]:
                was_ready, seen = "ready> " in seen, seen + os.read(ours, 4096).decode()
                if "ready> " in seen and not was_ready:
                    os.write(ours, f"{line}\t\x18".encode())
    finally:
        shell.kill()
        shell.wait(100)
        os.close(ours)
        os.close(theirs)
    assert answer.read_text() == f"{expected}\n" and listed in seen


def test_help_and_completion_need_neither_torch_nor_pydantic():
    program = (
        "import sys\n"
        "from parallel3d.commands.main import main\n"
        "main(['completion', '--words', 'train', 'par'])\n"
        "try: main(['verify', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "main(['--help'])\n"
        "assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "parallel.tp_size=" in done.stdout and "--layouts" in done.stdout


def piped(command: str) -> tuple[int, str]:
    """The exit code and standard error of a command whose reader is gone before it writes."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *shlex.split(command)],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=300,
    )
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "-m parallel3d configs",
        "-m parallel3d --help",
        "launch/plan.py --config quickstart",
        "-m parallel3d goodput",
        "-m parallel3d doctor --json",
        "launch/train.py --config quickstart --print-config",
    ],
)
@pytest.mark.sample(3)
def test_a_reader_that_goes_away(command: str):
    assert piped(command) == (141, "")


def test_help_without_a_reader():
    assert piped("-m parallel3d train --help")[1] == ""  # argparse itself ignores errors of a write: any code


def test_every_script_runs_its_command():
    scripts = {path.stem for path in (ROOT / "launch").glob("*.py")}
    for name in scripts:
        text = (ROOT / "launch" / f"{name}.py").read_text()
        assert f'run("{name.replace("_", "-")}", sys.argv[1:])' in text
        assert import_module("parallel3d.commands.parsers").PARSERS[name.replace("_", "-")]
