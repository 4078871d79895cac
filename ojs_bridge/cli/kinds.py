"""Which dead letters a command is about, and what it tells of them before it touches them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Annotated

import typer

from ..operations.dead_letters import DeadLetters
from ..operations.letters import MAX_PAGE, Kind
from ..spec.duration import parse_duration
from ..store import Letter, Stats

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGO = re.compile(r"(\d+)([smhdw])", re.ASCII)
_WHEN = "A time (ISO 8601; UTC if it has no zone), or how long ago: PT2H or 2h"


@dataclass(frozen=True)
class Which:
    """The options that say which dead letters; without any, all of them."""

    queue: Annotated[str | None, typer.Option("--queue", help="Of this queue.")] = None
    type: Annotated[str | None, typer.Option("--type", help="Of this job type, such as billing.*")] = None
    error_type: Annotated[
        str | None, typer.Option("--error-type", help="Whose last error is of this type, such as a.*")
    ] = None
    since: Annotated[str | None, typer.Option("--since", help=f"Dead since. {_WHEN}.")] = None
    until: Annotated[str | None, typer.Option("--until", help="Dead before. Written as --since.")] = None
    text: Annotated[
        str | None, typer.Option("--text", help="With this text in arguments or error messages.")
    ] = None

    def kind(self, now: datetime) -> Kind:
        """Return it as the library takes it; raises ValueError for a time that is none."""
        return Kind(
            queue=self.queue,
            type=self.type,
            error_type=self.error_type,
            since=None if self.since is None else moment("since", self.since, now),
            until=None if self.until is None else moment("until", self.until, now),
            text=self.text,
        )

    def kind_until(self, now: datetime) -> Kind:
        """Return it without what dies from now on, so that what was shown is what is touched."""
        kind = self.kind(now)
        until, end = kind["until"], now + timedelta(milliseconds=1)
        return Kind(**{**kind, "until": end if until is None else min(until, end)})


def moment(name: str, text: str, now: datetime) -> datetime:
    """Return the time that a text stands for; raises ValueError."""
    try:
        if ago := _AGO.fullmatch(text):
            return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        if text.startswith("P"):
            return now - parse_duration(text)
        at = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
        return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{name}: {text!r} must be a time such as 2026-11-21T10:00:00Z, or how long ago, as PT2H or 2h"
        ) from None


def every(letters: DeadLetters, kind: Kind) -> Iterator[Letter]:
    """Yield all dead letters of a kind, newest first."""
    cursor = None
    while True:
        page = letters.list(limit=MAX_PAGE, cursor=cursor, **kind)
        yield from page.letters
        cursor = page.next_cursor
        if cursor is None:
            return


def count(letters: Iterable[Letter]) -> Stats:
    """Return how many dead letters there are, and of what queues, types and error types."""
    found = [(x.queue, x.type, x.error_type, x.discarded_at) for x in letters]
    queues, types, errors = (Counter(str(row[place]) for row in found) for place in range(3))
    times = [row[3] for row in found]
    return Stats(len(found), queues, types, errors, min(times, default=None), max(times, default=None))
