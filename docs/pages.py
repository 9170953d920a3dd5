"""For mkdocs: the site is what the repository has, each page where it is there, so that every link
between pages is the same in both; and whatever a page links to is on the site, source code, too."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/*.md",
    "examples/README.md",
    "lab/docs/*.md",
    "lab/results/*/README.md",
)
LINK = re.compile(r"(?:\]\(|<img src=\")([^)#\s\"]+)")
IN_A_LIST = re.compile(r"^   (?=\S)", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's own stay."""
    root = Path(config.config_file_path).parent
    pages = [page for pattern in PAGES for page in sorted(root.glob(pattern))]
    linked = [(page.parent / link).resolve() for page in pages for link in links(page)]
    there = [path for path in dict.fromkeys([*pages, *linked]) if path.is_file()]
    own = [File.generated(config, str(p.relative_to(root)), abs_src_path=str(p)) for p in there]
    return Files([*own, *(file for file in files if file.abs_src_path not in set(map(str, there)))])


def links(page: Path) -> list[str]:
    """To files beside it."""
    return [link for link in LINK.findall(page.read_text("utf-8")) if "://" not in link]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """What belongs to a point of a numbered list is indented by its number's width, three; Python's
    Markdown wants four."""
    return IN_A_LIST.sub("    ", markdown)
