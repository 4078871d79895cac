"""`ojs-bridge retries`: the retries that wait in the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, TypeAlias

from typer import Argument, Option

from ..operations.operation import Action
from ..operations.parked_retries import Drained
from ..rules.policy import attempts_in_words
from ..store import Parked
from .commands import (
    ID_HELP,
    INCOMPLETE,
    All,
    AsJson,
    Cursor,
    DryRun,
    Limit,
    Yes,
    ask,
    command,
    each,
    found_of,
    group_of,
    listed,
    show_entries,
    whole,
)
from .finding import Place
from .letters import Choice
from .operations import carry_out
from .printing import (
    Listing,
    brief_ids,
    brief_time_of,
    brief_type,
    counted,
    error_in_words,
    progress_bar,
    say,
    show,
    show_json,
    table,
    time_of,
)

group = group_of("retries", "The retries that wait in the store until they are due.")


SomeIds: TypeAlias = Annotated[list[str] | None, Argument(metavar="[ID...]", help=f"A job's id, {ID_HELP}")]
Every: TypeAlias = Annotated[bool, Option("--all", help="All that the filters choose, or all there are.")]


@command(group, "list")
def list_(
    place: Place,
    chosen: Choice,
    limit: Limit = 50,
    cursor: Cursor = None,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """List parked retries, the next one due first; if there are more, a cursor goes to stderr."""
    read = partial(place.bridge.retries.list, chosen.where(place.bridge.engine.now()))
    pages = listed(read, limit, cursor, everything=everything)
    _show((parked for page in pages for parked in page.retries), as_json=as_json)


@command(group, "run", changes=True)
def run(
    place: Place,
    chosen: Choice,
    ids: SomeIds = None,
    everything: Every = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int | None:
    """Let the fleet's workers publish parked retries now; asks for all that the filters choose."""
    if _by_filter("run", ids, chosen, everything=everything):
        return _do_all(place, "run", chosen, yes=yes, as_json=as_json)
    retries = place.bridge.retries
    return each(whole(ids or (), retries.id_of), retries.run, "due", as_json=as_json)


@command(group, "cancel", changes=True)
def cancel(
    place: Place,
    chosen: Choice,
    ids: SomeIds = None,
    everything: Every = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int | None:
    """Delete parked retries: their jobs never run again; asks."""
    if _by_filter("cancel", ids, chosen, everything=everything):
        return _do_all(place, "cancel", chosen, yes=yes, as_json=as_json)
    retries = place.bridge.retries
    ids = whole(ids or (), retries.id_of)
    parked = [*found_of(retries.get, ids)]
    if parked:
        ask(f"Cancel {retry_count(len(parked))} in {place}?", _table(parked), yes=yes)
    return each(ids, retries.cancel, "cancelled", as_json=as_json)


@command(group, "drain", changes=True)
def drain(
    place: Place,
    tasks: Annotated[
        list[str] | None,
        Option("--task", metavar="PATTERN", help="Only of job types such as billing.*; repeatable."),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int | None:
    """Before a roll-back: publish parked retries now, delayed by their framework until they are due; asks.

    Workers without the bridge run them when they are due. A retry that Celery delays on Redis for longer than
    the visibility timeout is delivered twice. Retries that are parked meanwhile are published, too. A retry
    that cannot be published stays, and is printed.
    """
    retries = place.publishing_bridge.retries
    if dry_run:
        _show(retries.drainable(tasks or ()), as_json=as_json)
        return None
    number = sum(1 for _ in retries.drainable(tasks or ()))
    if number:
        ask(f"Publish {retry_count(number)} of {place} now, as delayed messages?", yes=yes)
    with progress_bar("draining", number) as progress:
        drained = retries.drain(tasks or (), progress=progress)
    if as_json:
        failed = [{"id": job_id, "error": why} for job_id, why in drained.failed.items()]
        others = dict(drained.others)
        show_json({"published": drained.published, "failed": failed, "held": drained.held, "others": others})
    else:
        _show_drained(drained)
    return INCOMPLETE if drained.failed or drained.held else None


def _by_filter(name: str, ids: list[str] | None, chosen: Choice, *, everything: bool) -> bool:
    """Return whether the filters choose; raises ValueError for options that do not go together."""
    if bool(ids) == everything:
        raise ValueError(f"{name}: say which: ids, or --all with options such as --queue and --type")
    if ids and chosen != Choice():
        raise ValueError(f"{name}: the options that say which go with --all, not with ids")
    return everything


def _do_all(place: Place, action: Action, chosen: Choice, *, yes: bool, as_json: bool) -> int | None:
    operations, where = place.bridge.operations, chosen.where(place.bridge.engine.now())
    number = operations.count(action, where)
    if number:
        ask(f"{action.capitalize()} {retry_count(number)} in {place}?", yes=yes)
    return carry_out(place, operations.begin(action, where), as_json=as_json)


def _show(retries: Iterable[Parked], *, as_json: bool) -> None:
    show_entries(retries, _table, "no parked retries", as_json=as_json)


def _table(retries: Sequence[Parked]) -> Listing:
    ids = brief_ids([parked.id for parked in retries])
    return Listing(
        table(("id", "due (UTC)", "type", "queue", "attempt", "reason", "error"), map(_row, retries)),
        table(("id", "due (UTC)", "type", "error"), map(_brief_row, ids, retries)),
    )


def _row(parked: Parked) -> tuple[object, ...]:
    attempt = attempts_in_words(parked.attempt, parked.max_attempts, "/")
    due = time_of(parked.next_retry_at)
    return (parked.id, due, parked.type, parked.queue, attempt, parked.reason, _error(parked))


def _brief_row(brief_id: str, parked: Parked) -> tuple[object, ...]:
    due = brief_time_of(parked.next_retry_at)
    return (brief_id, due, brief_type(parked.type), _error(parked) or parked.reason)


def _error(parked: Parked) -> str:
    return error_in_words(parked.state.get("errors", ()))


def _show_drained(drained: Drained) -> None:
    show(f"{retry_count(drained.published)} published")
    if drained.failed:
        show(table(("id", "why it stays"), drained.failed.items()))
    if drained.held:
        say(
            f"staying: {retry_count(drained.held)} that others publish at this moment, or that "
            "workers which still run have parked again; stop those, and drain again in a minute"
        )
    for framework, number in drained.others.items():
        say(f"staying: {retry_count(number)} of {framework}; drain with an app of its own, --app MODULE:APP")


def retry_count(number: int) -> str:
    return counted(number, "retry", "retries")
