"""Output: answers on stdout, as tables or as lines of JSON; files; everything else on stderr."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from rich.box import SIMPLE, Box
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

#: The columns of a page of text that are easy to read.
_PAGE = 80
#: Columns without a screen: a row of a table stays on one line.
_UNBOUNDED = 1000
#: The characters of a name or a message that are enough to know it by.
_READABLE = 20


class _Terminal(Console):
    """The only way to a terminal. It escapes what is not printable, so that the terminal does not obey it.

    A producer chooses the ids of jobs, their errors and arguments.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the pieces of what is printed; only a line's end stays."""
        for text, style, control in super().render(renderable, options):
            is_plain = control or text.isprintable()
            yield Segment(text if is_plain else "\n".join(map(plain, text.split("\n"))), style, control)


def show(*renderables: RenderableType) -> None:
    """Write to stdout, each text as one line; no line of it ends in spaces."""
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = _Terminal(file=sys.stdout, width=None if narrow else _UNBOUNDED, highlight=False)
    with console.capture() as written:
        for renderable in renderables:
            whole = isinstance(renderable, Text) and bool(renderable.no_wrap)
            made = Text(plain(renderable)) if isinstance(renderable, str) else renderable
            console.print(made, soft_wrap=whole)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in written.get().split("\n")[:-1])


def page_width() -> int:
    """Return the columns of a page of text: those of a screen, 80 at most; of a pipe COLUMNS, or else 80."""
    columns = shutil.get_terminal_size((_PAGE, 1)).columns
    return min(columns, _PAGE) if sys.stdout.isatty() else columns


def show_json(value: Mapping[str, Any]) -> None:
    """Write one line of JSON to stdout."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")


def answer(value: Mapping[str, Any], *words: RenderableType, as_json: bool) -> None:
    """Answer with a line of JSON, or in words."""
    if as_json:
        show_json(value)
    else:
        show(*words)


def say(line: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(plain(line) + "\n")


def show_on_stderr(renderable: RenderableType) -> None:
    """Write to stderr, for the operator to read before an answer."""
    _Terminal(file=sys.stderr, highlight=False).print(renderable)


def plain(value: object) -> str:
    """Return a text in which control characters are escaped, so that a terminal does not obey them."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, one: str, many: str) -> str:
    """Return a number of things in words."""
    return f"1 {one}" if number == 1 else f"{number:,} {many}"


def time_of(at: datetime | None) -> str:
    """Return a time in UTC as tables show it."""
    return "" if at is None else at.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


@dataclass(frozen=True)
class Rows:
    """A table; on a narrow screen each row is a block instead, its first cell above the others."""

    headings: Sequence[str]
    cells: Sequence[Sequence[Text]]
    justify: JustifyMethod = "left"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.width(console, options) <= options.max_width:
            yield self.as_table()
        else:
            yield from map(self._by_itself, self.cells)

    def width(self, console: Console, options: ConsoleOptions) -> int:
        """Return the width of the whole table."""
        return Measurement.get(console, options.update_width(_UNBOUNDED), self.as_table()).maximum

    def as_table(self, *, box: Box | None = SIMPLE) -> Table:
        """Return the table of rich, each row of which has one line."""
        columns = (Column(heading, no_wrap=True, justify=self.justify) for heading in self.headings)
        made = Table(*columns, box=box, pad_edge=False)
        for row in self.cells:
            made.add_row(*row)
        return made

    def _by_itself(self, row: Sequence[Text]) -> RenderableType:
        rest = (
            Text.assemble((heading, "dim"), " ", cell.plain)
            for heading, cell in zip(self.headings[1:], row[1:], strict=True)
            if cell.plain
        )
        return Group(Text(row[0].plain, overflow="fold"), Padding(Text("  ").join(rest), (0, 0, 0, 2)))


@dataclass(frozen=True)
class Listing:
    """A table in which each row has one line: the last two columns are cut for a narrow screen.

    A screen on which the last column would be too narrow gets the `brief` rows in place of the `whole` ones.
    """

    whole: Rows
    brief: Rows
    headed: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = replace(self.whole, cells=[[*row[:-1], row[-1][:_READABLE]] for row in self.whole.cells])
        rows = self.whole if least.width(console, options) <= options.max_width else self.brief
        made = rows.as_table(box=None)
        made.show_header = self.headed
        # rich narrows the columns that may wrap, the widest first; their cells do not wrap.
        for column in made.columns[-2:]:
            column.no_wrap = False
        for cell in (cell for row in rows.cells for cell in row[-2:]):
            cell.no_wrap, cell.overflow = True, "ellipsis"
        yield made


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Rows:
    """Return a table; the first cell of each row is its name."""
    return Rows(headings, [[*map(_cell, row)] for row in rows])


def _cell(value: object) -> Text:
    if isinstance(value, int):
        return Text(f"{value:,}", justify="right")
    return Text(time_of(value) if isinstance(value, datetime) else plain(value))


def listing(headings: Sequence[str], rows: Iterable[Sequence[object]], brief: Sequence[str]) -> Listing:
    """Return a table of rows; a screen that is too narrow has the `brief` columns alone.

    There ids have the beginnings that tell them apart, of eight characters at least, and types their ends.
    """
    cells = [dict(zip(headings, row, strict=True)) for row in rows]
    ids, size = {str(row.get("id")) for row in cells}, 8
    while len({one[:size] for one in ids}) < len(ids):
        size += 1

    def cut(heading: str, value: object) -> object:
        if isinstance(value, datetime):
            return brief_time_of(value)
        text = str(value)
        if heading.startswith("type") and len(text) > _READABLE:
            return f"…{text[1 - _READABLE :]}"
        return text[:size] if heading == "id" else value

    shown = ([cut(name, row[name]) for name in brief] for row in cells)
    return Listing(table(headings, ([*row.values()] for row in cells)), table(brief, shown))


def brief_time_of(at: datetime | None) -> str:
    """Return a time in UTC without its year and its seconds."""
    return time_of(at)[5:16]


def error_in_words(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return the type and the message of the last error; an imported entry may hold anything."""
    if not errors:
        return ""
    return f"{plain(errors[-1].get('type') or 'Unknown')}: {plain(errors[-1].get('message') or '')}"


@contextmanager
def replaced(file: str) -> Iterator[TextIO]:
    """Yield a new file, which takes the place of a file at the end; an error leaves that one as it was.

    It has the arguments of jobs, and is for its owner alone.
    """
    path = Path(file)
    if path.exists() and not path.is_file():
        # A device or a pipe cannot be replaced, and a folder is an error.
        with path.open("w", encoding="utf-8") as written:
            yield written
        return
    whole = path.resolve()
    partial = whole.with_name(f".{whole.name}.{os.getpid()}.part")
    try:
        opener = functools.partial(os.open, mode=0o600)
        with open(partial, "w", encoding="utf-8", opener=opener) as written:
            yield written
        partial.replace(whole)
    except OSError as error:
        error.filename = file  # not the name that the file has meanwhile
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number done; the bar is on stderr, and only on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = _Terminal(file=sys.stderr)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def live() -> Iterator[Callable[[RenderableType], None]]:
    """Yield a function that shows something in place of what it showed before; in a pipe, after it."""
    if not sys.stdout.isatty():

        def after(renderable: RenderableType) -> None:
            show(renderable)
            sys.stdout.flush()

        yield after
        return
    with Live(console=_Terminal(file=sys.stdout, highlight=False), screen=True, auto_refresh=False) as shown:
        yield lambda renderable: shown.update(renderable, refresh=True)
