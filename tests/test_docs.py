"""README and docs name what exists: paths, links, anchors, configuration fields, options; no path of a machine."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel3d.commands.parsers import PARSERS, make_parser
from parallel3d.config.load import load_config
from parallel3d.config.schema import Config

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]

PATH = re.compile(r"(?<![\w/.-])((?:parallel3d|launch|configs|docs|tests|benchmarks)/[\w./-]*\w)")
MODULE = re.compile(r"`([\w/]+/\w+\.py)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FIELD = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w(/-])")
PYTHON = re.compile(r"^```python\n.*?^```$", re.DOTALL | re.MULTILINE)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|mnt|Users)/\S+")


def missing_paths(text: str) -> Iterator[str]:
    """Paths in `text` that do not exist: from the root; a module in backticks may lack its first folders."""
    for name in PATH.findall(text):
        if not (ROOT / name).exists():
            yield name
    for name in MODULE.findall(text):
        if not ((ROOT / name).is_file() or any((ROOT / "parallel3d").rglob(name))):
            yield name


def broken_links(text: str, page: Path) -> Iterator[str]:
    """Relative links without a target, or to a heading that the target lacks."""
    for link in LINK.findall(text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            yield link


def unknown_options(text: str) -> Iterator[str]:
    """Options after `launch/NAME.py` or `parallel3d NAME` in a line of code that the command does not have."""
    for script, name, rest in re.findall(r"(launch/(\w+)\.py)([^`\n#|]*)", text) + [
        (f"parallel3d {name}", name, rest) for name, rest in re.findall(r"\bparallel3d ([a-z-]+)([^`\n#|]*)", text)
    ]:
        name = name.replace("_", "-")
        known = options_of(make_parser(name)) if name in PARSERS else set()
        for option in re.findall(r"(?<=[ \[])--[a-z][a-z-]*", rest):
            if option not in known:
                yield f"{script} {option}"


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a command and of its own commands (convert to-hf)."""
    deeper = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    below = (options_of(each) for choices in deeper for each in choices.values())
    return set(parser._option_string_actions).union(*below)


def anchors(text: str) -> set[str]:
    """Headings as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def unknown_fields(text: str) -> Iterator[str]:
    """Words `section.field` outside Python code whose section the configuration has and whose field it lacks."""
    schema = Config.model_json_schema()
    for name in FIELD.findall(PYTHON.sub("", text)):
        section, *fields = name.split(".")
        if section not in schema["properties"] or fields[-1] in {"py", "md", "json", "png", "safetensors"}:
            continue
        if not has_field(schema, schema["properties"][section], fields):
            yield name


def has_field(schema: dict[str, Any], node: dict[str, Any], fields: list[str]) -> bool:
    """Whether a JSON schema's node has this path of fields; lists and nulls around a section are looked through."""
    if not fields:
        return True
    if "$ref" in node:
        return has_field(schema, schema["$defs"][node["$ref"].rpartition("/")[2]], fields)
    if alternatives := node.get("anyOf", []) + node.get("allOf", []):
        return any(has_field(schema, each, fields) for each in alternatives)
    properties = node.get("properties", {})
    return fields[0] in properties and has_field(schema, properties[fields[0]], fields[1:])


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_what_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    assert not list(missing_paths(text))
    assert not list(broken_links(text, ROOT / page))
    assert not list(unknown_fields(text))
    assert not list(unknown_options(text))
    assert not MACHINE_PATH.findall(text)


def test_the_checkers_see_what_is_wrong() -> None:
    page = ROOT / "docs/index.md"
    assert list(missing_paths("`parallel3d/trainer/step.py`, `trainer/step.py`, parallel3d/stop.py, `data/no.py`")) == [
        "parallel3d/stop.py",
        "data/no.py",
    ]
    links = "[a](../README.md) [b](nowhere.md) [c](glossary.md#who-runs) [d](glossary.md#no)"
    assert list(broken_links(links, page)) == ["nowhere.md", "glossary.md#no"]
    assert list(unknown_fields("`run.num_steps`, parallel.tp_sise=2, launch/train.py, data.tokenizer.path")) == [
        "parallel.tp_sise"
    ]
    assert list(unknown_options("`python launch/plan.py --config F --lost 3 --loss 4`")) == ["launch/plan.py --loss"]
    assert list(unknown_options("`parallel3d plan --config F --los 3`, `launch/convert.py to-hf A --dtype bf16`")) == [
        "parallel3d plan --los"
    ]
    assert list(unknown_fields("elastic.md, checkpoint.every, precision.loss_scale.min, run.py")) == []


@pytest.mark.parametrize(
    ("log", "sentences"),
    [
        ("kill_matrix", {"README.md": "**{0} of {0}**", "docs/index.md": "each of the {0} kill runs"}),
        ("signal_matrix", {"docs/index.md": "in {0} runs?", "docs/elastic.md": "under torchrun: {0} runs"}),
    ],
)
def test_pages_have_the_number_of_runs_that_is_in_the_log(log: str, sentences: dict[str, str]) -> None:
    found = re.search(r"(\d+) runs[^,]*, 0 wrong", (ROOT / f"docs/logs/{log}.md").read_text())
    assert found is not None
    for page, sentence in sentences.items():
        assert sentence.format(f"{int(found[1]):,}") in (ROOT / page).read_text(), page


def test_the_index_lists_every_page() -> None:
    linked = set(LINK.findall((ROOT / "docs/index.md").read_text()))
    assert {Path(page).name for page in PAGES if page.startswith("docs/")} - {"index.md"} <= linked


def test_the_example_configuration_loads(tmp_path: Path) -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    example = re.search(r"```json\n(.*?)```", text, flags=re.DOTALL)
    assert example is not None
    (tmp_path / "example.json").write_text(example[1])
    config = load_config(tmp_path / "example.json", ["data.sources=[]"])
    assert config.parallel.tp_size == 4


def test_the_tree_names_every_package() -> None:
    tree = re.search(r"```\n(launch/.*?)```", (ROOT / "docs/architecture.md").read_text(), flags=re.DOTALL)
    assert tree is not None
    listed = set(re.findall(r"^ +([\w]+)/ ", tree[1], flags=re.MULTILINE))
    packages = {path.parent.name for path in (ROOT / "parallel3d").glob("**/__init__.py")} - {"parallel3d"}
    assert listed == packages


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 1100
