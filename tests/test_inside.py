"""The page that says what the bridge does inside a process is true."""

from __future__ import annotations

import re
from pathlib import Path

from ojs_bridge.celery.wire import dead_name
from ojs_bridge.messages import HEADER

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "explanation" / "inside.md").read_text("utf-8")
#: The start of a thread, with its name.
STARTS = re.compile(r"(?:(?:keep_going|Line)\(\s*|Thread\([^()]*name=)f?\"(ojs-[\w]+-?)", re.DOTALL)


def part(heading: str) -> str:
    """Return the text under a heading."""
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_every_thread_is_named() -> None:
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "ojs_bridge").rglob("*.py"))
    assert {name.strip("-") for name in STARTS.findall(code)} == set(
        re.findall(r"`(ojs-\w+)", part("Threads"))
    )


def test_what_is_added_has_its_name() -> None:
    assert f"the header `{HEADER}` on Celery" in part("What it adds to messages")
    assert f"`{dead_name('<queue>')}`" in part("What it declares in the broker")
