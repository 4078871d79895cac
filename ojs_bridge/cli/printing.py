"""How commands answer: tables for people, lines of JSON for pipes; everything else goes to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

#: Where nobody's screen is too narrow, a line of a table stays one line.
_UNBOUNDED = 1000


def show(*renderables: RenderableType) -> None:
    """Write to stdout."""
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(file=sys.stdout, width=None if narrow else _UNBOUNDED, highlight=False)
    for renderable in renderables:
        console.print(Text(renderable) if isinstance(renderable, str) else renderable)


def show_json(value: Mapping[str, Any]) -> None:
    """Write one line of JSON to stdout."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")


def say(line: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(plain(line) + "\n")


def show_on_stderr(renderable: RenderableType) -> None:
    """Write to stderr what somebody is to read before they answer."""
    Console(file=sys.stderr, highlight=False).print(renderable)


def plain(value: object) -> str:
    """Return a text that changes nothing on a terminal but what it says: control characters are escaped."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def time_of(at: datetime | None) -> str:
    """Return a time in UTC as tables show it."""
    return "" if at is None else at.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> Table:
    """Return a table; its first column, by which things are named, is never cut or wrapped."""
    made = Table(box=SIMPLE, title=title, title_justify="left", pad_edge=False)
    for place, heading in enumerate(headings):
        made.add_column(heading, no_wrap=place == 0, overflow="fold")
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def _cell(value: object) -> Text:
    return Text(plain(value), justify="right" if isinstance(value, int) else None)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield what is called with how many are done; the bar is on stderr, and only on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)
