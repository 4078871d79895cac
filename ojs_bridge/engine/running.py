"""A process tells which jobs it runs, and for how long, so that an operator sees what hangs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any
from uuid import uuid4

from ..rules.job import format_time, parse_time
from ..store import Document, Documents, Reservation, readable
from .runs import Run

#: The kind of the documents, after what time a process begins a new one, and for how long they are read.
KIND, RENEWED, READ_FOR = "running", timedelta(minutes=10), timedelta(hours=1)
#: A process tells so often, in seconds: while a job runs for longer than a moment, and else.
SOON, SELDOM = 5.0, 30.0
#: What was told longer ago is not known any more.
FRESH = timedelta(seconds=90)
#: The most jobs that are told, the longest first, and the most characters of an id or a type.
MOST, CUT = 20, 200
_PAGE = 500


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that a process runs since a time."""

    id: str
    type: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Told:
    """What a process has told: its name and its parent's, how many jobs it runs, and the longest of them."""

    name: str
    parent: str
    count: int
    jobs: tuple[RunningJob, ...]

    def __add__(self, other: Told) -> Told:
        """Return what two processes of a worker run."""
        jobs = sorted((*self.jobs, *other.jobs), key=lambda job: job.since)
        return replace(self, count=self.count + other.count, jobs=tuple(jobs[:MOST]))


class Runs:
    """The runs that have begun in this process and go on: those whose reservations it `holds`.

    `noted` has some more, until the thread looks that tells of them; `starts` is called before the first one.
    """

    def __init__(self, holds: Callable[[Reservation], bool]) -> None:
        self._holds = holds
        self.noted: dict[Reservation, Run] = {}
        self.starts: Callable[[], object] = bool

    def now(self) -> Sequence[Run]:
        """Return the runs that go on, and forget the others."""
        for reservation in tuple(self.noted):
            if not self._holds(reservation):
                self.noted.pop(reservation, None)
        return tuple(self.noted.values())


class Running:
    """Tells the store what this process runs; it costs a job nothing.

    `runs` returns the runs that have begun here, and have not ended.
    """

    def __init__(self, documents: Documents, runs: Callable[[], Iterable[Run]]) -> None:
        self._documents, self._runs = documents, runs
        self._document: Document | None = None
        self._told, self._due = 0, 0.0

    def write(self, now: datetime) -> None:
        """Write what runs, if that is due; raises StoreError. A process that runs nothing says so once."""
        here, runs = time.monotonic(), sorted(self._runs(), key=lambda run: run.since)
        if here < self._due or not (runs or self._told):
            return
        host = socket.gethostname()
        body: dict[str, Any] = {
            "name": f"{host}:{os.getpid()}",
            # A worker may tell that it lives by its parent, and run jobs in its children.
            "parent": f"{host}:{os.getppid()}",
            "told_at": format_time(now),
            "count": len(runs),
            "jobs": [[_cut(run.job.id), _cut(run.job.type), _began(run, now, here)] for run in runs[:MOST]],
        }
        document = Document(KIND, uuid4().hex, now, body)
        if self._document is not None and now - self._document.at <= RENEWED:
            document = replace(self._document, body=body, revision=self._document.revision + 1)
        # After a lost answer it begins a new one.
        self._document = document if self._documents.write(document) else None
        # It is asked every few seconds, and not at the same moments.
        is_long = bool(runs) and here - runs[0].since >= SOON
        self._told, self._due = len(runs), here + (SOON if is_long else SELDOM) - 1


def _began(run: Run, now: datetime, here: float) -> str:
    return format_time(run.began or now - timedelta(seconds=here - run.since))


def _cut(text: str) -> str:
    return text if len(text) <= CUT else f"{text[: CUT - 1]}…"


def running_in(documents: Documents, now: datetime) -> Sequence[Told]:
    """Return what processes have told lately; raises StoreError."""
    found: dict[str, Told | None] = {}
    cursor: str | None = None
    while True:
        page = documents.list(KIND, limit=_PAGE, cursor=cursor)
        lately = [*takewhile(lambda document: document.at > now - READ_FOR, page.documents)]
        for told, is_fresh in readable(lately, lambda document: _told_of(document, now)):
            # The newest document of a process has all that it runs.
            found.setdefault(told.name, told if is_fresh else None)
        cursor = page.next_cursor
        if cursor is None or len(lately) < len(page.documents):
            return [one for one in found.values() if one is not None]


def _told_of(document: Document, now: datetime) -> tuple[Told, bool]:
    """Return what a process has told, and whether that is not too long ago."""
    body = document.body
    told_at, jobs = parse_time(body["told_at"]), tuple(readable(body["jobs"], _job_of))
    count = max(int(body.get("count", 0)), len(jobs))
    if told_at < now - 2 * timedelta(seconds=SOON):
        # One that had just begun has ended since, as far as anybody knows.
        jobs = tuple(job for job in jobs if (told_at - job.since).total_seconds() >= SOON)
    told = Told(str(body["name"]), str(body.get("parent", "")), count, jobs)
    return told, told_at > now - FRESH


def _job_of(told: Sequence[Any]) -> RunningJob:
    id_, type_, since, *_ = told
    return RunningJob(str(id_), str(type_), parse_time(since))


def by_worker(told: Iterable[Told], workers: Collection[str]) -> dict[str, Told]:
    """Return what each of some workers runs, by its name: what it has told, and what its children have."""
    found: dict[str, Told] = {}
    for one in told:
        owner = one.name if one.name in workers else one.parent
        if owner in workers:
            found[owner] = found[owner] + one if owner in found else one
    return found
