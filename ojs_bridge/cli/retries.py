"""`ojs-bridge retries`: the retries that wait in the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import typer

from ..errors import RetryNotFound
from ..operations.letters import MAX_PAGE
from ..operations.parked_retries import ParkedRetries
from ..spec.policy import attempts_told
from ..store import Parked
from .answers import each
from .asking import ask
from .drained import show_drained, told
from .finding import Place
from .operation import command
from .options import All, AsJson, Cursor, DryRun, Ids, Limit, Yes
from .printing import Rows, progress_bar, say, show, show_json, table, time_of

group = typer.Typer(
    name="retries", help="The retries that wait in the store until they are due.", no_args_is_help=True
)


@command(group, "list")
def list_(
    place: Place,
    queue: Annotated[str | None, typer.Option("--queue", help="Of this queue.")] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Of this job type, such as billing.*")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """List parked retries, the next one due first; the cursor of the next page goes to stderr."""
    retries = place.bridge.retries
    if everything:
        _show(_every(retries, queue, type_), as_json=as_json)
        return
    page = retries.list(queue=queue, type=type_, limit=limit, cursor=cursor)
    _show(page.retries, as_json=as_json)
    if page.next_cursor:
        say(f"there may be more: --cursor {page.next_cursor}")


@command(group, "run")
def run(place: Place, ids: Ids, as_json: AsJson = False) -> int | None:
    """Have parked retries published now, by the fleet's workers."""
    return each(ids, place.bridge.retries.run, "due", as_json=as_json)


@command(group, "cancel")
def cancel(place: Place, ids: Ids, yes: Yes = False, as_json: AsJson = False) -> int | None:
    """Delete parked retries: their jobs never run again; asks."""
    retries = place.bridge.retries
    found = [*_found(retries, ids)]
    if found:
        ask(f"Cancel {told(len(found))} in {place}?", _table(found), yes=yes)
    return each(ids, retries.cancel, "cancelled", as_json=as_json)


@command(group, "drain")
def drain(
    place: Place,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="PATTERN", help="Only of job types such as billing.*; repeatable."),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int | None:
    """Before a roll-back: publish parked retries now, delayed by their framework until they are due; asks.

    Workers without the bridge go on with them at their time. What Celery delays on Redis for longer than the
    visibility timeout is delivered twice. Those that arrive meanwhile are published too; what cannot be
    published stays and is told.
    """
    retries = place.publishing_bridge.retries
    if dry_run:
        _show(retries.drainable(tasks or ()), as_json=as_json)
        return None
    number = sum(1 for _ in retries.drainable(tasks or ()))
    if number:
        ask(f"Publish {told(number)} of {place} now, as delayed messages?", yes=yes)
    with progress_bar("draining", number) as progress:
        drained = retries.drain(tasks or (), progress=progress)
    return show_drained(drained, as_json=as_json)


def _show(retries: Iterable[Parked], *, as_json: bool) -> None:
    if as_json:
        for parked in retries:
            show_json(parked.to_ojs())
        return
    found = [*retries]
    show(_table(found) if found else "no parked retries")


def _table(retries: Iterable[Parked]) -> Rows:
    headings = ("id", "type", "queue", "attempts", "due (UTC)", "reason")
    rows = (
        (
            x.id,
            x.type,
            x.queue,
            attempts_told(x.attempts, x.max_attempts, "/"),
            time_of(x.next_retry_at),
            x.reason,
        )
        for x in retries
    )
    return table(headings, rows)


def _every(retries: ParkedRetries, queue: str | None, type_: str | None) -> Iterator[Parked]:
    cursor = None
    while True:
        page = retries.list(queue=queue, type=type_, limit=MAX_PAGE, cursor=cursor)
        yield from page.retries
        cursor = page.next_cursor
        if cursor is None:
            return


def _found(retries: ParkedRetries, ids: Iterable[str]) -> Iterator[Parked]:
    for job_id in ids:
        try:
            yield retries.get(job_id)
        except RetryNotFound:
            continue
