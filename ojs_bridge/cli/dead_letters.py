"""`ojs-bridge dead-letters`: all its commands but `replay`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

from rich.text import Text
from typer import Argument, Option

from ..errors import ConfigurationError, StoreError
from ..operations.arguments import LETTERS
from ..operations.dead_letters import DeadLetters
from ..operations.letters import count, loaded_until, read_lines
from ..operations.retention import Retention
from ..store import Filter, Letter
from .commands import (
    ID_HELP,
    All,
    AsJson,
    Cursor,
    DryRun,
    Ids,
    Limit,
    Yes,
    ask,
    command,
    each,
    found_of,
    group_of,
    listed,
    whole,
)
from .finding import Place
from .letters import (
    LetterChoice,
    counts,
    details,
    every,
    letter_count,
    letters_table,
    searched,
    show_letters,
    show_matched,
)
from .operations import begin
from .printing import (
    answer,
    progress_bar,
    replaced,
    say,
    show,
    show_json,
    table,
)

group = group_of("dead-letters", "Search, replay and delete dead letters.")
#: Whether a deletion keeps nothing for an undo.
Forever: TypeAlias = Annotated[bool, Option("--forever", help="Keep nothing for an undo.")]
#: Stands for stdin or stdout in place of a file.
_PIPE = "-"
#: A letter comes so long after its death at most: a worker's clock may be late, and its store away.
_LATE = timedelta(seconds=60)
#: The letters of a look, the oldest first, by their ids and times: a job may die again.
Look: TypeAlias = dict[tuple[str, datetime], Letter]


@command(group, "list")
def list_(
    place: Place,
    chosen: LetterChoice,
    limit: Limit = 50,
    cursor: Cursor = None,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """List dead letters, newest first; if there are more, a cursor to go on with goes to stderr."""
    read = partial(place.bridge.dead_letters.list, chosen.of(place))
    pages = listed(read, limit, cursor, everything=everything)
    show_letters((x for page in pages for x in page.letters), place.in_namespace, as_json=as_json)


@command(group, "show")
def show_one(
    place: Place,
    letter_id: Annotated[str, Argument(metavar="ID", help=f"Its job's id, {ID_HELP}")],
    as_json: AsJson = False,
) -> None:
    """Show a dead letter: its arguments, its history with backtraces, its reason, its policy."""
    letters = place.bridge.dead_letters
    letter = letters.get(letters.id_of(letter_id))
    answer(letter.to_ojs(), *details(letter), as_json=as_json)


@command(group, "stats")
def stats(place: Place, chosen: LetterChoice, as_json: AsJson = False) -> None:
    """Count dead letters by queue, job type and error type; with --app, show the retention, too."""
    letters, where = place.bridge.dead_letters, chosen.of(place)
    numbers = letters.stats(where, text=None)
    if chosen.text:
        numbers = replace(count(searched(letters, where)), retention=numbers.retention)
    if not place.has_app:
        # Only the app knows its retention. This bridge was made for the command, and has the default one.
        numbers = replace(numbers, retention={})
    facts = {
        name.replace("_", " "): ", ".join(f"{key} {one}" for key, one in fact.items())
        if isinstance(fact, dict)
        else fact
        for name, fact in numbers.retention.items()
    }
    if full := numbers.retention.get("fullness"):
        rest = "all others" if len(full) > 1 else "all"
        shares = (f"{queue.replace('*', rest)} {share:.0%}" for queue, share in full.items())
        facts["fullness"] = f"{', '.join(shares)} of the most letters, when they were last pruned"
    kept = (f"{name}: {fact}" for name, fact in facts.items() if fact != "")
    answer(numbers.to_ojs(), *counts(numbers), *kept, as_json=as_json)


@command(group, "arguments")
def arguments(
    place: Place,
    chosen: LetterChoice,
    limit: Annotated[int, Option(min=1, help="The newest letters that are counted.")] = LETTERS,
    as_json: AsJson = False,
) -> None:
    """Tell which values the arguments have: whom a fault hurts. With --app, redacted ones are left out."""
    where = chosen.of(place)
    found = place.bridge.dead_letters.by_argument(where, limit=limit)
    rows = [
        (argument.name, count, "all" if argument.one_value else "", json.dumps(value))
        for argument in found.arguments
        for value, count in argument.values
    ]
    part = "" if found.counted == found.of else f", the newest of {found.of:,}"
    told = f"{letter_count(found.counted)} counted{part}"
    answer(found.to_ojs(), told, table(("argument", "letters", "", "value"), rows), as_json=as_json)


@command(group, "delete", changes=True)
def delete(
    place: Place, ids: Ids, forever: Forever = False, yes: Yes = False, as_json: AsJson = False
) -> int | None:
    """Delete dead letters by their ids; asks. For an hour `undo` brings them back."""
    letters = place.bridge.dead_letters
    ids = whole(ids, letters.id_of)
    chosen = [*found_of(letters.get, ids)]
    if chosen:
        ask(f"Delete {letter_count(len(chosen))} from {place}?", letters_table(chosen), yes=yes)
    code = each(ids, partial(letters.delete, forever=forever), "deleted", as_json=as_json)
    if not forever and code is None:
        say("within an hour: `ojs-bridge audit` has the id for `ojs-bridge undo`")
    return code


@command(group, "purge", changes=True)
def purge(
    place: Place,
    chosen: LetterChoice,
    everything: Annotated[bool, Option("--all", help="Delete all dead letters.")] = False,
    forever: Forever = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int | None:
    """Delete all dead letters that the filters choose; asks. For an hour `undo` brings them back."""
    if chosen == LetterChoice() and not everything:
        raise ValueError("purge: say which: options such as --queue and --type, or --all")
    letters, where = place.bridge.dead_letters, chosen.of(place)
    where = where.until_now(place.bridge.engine.now())
    matched = count(searched(letters, where))
    if dry_run:
        show_matched(matched, as_json=as_json)
        return None
    if matched.total:
        keep = f"To keep them first: ojs-bridge dead-letters export {chosen.words()}FILE, from the same store"
        ask(f"Delete {letter_count(matched.total)} from {place}?", *counts(matched), Text(keep), yes=yes)
    return begin(place, "purge", where, forever=forever, as_json=as_json)


@command(group, "prune", changes=True)
def prune(
    place: Place,
    max_age: Annotated[str | None, Option(help="Delete older letters, such as P180D; without --app.")] = None,
    max_count: Annotated[
        int | None, Option(help="Keep so many of the newest letters; without --app.")
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete letters beyond the app's retention, or beyond the limits given; asks. Workers do it, too."""
    own = _limits(place, max_age, max_count)
    bridge = place.bridge if own is None else place.bridge_with(own)
    excess = _excess(place, bridge.dead_letters.retention)
    if excess:
        ask(f"Delete {letter_count(excess)}, the oldest, from {place}?", yes=yes)
    pruned = bridge.dead_letters.prune()
    answer({"pruned": pruned}, f"{letter_count(pruned)} pruned", as_json=as_json)


def _limits(place: Place, max_age: str | None, max_count: int | None) -> Retention | None:
    """Return the given limits, None for the app's own; raises ConfigurationError for both or neither."""
    if place.has_app:
        if max_age is not None or max_count is not None:
            raise ConfigurationError("prune: the app has its own retention: leave the limits out")
        return None
    if max_age is None or max_count is None:
        raise ConfigurationError(
            "prune: only the app knows how long letters are kept: --app MODULE:APP, or both --max-age and "
            "--max-count"
        )
    return Retention(max_age, max_count)


def _excess(place: Place, retention: Retention) -> int:
    """Return the number of letters that exceed a retention."""
    engine, excess = place.bridge.engine, 0
    now, letters = engine.now(), engine.context.store_for("dead letters").letters
    for where, limits in retention.rules():
        old = letters.count(replace(where, until=now - limits.age))
        excess += max(old, letters.count(where) - limits.max_count)
    return excess


@command(group, "export")
def export(
    place: Place,
    chosen: LetterChoice,
    file: Annotated[str, Argument(metavar="[FILE]", help="The file to write; - is stdout.")] = _PIPE,
    raw: Annotated[bool, Option("--raw", help="Write what the app redacts, too; the audit says so.")] = False,
) -> None:
    """Write dead letters with their messages as lines of JSON, the oldest first, for import.

    A file has its lines when all are written: an export that fails leaves it as it was. With --app the app's
    redaction applies, unless you say --raw: redacted lines cannot be imported.
    """
    letters, where = place.bridge.dead_letters, chosen.of(place)
    where = where.until_now(place.bridge.engine.now())
    if place.bridge.engine.context.redactor and not raw:
        say("the app redacts its letters, and these lines cannot be imported: --raw writes them whole")
    lines = letters.export(where, raw=raw)
    if sys.stderr.isatty() and not (file == _PIPE and sys.stdout.isatty()):
        # To count letters with a text takes as long as to export them.
        lines = _counted(lines, None if chosen.text else letters.purge(where).matched)
    with nullcontext(sys.stdout) if file == _PIPE else replaced(file) as written:
        written.writelines(f"{line}\n" for line in lines)


def _counted(lines: Iterable[str], total: int | None) -> Iterator[str]:
    """Yield the lines, and show their number."""
    with progress_bar("exporting", total) as progress:
        for done, line in enumerate(lines, 1):
            yield line
            progress(done)


@command(group, "import", changes=True)
def import_(
    place: Place,
    file: Annotated[str, Argument(metavar="FILE", help="A file that export has written; - is stdin.")],
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Read dead letters from a file of export; a letter of the same id is replaced; asks.

    A damaged line is named, and then no letter is imported. An import that is stopped, or that the store
    refuses, says up to which line it came: import the file again to have all.
    """
    bridge = place.bridge if place.has_app else place.bridge_with(None, new=True)
    lines, done = read_lines(_lines(file)), 0
    ask(f"Put {letter_count(len(lines))} into {place}?", yes=yes)
    with progress_bar("importing", len(lines)) as show_progress:

        def progress(count: int) -> None:
            nonlocal done
            done = count
            show_progress(count)

        try:
            taken = bridge.dead_letters.put(lines, progress)
        except KeyboardInterrupt:
            say(f"the import was stopped: {loaded_until(lines, done)}")
            raise
    answer({"imported": taken}, f"{letter_count(taken)} imported", as_json=as_json)


def _lines(file: str) -> list[str]:
    """Return the lines of a file; raises OSError, and ValueError for a file that is no text."""
    try:
        text = sys.stdin.read() if file == _PIPE else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"file: {file!r} is not UTF-8") from None
    # splitlines() would also split at characters that JSON allows within a line.
    return text.split("\n")


@command(group, "watch")
def watch(
    place: Place,
    chosen: LetterChoice,
    seconds: Annotated[float, Option("--every", min=0.1, help="The seconds between two looks.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Print each new dead letter as it arrives, until Ctrl-C; with --since, those since then come first.

    A store that cannot be reached meanwhile is reported once, and asked again.
    """
    if chosen.until is not None:
        raise ValueError("watch: --until does not go with letters that are still to come")
    now = place.bridge.engine.now
    try:
        for letter in _arriving(place, chosen.of(place), now, seconds):
            if as_json:
                show_json(letter.to_ojs())
            else:
                show(replace(letters_table([letter]), headed=False))
            sys.stdout.flush()
    except KeyboardInterrupt:
        return


def _arriving(place: Place, where: Filter, now: Callable[[], datetime], seconds: float) -> Iterator[Letter]:
    """Yield the letters of a filter, each once, as they arrive; raises StoreError only for the first look."""
    letters, looked, since, away = place.bridge.dead_letters, now(), where.since, False
    seen = _look(letters, where, since or looked - _LATE)
    say(f"watching {place} for new dead letters, until Ctrl-C")
    if since is not None:
        yield from seen.values()
    while True:
        time.sleep(seconds)
        begun = now()
        try:
            newest = _look(letters, where, max(looked - _LATE, since or looked - _LATE))
        except StoreError as error:
            if not away:
                say(f"{error}; asking again every {seconds:g} s")
            away = True
            continue
        yield from (letter for key, letter in newest.items() if key not in seen)
        seen, looked, away = newest, begun, False


def _look(letters: DeadLetters, where: Filter, since: datetime) -> Look:
    newest = [*every(letters, replace(where, since=since))]
    return {(letter.id, letter.discarded_at): letter for letter in reversed(newest)}
