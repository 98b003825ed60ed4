"""Hook of mkdocs: what the pages link to outside docs/ becomes a page of the site, and headings get GitHub's anchors.

The same links thus work on the repository's page and, without a network, on the site:

    ../README.md, ../configs/README.md    the page itself, with its own links treated alike
    ../parallel3d/pipeline/routes.py      a page with the file's text
    ../parallel3d/config                  a page with the folder's files and their first lines
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = "repository"  # the site's folder of what lies outside docs/
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the anchors of headings; leaves out 404.html and the site's map, of use to web servers only."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = github_anchor
    config.theme.static_templates.clear()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file or folder outside docs/ that a page links to, pages of pages included."""
    waiting = list(files.documentation_pages())
    while waiting:
        page = waiting.pop()
        for source in _linked(page.content_string, page.src_uri):
            if files.get_file_from_path(site_uri(source)) is None:
                added = File.generated(
                    config, site_uri(source), content=page_text(source), inclusion=InclusionLevel.NOT_IN_NAV
                )
                files.append(added)
                if source.endswith(".md"):
                    waiting.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the links between files of the repository into links between pages of the site."""
    page_uri = page.file.src_uri

    def site_link(match: re.Match[str]) -> str:
        source = _target(match[1], page_uri)
        return match[1] if source is None else os.path.relpath(site_uri(source), PurePosixPath(page_uri).parent)

    return LINK.sub(site_link, markdown)


def github_anchor(heading: str, separator: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def site_uri(source: str) -> str:
    """A page's path in the site, from the path in the repository of what it shows."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return f"{OUTSIDE}/{source}" if source.endswith(".md") else f"{OUTSIDE}/{source}.md"


def page_text(source: str) -> str:
    """Markdown that shows a file or a folder of the repository."""
    path = ROOT / source
    if source.endswith(".md"):
        return path.read_text()
    if path.is_dir():
        rows = (f"| `{each.name}` | {_first_line(each)} |" for each in sorted(path.iterdir()) if _is_shown(each))
        return "\n".join([f"# {source}", "", "| file | |", "|---|---|", *rows])
    return "\n".join([f"# {source}", "", f"~~~~{path.suffix[1:]}", path.read_text().rstrip(), "~~~~"])


def _linked(markdown: str, page_uri: str) -> Iterator[str]:
    """Paths in the repository of what a page links to outside docs/."""
    for link in LINK.findall(markdown):
        source = _target(link, page_uri)
        if source is not None and not source.startswith("docs/"):
            yield source


def _target(link: str, page_uri: str) -> str | None:
    """The path in the repository that a page's link names, if it exists there."""
    inside = page_uri.removeprefix(f"{OUTSIDE}/")
    page = ROOT / (inside if inside != page_uri else f"docs/{page_uri}")
    path = Path(os.path.normpath(page.parent / link))
    return str(path.relative_to(ROOT)) if path.exists() and path.is_relative_to(ROOT) else None


def _is_shown(path: Path) -> bool:
    return not path.name.startswith((".", "__pycache__"))


def _first_line(path: Path) -> str:
    """The first sentence of a module's docstring."""
    source = path / "__init__.py" if path.is_dir() else path
    found = re.match(r'"""(.*?)("""|$)', source.read_text(), re.MULTILINE) if source.suffix == ".py" else None
    return found[1].replace("|", "\\|") if found else ""
