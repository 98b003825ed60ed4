"""The site of the documentation: built strictly, every page in its navigation, no broken link, nothing external."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parent.parent
EXTERNAL = ("http:", "https:", "//")
LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class PageReader(HTMLParser):
    """A page's anchors, links, what it loads when it opens, and the text of its paragraphs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.paragraphs: list[str] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if LOADS.get(tag) in values:
            self.loaded.append(values[LOADS[tag]])
        if tag in ("p", "code"):
            self._open.append(tag)
            self.paragraphs += [""] * (tag == "p")

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "p":
            self.paragraphs[-1] += data


def build_site(folder: Path, **settings: Any) -> Path:
    """The folder with the pages. Raises `Abort` at a warning."""
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder / "site"), **settings))
    return folder / "site"


def broken_links(site: Path) -> Iterator[str]:
    """Links and loaded files of all pages that lead to no file or to no anchor of the site."""
    pages = {path: PageReader(path.read_text()) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links + page.loaded:
            if link.startswith(EXTERNAL):
                continue
            name, _, anchor = unquote(link).partition("#")
            target = Path(os.path.normpath(path.parent / name.partition("?")[0])) if name else path
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                yield f"{path.relative_to(site)}: {link}"


def external_loads(site: Path) -> Iterator[str]:
    """What pages and style sheets load from other hosts."""
    for path in site.rglob("*.html"):
        yield from (f"{path.name}: {each}" for each in PageReader(path.read_text()).loaded if each.startswith(EXTERNAL))
    for path in site.rglob("*.css"):
        text = path.read_text()
        yield from (f"{path.name}: {mark}" for mark in ("url(http", "url(//", 'url("http', "@import") if mark in text)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("docs"))


def test_every_link_and_anchor_of_the_site_resolves(site: Path) -> None:
    assert not list(broken_links(site))


def test_every_page_is_in_the_navigation(site: Path) -> None:
    links = {unquote(link) for link in PageReader((site / "index.html").read_text()).links}
    pages = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages | {"repository/index.html", "repository/CONTRIBUTING.html"} <= links


def test_the_site_is_readable_without_a_network(site: Path) -> None:
    assert not list(external_loads(site))
    start = PageReader((site / "repository" / "index.html").read_text())
    assert {"../elastic.html", "CONTRIBUTING.html"} <= set(start.links)
    assert "../plan.png" in start.loaded


def test_what_pages_link_to_outside_docs_is_shown(site: Path) -> None:
    assert "class Route" in (site / "repository/parallel3d/pipeline/routes.py.html").read_text()
    assert "state_machine" not in (site / "repository/parallel3d/config.html").read_text()
    assert "<code>load.py</code>" in (site / "repository/parallel3d/config.html").read_text()


def test_lists_and_tables_are_no_paragraphs(site: Path) -> None:
    """A list without an empty line before it is a list on the repository's page, not to mkdocs."""
    pages = [path for path in site.rglob("*.html") if ".py" not in path.name]
    lines = [line for path in pages for text in PageReader(path.read_text()).paragraphs for line in text.splitlines()]
    assert not [line for line in lines if line.startswith(("- ", "* ", "1. ", "|", "```"))]


def test_broken_links_and_external_files_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="here"></h1><a href="#here"></a><a href="#no"></a><a href="b.html"></a><a href="https://a.b/c"></a>'
        '<script src="https://a.b/c.js"></script><img src="no.png">'
    )
    (tmp_path / "c.css").write_text("@font-face { src: url(//a.b/c.woff) }")
    assert list(broken_links(tmp_path)) == ["a.html: #no", "a.html: b.html", "a.html: no.png"]
    assert list(external_loads(tmp_path)) == ["a.html: https://a.b/c.js", "c.css: url(//"]


@pytest.mark.parametrize("text", ["[a](nowhere.md)", "[a](index.md#nowhere)", "[a](../no/such.py)", "[a](/etc/hosts)"])
def test_a_broken_link_ends_the_build(text: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Index\n\n{text}\n")
    with pytest.raises(Abort):
        build_site(tmp_path, docs_dir=str(tmp_path / "docs"), nav=None)
