"""The documents that a user reads, and the install lines in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from ojs_bridge.config.policies import tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
#: A line of a console, or code within a sentence, which may go on in the next line.
LINE = re.compile(
    r"^ *\$ (?:python3? -m )?pip install (?P<console>.+)$|`pip install (?P<inline>[^`]+)`", re.MULTILINE
)
BRIDGE = re.compile(r"(?:ojs-bridge|\.)\[(?P<extras>[\w,]+)\]")


def documents() -> Iterator[Path]:
    """Yield every document that a user reads."""
    yield ROOT / "README.md"
    for folder in ("docs", "examples"):
        yield from sorted((ROOT / folder).rglob("*.md"))


def install_lines(text: str) -> list[tuple[str, ...]]:
    """Return the words that follow each `pip install` in a document."""
    found = (match["console"] or match["inline"] for match in LINE.finditer(text))
    return [tuple(shlex.split(line, comments=True)) for line in found]


def documented() -> list[tuple[str, ...]]:
    """Return every install line of the documents once, and each set of extras that stands without a line."""
    texts = [path.read_text("utf-8") for path in documents()]
    lines = [line for text in texts for line in install_lines(text)]
    named = {word for line in lines for word in line}
    alone = [(match[0],) for text in texts for match in BRIDGE.finditer(text) if match[0] not in named]
    return list(dict.fromkeys([*lines, *alone]))


def extras_of(line: tuple[str, ...]) -> set[str]:
    """Return the extras that a line asks for, with those that an extra brings along."""
    named = {
        extra for word in line for match in BRIDGE.finditer(word) for extra in match["extras"].split(",")
    }
    brought = {word for extra in named for word in EXTRAS[extra] if word.startswith("ojs-bridge[")}
    return named | extras_of(tuple(brought)) if brought else named
