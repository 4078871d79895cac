"""Dead letters on the command line: the options that choose them, and their tables, counts and details."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Annotated, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from typer import Option

from ..operations.dead_letters import DeadLetters
from ..operations.letters import MAX_PAGE, READ, Whereabouts, every_page
from ..operations.replaying import Bulk
from ..rules.notations import parse_duration
from ..rules.policy import attempts_in_words
from ..store import Filter, Letter, Stats
from .commands import show_entries
from .finding import Place
from .printing import (
    Listing,
    answer,
    counted,
    error_in_words,
    listing,
    plain,
    progress_bar,
    table,
    time_of,
)

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGO = re.compile(r"(\d+)([smhdw])", re.ASCII)
#: How an option writes a time.
WHEN = "A time (ISO 8601; UTC if it has no zone), or how long ago: PT2H or 2h"
LATER = "A time (ISO 8601; UTC if it has no zone), or how long from now: PT2H or 2h"


@dataclass(frozen=True)
class Choice:
    """The options that choose dead letters or waiting jobs; without any, all of them."""

    queue: Annotated[str | None, Option(help="Only of this queue.")] = None
    type: Annotated[str | None, Option(help="Only of this job type, such as billing.*")] = None
    error_type: Annotated[str | None, Option(help="With a last error of this type, such as a.*")] = None
    text: Annotated[
        str | None, Option(help="With this text in the arguments or errors, or in the reason of a wait.")
    ] = None

    def where(self, now: datetime) -> Filter:
        """Return the filter as the library takes it; raises ValueError for a value that is no choice."""
        fields: Any = asdict(self)
        times = {name: time_from(name, fields[name], now) for name in ("since", "until") if name in fields}
        since, until = times.get("since"), times.get("until")
        if since and until and since >= until:
            raise ValueError(f"until: {fields['until']!r} must be later than since, {fields['since']!r}")
        return Filter(**{**fields, **times})

    def words(self) -> str:
        """Return the options as they are typed, with a space after each."""
        said = {name.replace("_", "-"): value for name, value in asdict(self).items() if value is not None}
        return "".join(f"--{name} {shlex.quote(value)} " for name, value in said.items())


@dataclass(frozen=True)
class LetterChoice(Choice):
    """The options that choose dead letters; without any, all of them."""

    since: Annotated[str | None, Option(help=f"That died at this time or later. {WHEN}.")] = None
    until: Annotated[str | None, Option(help="That died before this time, written as for --since.")] = None
    group: Annotated[
        str | None, Option(help="Only of this group: a fingerprint, as `groups` shows, or its beginning.")
    ] = None

    def of(self, place: Place) -> Filter:
        """Return the filter of now, with the whole fingerprint; raises ValueError and NotFound."""
        group = self.group and place.bridge.groups.id_of(self.group)
        return replace(self, group=group).where(place.bridge.engine.now())


def time_from(name: str, text: str | None, now: datetime) -> datetime | None:
    """Return the time in an option; raises ValueError."""
    return None if text is None else _time(name, text, now, -1, "ago")


def time_to(name: str, text: str, now: datetime) -> datetime:
    """Return the time in an option, in which a duration is one from now; raises ValueError."""
    return _time(name, text, now, 1, "from now")


def _time(name: str, text: str, now: datetime, sign: int, word: str) -> datetime:
    try:
        if text.startswith("P") or _AGO.fullmatch(text):
            return now + sign * _span(text)
        at = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
        return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{name}: {text!r} must be a time such as 2026-11-21T10:00:00Z, or how long {word}, as PT2H or 2h"
        ) from None


def time_after(name: str, text: str, now: datetime) -> datetime:
    """Return the time that is so long after now; raises ValueError."""
    try:
        return now + _span(text)
    except (ValueError, OverflowError):
        raise ValueError(f"{name}: {text!r} must be a duration, as P7D or 2h") from None


def _span(text: str) -> timedelta:
    short = _AGO.fullmatch(text)
    return timedelta(**{_UNITS[short[2]]: int(short[1])}) if short else parse_duration(text)


def every(letters: DeadLetters, where: Filter) -> Iterator[Letter]:
    """Yield all dead letters of a filter, newest first."""
    for page in every_page(lambda cursor: letters.list(where, limit=MAX_PAGE, cursor=cursor)):
        yield from page.letters


def searched(letters: DeadLetters, where: Filter) -> Iterator[Letter]:
    """Yield all dead letters of a filter, the oldest first; a terminal shows how many have been looked at."""
    total = letters.stats(where, text=None).total
    with progress_bar("counting", total) as progress:
        for number, (page, _) in enumerate(letters.pages(where, None), 1):
            progress(min(number * READ, total))
            yield from page


def letter_count(number: int) -> str:
    """Return a number of dead letters in words."""
    return counted(number, "dead letter", "dead letters")


def letters_table(letters: Sequence[Letter]) -> Listing:
    """Return a table of dead letters."""
    headings = ("id", "died (UTC)", "type", "queue", "attempts", "error")
    return listing(headings, map(_row, letters), ("id", "died (UTC)", "type", "error"))


def _row(letter: Letter) -> tuple[object, ...]:
    attempts = attempts_in_words(letter.attempt, letter.max_attempts, "/")
    error = error_in_words(letter.errors)
    return (letter.id, letter.discarded_at, letter.type, letter.queue, attempts, error)


def show_letters(letters: Iterable[Letter], where: str = "", *, as_json: bool) -> None:
    """Answer with dead letters."""
    show_entries(letters, letters_table, f"no dead letters{where}", as_json=as_json)


def counts(stats: Stats) -> list[Any]:
    """Return the number of dead letters, and tables of their kinds, the most frequent first."""
    span = f", from {time_of(stats.oldest_at)} to {time_of(stats.newest_at)} UTC" if stats.total else ""
    by = {"queue": stats.by_queue, "type": stats.by_type, "error type": stats.by_error_type}
    most = {name: sorted(each.items(), key=lambda row: -row[1]) for name, each in by.items() if each}
    tables = [table((name, "letters"), rows) for name, rows in most.items()]
    return [f"{letter_count(stats.total)}{span}", *tables]


def show_matched(stats: Stats, *more: RenderableType, as_json: bool) -> None:
    """Answer with the letters that a change would reach, and in words with more."""
    answer(_json_of(Bulk(stats.total, confirmed=False)), *counts(stats), *more, as_json=as_json)


def _json_of(bulk: Bulk) -> dict[str, Any]:
    return {**asdict(bulk), "errors": [{"id": letter_id, "error": why} for letter_id, why in bulk.errors]}


def facts_table(facts: Iterable[tuple[str, object]]) -> Table:
    """Return a table of names and values."""
    made = Table.grid(padding=(0, 2))
    for name, value in facts:
        made.add_row(Text(name.replace("_", " "), style="bold"), Text(plain(value)))
    return made


def details(letter: Letter) -> Iterator[RenderableType]:
    """Yield a letter's facts, its arguments, its policy and its history with backtraces."""
    yield facts_table(_facts(letter))
    yield from _history(letter.errors)


def whereabouts(job: Whereabouts) -> Iterator[RenderableType]:
    """Yield where a job is, its attempts and its history."""
    if isinstance(job.entry, Letter):
        yield from details(job.entry)
        return
    parked = job.entry
    facts = {
        "id": parked.id,
        "type": parked.type,
        "queue": parked.queue,
        "framework": parked.framework,
        "state": job.state,
        "parked": f"{time_of(parked.parked_at)} UTC",
        "due": f"{time_of(parked.next_retry_at)} UTC",
        "reason": parked.reason,
        "next attempt": attempts_in_words(parked.attempt, parked.max_attempts),
    }
    yield facts_table(facts.items())
    yield from _history(parked.errors)


def _history(errors: Iterable[Mapping[str, Any]]) -> Iterator[RenderableType]:
    replay = 0
    for error in errors:
        yield ""
        if error.get("replay", 0) != replay:
            replay = error.get("replay", 0)
            yield Text(plain(f"replay {replay}"), style="bold")
        yield from _error(error)


def _facts(letter: Letter) -> Iterator[tuple[str, object]]:
    reading = letter.reading
    yield "id", letter.id
    yield "type", letter.type
    yield "queue", letter.queue
    yield "framework", letter.framework
    yield "attempts", attempts_in_words(letter.attempt, letter.max_attempts)
    yield "cause", letter.cause
    yield "reason", letter.reason
    yield "enqueued", f"{time_of(letter.created_at)} UTC" if letter.created_at else "unknown"
    yield "died", f"{time_of(letter.discarded_at)} UTC"
    yield "replayed", counted(letter.replay_count, "time", "times") if letter.replay_count else "never"
    if reading.args is None:
        yield "arguments", reading.note or "unknown"
    else:
        yield "args", reading.args
        yield "kwargs", reading.kwargs
    if reading.meta:
        yield "meta", reading.meta
    yield "policy", letter.policy or "unknown"
    if letter.retry:
        yield "of which its own", letter.retry


def _error(error: Any) -> Iterator[RenderableType]:
    code = f" ({error['code']})" if error.get("code") else ""
    head = f"attempt {error.get('attempt')}  {error.get('timestamp', '')}  {error.get('type')}{code}"
    yield Text(plain(head), style="bold")
    yield Text(f"  {plain(error.get('message') or '')}")
    if error.get("details"):
        yield Text(f"  {plain(error['details'])}")
    for line in _lines(error.get("backtrace")):
        yield Text(f"    {plain(line)}", style="dim")


def _lines(backtrace: Any) -> Iterator[str]:
    """Yield the lines of a backtrace; an imported letter may hold anything in its place."""
    frames = backtrace if isinstance(backtrace, list) else [] if backtrace is None else [backtrace]
    for frame in frames:
        yield from str(frame).splitlines()
