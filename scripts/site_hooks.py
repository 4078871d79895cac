"""Hooks of MkDocs: they make what comes from the code, and the links that leave the site."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from site_pages import PARTS

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([\w./-]+)\)")
#: The place for the public names of a module.
NAMES = re.compile(r"^<!-- names of ([\w.]+) -->$", re.MULTILINE)
#: The place for a part that is made from the code.
MADE = re.compile(r"^<!-- made: ([\w ]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's text as it is built."""
    markdown = MADE.sub(lambda place: PARTS[place[1]](), markdown)
    markdown = NAMES.sub(lambda place: names_of(place[1]), markdown)
    folder = (ROOT / "docs" / page.file.src_uri).parent
    return LINK.sub(lambda link: without_outside(link, folder), markdown)


def names_of(module: str) -> str:
    """Return what has mkdocstrings show each public name of a module."""
    return "\n\n".join(f"::: {module}.{name}" for name in import_module(module).__all__)


def without_outside(link: re.Match[str], folder: Path) -> str:
    """Return a link; of a link to a file that is no page, such as a test, its text and the file's path."""
    text, target = link.groups()
    path = (folder / target).resolve()
    if path.is_relative_to(ROOT / "docs"):
        return link[0]
    if not path.exists():
        raise FileNotFoundError(f"a page links to {path.relative_to(ROOT)}, which is not there")
    shown = str(path.relative_to(ROOT))
    return text if shown in text or "`" in text else f"{text} (`{shown}`)"
