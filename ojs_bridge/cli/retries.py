"""`ojs-bridge retries`: the retries that wait in the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, TypeAlias

from typer import Argument, Option

from ..operations.operation import Action
from ..operations.parked_retries import Drained
from ..rules.policy import attempts_told
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
from .operations import carry_out
from .printing import (
    Listing,
    brief_ids,
    brief_time_of,
    brief_type,
    counted,
    error_told,
    progress_bar,
    say,
    show,
    show_json,
    table,
    time_of,
)

group = group_of("retries", "The retries that wait in the store until they are due.")


@dataclass(frozen=True)
class Filter:
    """The options that choose parked retries; without any, all of them."""

    queue: Annotated[str | None, Option(help="Only of this queue.")] = None
    type: Annotated[str | None, Option(help="Only of this job type, such as billing.*")] = None
    error_type: Annotated[str | None, Option(help="With a last error of this type, such as a.*")] = None
    text: Annotated[str | None, Option(help="With this text in the arguments, errors or reason.")] = None


SomeIds: TypeAlias = Annotated[list[str] | None, Argument(metavar="[ID...]", help=f"A job's id, {ID_HELP}")]
Every: TypeAlias = Annotated[bool, Option("--all", help="All that the filters choose, or all there are.")]


@command(group, "list")
def list_(
    place: Place,
    chosen: Filter,
    limit: Limit = 50,
    cursor: Cursor = None,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """List parked retries, the next one due first; if there are more, a cursor goes to stderr."""
    read = partial(place.bridge.retries.list, **asdict(chosen))
    pages = listed(read, limit, cursor, everything=everything)
    _show((parked for page in pages for parked in page.retries), as_json=as_json)


@command(group, "run", changes=True)
def run(
    place: Place,
    chosen: Filter,
    ids: SomeIds = None,
    everything: Every = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int | None:
    """Have parked retries published now, by the fleet's workers; asks for all that the filters choose."""
    if _by_filter("run", ids, chosen, everything=everything):
        return _do_all(place, "run", chosen, yes=yes, as_json=as_json)
    retries = place.bridge.retries
    return each(whole(ids or (), retries.id_of), retries.run, "due", as_json=as_json)


@command(group, "cancel", changes=True)
def cancel(
    place: Place,
    chosen: Filter,
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
    found = [*found_of(retries.get, ids)]
    if found:
        ask(f"Cancel {_told(len(found))} in {place}?", _table(found), yes=yes)
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
        ask(f"Publish {_told(number)} of {place} now, as delayed messages?", yes=yes)
    with progress_bar("draining", number) as progress:
        drained = retries.drain(tasks or (), progress=progress)
    if as_json:
        failed = [{"id": job_id, "error": why} for job_id, why in drained.failed.items()]
        others = dict(drained.others)
        show_json({"published": drained.published, "failed": failed, "held": drained.held, "others": others})
    else:
        _show_drained(drained)
    return INCOMPLETE if drained.failed or drained.held else None


def _by_filter(name: str, ids: list[str] | None, chosen: Filter, *, everything: bool) -> bool:
    """Return whether the filters choose; raises ValueError for options that do not go together."""
    if bool(ids) == everything:
        raise ValueError(f"{name}: say which: ids, or --all with options such as --queue and --type")
    if ids and chosen != Filter():
        raise ValueError(f"{name}: the options that say which go with --all, not with ids")
    return everything


def _do_all(place: Place, action: Action, chosen: Filter, *, yes: bool, as_json: bool) -> int | None:
    operations, kind = place.bridge.operations, asdict(chosen)
    number = operations.count(action, **kind)
    if number:
        ask(f"{action.capitalize()} {_told(number)} in {place}?", yes=yes)
    return carry_out(place, operations.begin(action, **kind), as_json=as_json)


def _show(retries: Iterable[Parked], *, as_json: bool) -> None:
    show_entries(retries, _table, "no parked retries", as_json=as_json)


def _table(retries: Sequence[Parked]) -> Listing:
    ids = brief_ids([parked.id for parked in retries])
    return Listing(
        table(("id", "due (UTC)", "type", "queue", "attempts", "reason", "error"), map(_row, retries)),
        table(("id", "due (UTC)", "type", "error"), map(_brief_row, ids, retries)),
    )


def _row(parked: Parked) -> tuple[object, ...]:
    attempts, due = attempts_told(parked.attempts, parked.max_attempts, "/"), time_of(parked.next_retry_at)
    return (parked.id, due, parked.type, parked.queue, attempts, parked.reason, _error(parked))


def _brief_row(brief_id: str, parked: Parked) -> tuple[object, ...]:
    due = brief_time_of(parked.next_retry_at)
    return (brief_id, due, brief_type(parked.type), _error(parked) or parked.reason)


def _error(parked: Parked) -> str:
    return error_told(parked.state.get("errors", ()))


def _show_drained(drained: Drained) -> None:
    show(f"{_told(drained.published)} published")
    if drained.failed:
        show(table(("id", "why it stays"), drained.failed.items()))
    if drained.held:
        say(
            f"staying: {_told(drained.held)} that others publish at this moment, or that "
            "workers which still run have parked again; stop those, and drain again in a minute"
        )
    for framework, number in drained.others.items():
        say(f"staying: {_told(number)} of {framework}; drain with an app of its own, --app MODULE:APP")


def _told(number: int) -> str:
    return counted(number, "retry", "retries")
