"""The report of an incident: what died of which error, how many jobs it hurt, and who did what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ..engine.context import Context
from ..rules.job import format_time
from ..rules.words import counted, cut
from ..store import Filter
from .audit import Audit, Mark, Marks, Record
from .group import ErrorGroup
from .groups import Groups
from .lately import DEATHS
from .letters import MAX_PAGE
from .rates import history

#: What is reported without a `since`.
REPORTED = timedelta(days=1)
#: The most errors and records that are reported, and the most characters of what a record is about.
MAX_ERRORS, MAX_RECORDS, MAX_SUBJECT = 50, 500, 200
#: The outcomes that are counted, with the words for them.
COUNTED = {
    "completed": "runs succeeded",
    "retried": "runs failed and were retried",
    "died": "jobs died",
    "lost": "attempts were lost with their workers",
    "recovered": "jobs succeeded after a failure",
    "replay_completed": "replayed jobs succeeded",
    "replay_died": "replayed jobs died again",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What happened in a time: errors with their letters, the numbers of runs by type, marks and records.

    The numbers are those of whole minutes or hours. Letters that were deleted since are not among the errors.
    """

    since: datetime
    until: datetime
    counts: Mapping[str, Mapping[str, int]]
    errors: Sequence[ErrorGroup]
    marks: Sequence[Mark]
    records: Sequence[Record]

    @property
    def totals(self) -> Mapping[str, int]:
        """The numbers of all types."""
        totals = Counter[str](dict.fromkeys(COUNTED, 0))
        for counts in self.counts.values():
            totals.update(counts)
        return totals

    def to_ojs(self) -> dict[str, Any]:
        """Return the report in JSON."""
        return {
            "since": format_time(self.since),
            "until": format_time(self.until),
            "totals": {**self.totals},
            "by_type": {type_: {**counts} for type_, counts in self.counts.items()},
            "errors": [error.to_ojs() for error in self.errors],
            "marks": [mark.to_ojs() for mark in self.marks],
            "records": [record.to_ojs() for record in self.records],
        }

    def to_markdown(self) -> str:
        """Return the report as Markdown; times are in UTC."""
        lines = [
            f"# Incident report: {_day(self.since)} to {_day(self.until)} UTC",
            "",
            *(f"- {number:,} {COUNTED[name]}" for name, number in self.totals.items() if number),
        ]
        if not any(self.totals.values()):
            lines.append("No job ran.")
        lines += ["", "## What died", "", *self._died()]
        lines += ["", "## By job type", "", *self._types()] if self.counts else []
        lines += ["", "## What was done", "", *self._done()]
        return "\n".join(lines) + "\n"

    def _died(self) -> Iterator[str]:
        if not self.errors:
            yield "No dead letter of this time is there."
            return
        yield from _table("Letters", "Job type", "Error", "First", "Last", "State")
        for error in self.errors:
            group = error.group
            says = f"{error.error_type}: {cut(error.message)}" if error.message else error.error_type
            first, last = _day(group.first_at), _day(group.last_at)
            yield _row(f"{group.count:,}", ", ".join(group.types), says, first, last, error.state)

    def _types(self) -> Iterator[str]:
        names = ("died", "retried", "recovered", "completed", "replay_completed", "replay_died")
        yield from _table(
            *("Job type", "Died", "Retried", "Recovered", "Succeeded", "Replays succeeded", "Replays died")
        )
        for type_, counts in sorted(self.counts.items(), key=lambda one: -one[1].get("died", 0)):
            yield _row(type_, *(f"{counts.get(name, 0):,}" for name in names))

    def _done(self) -> Iterator[str]:
        done = [(mark.at, mark.by, f"mark {mark.text}", "", "") for mark in self.marks]
        done += [
            (one.at, one.who, one.action, _about(one), one.error or one.outcome)
            for one in self.records
            if one.action != "mark.add"
        ]
        if not done:
            yield "Nobody did anything."
            return
        yield from _table("At", "Who", "What", "On", "Outcome")
        for at, who, what, on, outcome in sorted(done):
            yield _row(f"{at:%Y-%m-%d %H:%M:%S}", who, what, on, outcome)


def report(
    context: Context, groups: Groups, since: datetime | None = None, until: datetime | None = None
) -> Report:
    """Return the report of a time: of the last day, or since a time of the last 14 days.

    Raises ValueError for a time that ends before it begins, ConfigurationError without a store, StoreError.
    """
    now = context.clock()
    until = min(until or now, now)
    since = since or until - REPORTED
    if since >= until:
        raise ValueError(f"since: {since} must be before until, {until}")
    times = Filter(since=since, until=until)
    return Report(
        since,
        until,
        _counts(context, times),
        groups.list(times, order="count", muted=True, limit=MAX_ERRORS, steps=1),
        [mark for mark in Marks(context).list(since=since, limit=MAX_PAGE) if mark.at < until],
        [*_records(Audit(context), since, until)],
    )


def _counts(context: Context, times: Filter) -> Mapping[str, Mapping[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for type_, outcomes in history(context, times).by_type.items():
        counts[type_] = Counter()
        for outcome, series in outcomes.items():
            name = "died" if outcome in DEATHS else outcome
            if name in COUNTED:
                counts[type_][name] += sum(series)
    return counts


def _records(audit: Audit, since: datetime, until: datetime) -> Iterator[Record]:
    """Yield the records of a time, the newest first, and no more than so many."""
    cursor, found = None, 0
    while found < MAX_RECORDS:
        page = audit.list(since=since, limit=MAX_PAGE, cursor=cursor)
        for record in page.records:
            if record.at < until and found < MAX_RECORDS:
                found += 1
                yield record
        cursor = page.next_cursor
        if cursor is None:
            return


def _about(record: Record) -> str:
    """Return what a record is about, in a few words."""
    words = [] if record.count is None else [counted(record.count, "job")]
    words += [
        f"{name} {_word(value)}" for name, value in record.subject.items() if value not in (None, [], {})
    ]
    words += [f"({record.reason})"] if record.reason else []
    text = ", ".join(words)
    return text if len(text) <= MAX_SUBJECT else f"{text[: MAX_SUBJECT - 1]}…"


def _word(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={inner}" for name, inner in value.items())
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _day(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M}"


def _table(*headings: str) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """Return a text of a job as one cell: none of it is Markdown or HTML, and no line of it ends the row."""
    visible = "".join(one if one.isprintable() else " " for one in text)
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", re.sub(r"\s+", " ", visible)).strip()
