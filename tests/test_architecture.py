"""The tree follows its rules (tests/support/architecture.py), and uses each name once."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

import pytest

from tests.support import english
from tests.support.architecture import CHECKERS, FLOORS_IN_DOCS, ROOT, Checker, check_length, floor_table


def sources() -> Iterator[tuple[str, str]]:
    for top in ("parallel3d", "launch"):
        for path in sorted((ROOT / top).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
def test_the_tree(checker: Checker):
    wrong = [finding for path, source in sources() for finding in checker(path, source)]
    assert not wrong, "\n" + "\n".join(wrong)


def test_tests_and_benchmarks_are_short():
    files = [path for top in ("tests", "benchmarks") for path in sorted((ROOT / top).rglob("*.py"))]
    wrong = [found for path in files for found in check_length(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert not wrong, "\n" + "\n".join(wrong)


def names_used_twice(paths_and_names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that stand for several things: name -> paths."""
    paths: dict[str, list[str]] = defaultdict(list)
    for path, name in paths_and_names:
        paths[name].append(path)
    return {name: found for name, found in paths.items() if len(found) > 1}


def test_a_class_name_is_used_once():
    classes = (
        (path, node.name)
        for path, source in sources()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    )
    assert not names_used_twice(classes)


def test_a_file_name_is_used_once():
    """A command may have the name of the library module that does its work, and of its script: average."""
    files = [path for path, _ in sources() if not path.endswith("__init__.py") and not path.startswith("launch/")]
    for commands in (True, False):
        chosen = (path for path in files if path.startswith("parallel3d/commands/") is commands)
        named = ((path, PurePosixPath(path).stem) for path in chosen)
        assert not names_used_twice(named)


@pytest.mark.parametrize("folder", english.FOLDERS)
def test_english(folder: str):
    found = english.findings(folder)
    assert not found, "\n" + "\n".join(found)


def test_the_documentation_has_the_floors():
    text = (ROOT / "docs" / "architecture.md").read_text()
    found = FLOORS_IN_DOCS.search(text)
    assert found and found[0] == f"{found[1]}{floor_table()}\n{found[2]}", "run python -m tests.support.architecture"


def test_files_are_found():
    found = dict(sources())
    assert {"parallel3d/errors.py", "parallel3d/config/load.py", "parallel3d/ramps.py"} <= set(found)


def test_no_two_files_of_tests_have_the_same_name():
    """pytest imports them by it: of two the second is not run where both are collected."""
    names = Counter(path.name for path in ROOT.glob("tests/**/test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
