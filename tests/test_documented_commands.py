"""The commands of the pages: each is in the table, parses, and is run as it is printed or has a reason why not."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallel3d.child_process import command_line
from parallel3d.commands.main import run
from parallel3d.commands.parsers import parse
from tests.support.documented_commands import DOCUMENTED, SHORT_RUN
from tests.support.launch_runs import finish, start
from tests.support.page_commands import PAGES, ROOT, DocumentedCommand, page_commands
from tests.support.workshop import add_trained, write_texts

PLACEHOLDER = re.compile(r"\[(--[\w-]+)|\.\.\.\]")
MAKEFILE = (ROOT / "Makefile").read_text()


def words_of(line: str) -> tuple[str, list[str], str | None]:
    """The name of a command of ours, its arguments, and the file that its output goes to."""
    words = shlex.split(line)
    target = words.pop() if len(words) > 1 and words[-2] == ">" else None
    words = words[:-1] if target else words
    program, *rest = words
    if program == "parallel3d":
        return rest[0], rest[1:], target
    script = Path(rest[0])
    assert (ROOT / script).is_file()
    return script.stem.replace("_", "-"), rest[1:], target


@pytest.mark.parametrize("page", PAGES)
def test_the_table_has_the_commands_of_a_page(page: str):
    shown = list(dict.fromkeys(page_commands((ROOT / page).read_text())))
    assert [each.text for each in DOCUMENTED.get(page, ())] == shown


def test_no_page_of_the_table_is_gone():
    assert set(DOCUMENTED) <= set(PAGES)


@pytest.mark.parametrize("page", DOCUMENTED)
def test_a_command_parses(page: str):
    """Its options and their values, also where it is not run."""
    for each in DOCUMENTED[page]:
        if each.is_ours:
            name, arguments, _ = words_of(each.line)
            parse(name, arguments)
        elif each.text.startswith("make "):
            assert f"\n{each.text.removeprefix('make ')}:" in MAKEFILE
        elif script := re.search(r"benchmarks/\w+\.py", each.text):
            source = (ROOT / script[0]).read_text()
            assert all(f'"{option}"' in source for option in re.findall(r"--[a-z-]+", each.line))


@pytest.mark.parametrize("page", DOCUMENTED)
def test_a_reason_and_a_usage_line_are_complete(page: str):
    for each in DOCUMENTED[page]:
        assert each.reason or each.is_ours
        assert not each.tested_by or (ROOT / each.tested_by).is_file()
        notation = [option or "..." for option in PLACEHOLDER.findall(each.text)]
        assert bool(notation) <= bool(each.typed), each.text
        assert {option for option in notation if option != "..."} <= set(each.typed.split())


def test_what_is_a_command_of_a_page():
    text = """
    ```
    parallel3d plan --config F   # a comment
    python launch/train.py --config F \\
        run.seed=1
    step 1  loss 2
    ```
    ```python
    parallel3d.train("F")
    ```
Text in front of a block:

    make demo    # minutes
    pip install x

- a list
    parallel3d is continued text
"""
    text = text.replace("    ```", "```")
    assert list(page_commands(text)) == [
        "parallel3d plan --config F",
        "python launch/train.py --config F run.seed=1",
        "make demo",
    ]


# --- run as printed ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with a short run, which the README's command has made."""
    folder = tmp_path_factory.mktemp("workshop")
    write_texts(folder)
    [first] = [each for each in DOCUMENTED["README.md"] if each.added == SHORT_RUN]
    name, arguments, _ = words_of(f"{first.line} {first.added}")
    assert name == "train"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        code, out, err = finish(start(*arguments))
        assert code == 0 and first.said in out, out + err
        add_trained(folder)
    yield folder


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in DOCUMENTED if any(not each.reason for each in DOCUMENTED[page])])
def test_the_commands_of_a_page_run(
    page: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "here"
    shutil.copytree(workshop, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    for each in DOCUMENTED[page]:
        if not each.reason and each.added != SHORT_RUN:
            run_as_printed(each, folder, capsys)


def run_as_printed(each: DocumentedCommand, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the command in the current folder; it must succeed and print what the table says."""
    with linked(folder, each.given):
        name, arguments, target = words_of(f"{each.line} {each.added}".strip())
        if "--follow" in arguments:  # lowers the priority of its process
            done = subprocess.run(command_line(name, *arguments), capture_output=True, text=True)
            code, out, err = done.returncode, done.stdout, done.stderr
        else:
            code, (out, err) = run(name, arguments), capsys.readouterr()
    printed = f"{each.text}\n{out}{err}"
    assert code == 0, printed
    if target is not None:
        (folder / target).write_text(out)
    assert each.said in out + err, printed


@contextmanager
def linked(folder: Path, given: Mapping[str, str]) -> Iterator[None]:
    """While it is entered, names of `folder` stand for other things there."""
    for name, source in given.items():
        if (folder / name).exists():
            (folder / name).rename(folder / f"former-{name}")
        (folder / name).symlink_to(folder / source)
    yield
    for name in given:
        (folder / name).unlink()
        if (folder / f"former-{name}").exists():
            (folder / f"former-{name}").rename(folder / name)
