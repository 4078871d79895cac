"""`ojs-bridge dead-letters`: list, show, stats, delete, purge, prune."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated

import typer

from ..errors import ConfigurationError, LetterNotFound
from ..operations.dead_letters import DeadLetters
from ..operations.retention import Retention
from ..store import Letter
from .answers import counts, each, letters_table, show_bulk, show_letters, show_matched, told
from .asking import ask
from .details import details
from .finding import Place
from .kinds import Which, count, every
from .operation import command
from .options import All, AsJson, Cursor, DryRun, Ids, Limit, Yes
from .printing import progress_bar, say, show, show_json

group = typer.Typer(
    name="dead-letters",
    help="Search, replay and delete dead letters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@command(group, "list")
def list_(
    place: Place,
    which: Which,
    limit: Limit = 50,
    cursor: Cursor = None,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """List dead letters, newest first; the cursor of the next page goes to stderr."""
    letters, kind = place.bridge.dead_letters, which.kind(place.bridge.engine.now())
    if everything:
        show_letters(every(letters, kind), place.in_namespace, as_json=as_json)
        return
    page = letters.list(limit=limit, cursor=cursor, **kind)
    show_letters(page.letters, place.in_namespace, as_json=as_json)
    if page.next_cursor:
        say(f"there may be more: --cursor {page.next_cursor}")


@command(group, "show")
def show_one(
    place: Place,
    letter_id: Annotated[str, typer.Argument(metavar="ID", help="Its job's id.")],
    as_json: AsJson = False,
) -> None:
    """Show all there is of a dead letter: arguments, history with backtraces, reason, policy."""
    letter = place.bridge.dead_letters.get(letter_id)
    if as_json:
        show_json(letter.to_ojs())
    else:
        show(*details(letter))


@command(group, "stats")
def stats(place: Place, as_json: AsJson = False) -> None:
    """Count dead letters by queue, job type and error type; with --app also say how long they are kept."""
    found = place.bridge.dead_letters.stats()
    if not place.has_app:
        # Only the app knows its retention: this bridge has the default one, which would be no answer.
        found = replace(found, retention={})
    if as_json:
        show_json(found.to_ojs())
        return
    show(*counts(found))
    show(*(f"{name.replace('_', ' ')}: {value}" for name, value in found.retention.items()))


@command(group, "delete")
def delete(place: Place, ids: Ids, yes: Yes = False, as_json: AsJson = False) -> int | None:
    """Delete dead letters by their ids; asks."""
    letters = place.bridge.dead_letters
    found = [*found_of(letters, ids)]
    if found:
        ask(f"Delete {told(len(found))} from {place}?", letters_table(found), yes=yes)
    return each(ids, letters.delete, "deleted", as_json=as_json)


@command(group, "purge")
def purge(
    place: Place,
    which: Which,
    everything: Annotated[bool, typer.Option("--all", help="All there are.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int | None:
    """Delete all dead letters of a kind; asks."""
    if which == Which() and not everything:
        raise ValueError("purge: say which: options such as --queue and --type, or --all")
    letters, kind = place.bridge.dead_letters, which.kind_until(place.bridge.engine.now())
    matched = count(every(letters, kind))
    if dry_run:
        show_matched(matched, "deleted", as_json=as_json)
        return None
    if matched.total:
        ask(f"Delete {told(matched.total)} from {place}?", *counts(matched), yes=yes)
    with progress_bar("deleting", matched.total) as progress:
        done = letters.purge(confirm=True, progress=progress, **kind)
    return show_bulk(done, "deleted", as_json=as_json)


@command(group, "prune")
def prune(
    place: Place,
    max_age: Annotated[
        str | None, typer.Option("--max-age", help="Delete what is older, such as P180D; without --app.")
    ] = None,
    max_count: Annotated[
        int | None, typer.Option("--max-count", help="Keep so many, the newest; without --app.")
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete what exceeds the app's retention, or the limits given; asks. Workers do so by themselves."""
    own = _limits(place, max_age, max_count)
    bridge = place.bridge if own is None else place.bridge_with(own)
    excess = _excess(place, bridge.dead_letters.retention)
    if excess:
        ask(f"Delete {told(excess)}, the oldest, from {place}?", yes=yes)
    pruned = bridge.dead_letters.prune()
    if as_json:
        show_json({"pruned": pruned})
    else:
        show(f"{told(pruned)} pruned")


def found_of(letters: DeadLetters, ids: Iterable[str]) -> Iterator[Letter]:
    """Yield the dead letters of some ids that there are."""
    for letter_id in ids:
        try:
            yield letters.get(letter_id)
        except LetterNotFound:
            continue


def _limits(place: Place, max_age: str | None, max_count: int | None) -> Retention | None:
    """Return the limits given, None for the app's own; raises ConfigurationError unless it is one of them."""
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
    """Return how many letters exceed a retention."""
    now, excess = place.bridge.engine.now(), 0
    for where, limits in retention.rules():
        old = place.kept.count(replace(where, until=now - limits.age))
        excess += max(old, place.kept.count(where) - limits.max_count)
    return excess
