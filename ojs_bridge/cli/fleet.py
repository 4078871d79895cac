"""`ojs-bridge health`, `audit` (who did what) and `mark` (moments such as deploys)."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

from typer import Argument, Option

from ..operations.audit import Record
from ..operations.health import SECONDS
from .commands import INCOMPLETE, OUT_OF_REACH, AsJson, Cursor, Limit
from .finding import Place
from .letters import WHEN, time_from
from .printing import answer, say, show, show_json, table, time_of


def health(
    *,
    place: Place,
    timeout: Annotated[float, Option(min=0.1, help="The seconds to wait for answers.")] = SECONDS,
    as_json: AsJson = False,
) -> int | None:
    """Tell whether store and, with --app, broker answer, workers were seen lately, and no retry is overdue.

    Exit codes: 0 all is well; 1 no worker was seen lately, or a retry is overdue; 3 the store or the broker
    is away.
    """
    found = place.bridge.health.check(timeout)
    rows = ((name, check.status, check.message) for name, check in found.checks.items())
    answer(found.to_ojs(), table(("", "status", ""), rows), as_json=as_json)
    return {"away": OUT_OF_REACH, "degraded": INCOMPLETE}.get(found.status)


def audit(
    *,
    place: Place,
    since: Annotated[str | None, Option(help=f"At this time or later. {WHEN}.")] = None,
    who: Annotated[
        str | None, Option(help="Only of this name, or of a pattern such as *@shop.example")
    ] = None,
    action: Annotated[str | None, Option(help="Only this action, or a pattern such as retry.*")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List who did what in the last 180 days, newest first; if there is more, a cursor goes to stderr."""
    after = time_from("since", since, place.bridge.engine.now())
    read = partial(place.bridge.audit.list, since=after, who=who, action=action)
    page = read(limit=limit, cursor=cursor)
    if as_json:
        for record in page.records:
            show_json(record.to_ojs())
    elif page.records:
        headings = ("at (UTC)", "who", "from", "action", "number", "outcome", "on", "reason")
        show(table(headings, map(_row, page.records)))
    else:
        show("no records")
    if page.next_cursor:
        say(f"there may be more: --cursor {page.next_cursor}")


def mark(
    *,
    place: Place,
    text: Annotated[str, Argument(help="The text of the mark, such as v42.")],
    at: Annotated[str | None, Option(help=f"For another time than now. {WHEN}.")] = None,
    as_json: AsJson = False,
) -> None:
    """Mark a moment, such as a deploy, on the charts of the page."""
    when = time_from("at", at, place.bridge.engine.now())
    made = place.bridge.marks.add(text, at=when)
    answer(made.to_ojs(), f"{made.text}: marked at {time_of(made.at)} UTC", as_json=as_json)


def _row(record: Record) -> tuple[object, ...]:
    place = f"{record.via} {record.address}".strip()
    number = "" if record.count is None else record.count
    outcome = f"{record.outcome}: {record.error}" if record.error else record.outcome
    return (
        time_of(record.at),
        record.who,
        place,
        record.action,
        number,
        outcome,
        _subject(record),
        record.reason,
    )


def _subject(record: Record) -> str:
    """Return the subject of a record in a few words."""
    told = {name: value for name, value in record.subject.items() if name != "id_count"}
    ids = told.pop("ids", [])
    if len(ids) < record.subject.get("id_count", 0):
        ids = [*ids, "…"]
    words = [*ids, *(f"{name} {_word(value)}" for name, value in told.items())]
    return ", ".join(words)


def _word(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={inner}" for name, inner in value.items()) or "all"
    return value if isinstance(value, str) else json.dumps(value)
