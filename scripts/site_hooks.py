"""Hooks of MkDocs: they make what comes from the code, and the links that leave the site."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from pictures import DIAGRAM, is_drawn, picture_of, title_of
from site_pages import MADE

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([\w./-]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's text as it is built."""
    markdown = MADE.sub(
        lambda place: names_of(place["module"]) if place["module"] else inside(place[0]), markdown
    )
    folder = (ROOT / "docs" / page.file.src_uri).parent
    markdown = DIAGRAM.sub(lambda diagram: picture(diagram[1], folder), markdown)
    if "<!--" in markdown:
        raise ValueError(f"{page.file.src_uri}: a place is not filled")
    return LINK.sub(lambda link: without_outside(link, folder), markdown)


def inside(part: str) -> str:
    """Return a made part without the comments around it."""
    return "\n".join(part.splitlines()[1:-1])


def names_of(module: str) -> str:
    """Return what has mkdocstrings show each public name of a module."""
    return "\n\n".join(f"::: {module}.{name}" for name in import_module(module).__all__)


def picture(source: str, folder: Path) -> str:
    """Return a diagram's picture: the site has no script that draws it."""
    if not is_drawn(source):
        raise FileNotFoundError(f"a diagram is not drawn yet, run scripts/pictures.py: {title_of(source)}")
    return f"![{title_of(source)}]({os.path.relpath(picture_of(source), folder)})"


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
