"""`ojs-bridge dead-letters export` and `import`: from one store to another, through a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..operations.letters import loaded
from .answers import told
from .asking import ask
from .dead_letters import group
from .finding import Place
from .kinds import Which
from .operation import command
from .options import AsJson, Yes
from .printing import progress_bar, show, show_json

_PIPE = "-"


@command(group, "export")
def export(
    place: Place,
    which: Which,
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="Where to; - is stdout.")] = _PIPE,
) -> None:
    """Write dead letters as JSON lines that import reads, the oldest first, messages and all.

    With --app the app's redaction hides what it hides everywhere, and the lines cannot be imported.
    """
    letters, kind = place.bridge.dead_letters, which.kind_until(place.bridge.engine.now())
    if file == _PIPE:
        for line in letters.export(**kind):
            sys.stdout.write(line + "\n")
        return
    total = letters.purge(**kind).matched
    with Path(file).open("w", encoding="utf-8") as written, progress_bar("exporting", total) as progress:
        for done, line in enumerate(letters.export(**kind), 1):
            written.write(line + "\n")
            progress(done)


@command(group, "import")
def import_(
    place: Place,
    file: Annotated[str, typer.Argument(metavar="FILE", help="What export has written; - is stdin.")],
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Take dead letters from what export has written; one of the same id is replaced; asks.

    All or nothing: where a line is damaged, it is named.
    """
    bridge = place.bridge if place.has_app else place.bridge_with(None, new=True)
    lines = _lines(file)
    ask(f"Put {told(_checked(lines))} into {place}?", yes=yes)
    with Console(file=sys.stderr).status("importing"):
        taken = bridge.dead_letters.load(lines)
    if as_json:
        show_json({"imported": taken})
    else:
        show(f"{told(taken)} imported")


def _checked(lines: Sequence[str]) -> int:
    """Return how many dead letters some lines hold; raises ValueError, before anybody is asked."""
    return sum(1 for _ in (loaded(number, line) for number, line in enumerate(lines, 1) if line.strip()))


def _lines(file: str) -> list[str]:
    """Return the lines of a file; raises OSError, and ValueError for what is no text."""
    try:
        text = sys.stdin.read() if file == _PIPE else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"file: {file!r} is not UTF-8") from None
    # Not splitlines(), which also ends lines where JSON does not.
    return text.split("\n")
