"""Hooks of MkDocs: they make what comes from the code, and the links that leave the site."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: A link to a file of the repository that is no page, such as a test or an example.
OUTSIDE = re.compile(
    r"(?<!!)\[([^\]]+)\]\((?:\.\./)+((?:tests|examples|benchmarks|scripts|ojs_bridge)\b[^)]*)\)"
)
#: The place for the public names of a module.
NAMES = re.compile(r"^<!-- names of ([\w.]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page's text as it is built."""
    markdown = NAMES.sub(lambda place: names_of(place[1]), markdown)
    return OUTSIDE.sub(_in_the_repository, markdown)


def names_of(module: str) -> str:
    """Return what has mkdocstrings show each public name of a module."""
    return "\n\n".join(f"::: {module}.{name}" for name in import_module(module).__all__)


def _in_the_repository(link: re.Match[str]) -> str:
    """Return a link's text with the file's path: the site has no copy of the repository."""
    text, path = link.groups()
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"a page links to {path}, which is not in the repository")
    return text if path.rstrip("/") in text or "`" in text else f"{text} (`{path}`)"
