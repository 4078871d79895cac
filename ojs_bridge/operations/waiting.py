"""What waits in the store, as an operator sees and steers it: list, get, run now, move, cancel, drain."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import islice
from typing import Any

from typing_extensions import Unpack

from ..engine.context import Context
from ..engine.scheduler import CLAIM, UNPARK
from ..engine.storing import cancel
from ..errors import JobNotFound, Unreachable
from ..rules.decision import later
from ..rules.job import format_time
from ..rules.notations import check_pattern, matches
from ..store import EVERYTHING, Fields, Filter, Kind, Parked, ParkedJobs, ParkedPage, from_ms, to_ms
from .audit import Audit, uninterrupted
from .letters import (
    LOOK_THROUGH,
    MAX_PAGE,
    READ,
    every_page,
    is_among,
    only_id,
    page_size,
    pages_of_ids,
    said,
    without_group,
)
from .rates import InBroker, due_in_broker, in_broker
from .replaying import Bulk

#: What falls due is counted in the smallest of these steps of which so many are enough.
STEPS, MOST_STEPS = (timedelta(minutes=1), timedelta(minutes=15), timedelta(hours=2), timedelta(days=1)), 100
#: The kinds that fall due. A held job waits for the end of its hold.
FALLS_DUE: Sequence[Kind] = ("retry", "scheduled")
#: So many jobs are changed between two looks at the progress.
LOT = 100
#: What a job is called by its kind; without one it is any job that waits.
WORDS: Mapping[Kind | None, tuple[str, str]] = {
    "retry": ("parked retry", "parked retries"),
    "scheduled": ("scheduled job", "scheduled jobs"),
    "held": ("held job", "held jobs"),
    None: ("waiting job", "waiting jobs"),
}


def word_of(parked: Parked) -> str:
    """Return what a job is called; another version may have kinds that this one does not know."""
    return WORDS.get(parked.kind, WORDS[None])[0]


@dataclass(frozen=True, slots=True)
class Ahead:
    """How many jobs of each kind fall due in each `step` of time, from `since` on.

    `late` are due before. None stands for what is not known: SQL looks at 50,000 jobs at most.
    """

    since: datetime
    step: timedelta
    late: int | None
    by_kind: Mapping[Kind, Sequence[int | None]]

    @property
    def is_whole(self) -> bool:
        """Whether all of it is known."""
        return self.late is not None and all(None not in counts for counts in self.by_kind.values())

    def to_ojs(self) -> dict[str, Any]:
        """Return it in JSON."""
        by_kind = {kind: [*counts] for kind, counts in self.by_kind.items()}
        span = {"since": format_time(self.since), "step_seconds": self.step.total_seconds()}
        return {**span, "late": self.late, "by_kind": by_kind}


class Waiting:
    """The jobs of a bridge that wait in the store: parked retries, scheduled jobs, held jobs, or all.

    Every method raises ConfigurationError when the bridge has no store.
    """

    def __init__(self, context: Context, kind: Kind | None = None) -> None:
        self._context = context
        self._kind = kind
        self._audit = Audit(context)

    def list(
        self,
        where: Filter = EVERYTHING,
        *,
        limit: int = 50,
        cursor: str | None = None,
        **fields: Unpack[Fields],
    ) -> ParkedPage:
        """Return a page of the jobs of a filter, the next one due first; its times are of the parking.

        For anything but a queue, a type and a kind, a page searches 2,000 jobs: it may have few, or none, and
        still a cursor. Raises ValueError for a limit outside 1 to 1000, for a cursor that no page has
        returned, for a time without a zone, for a group, and for a kind that is not of this view.
        """
        where, size = self._where(replace(where, **fields)), page_size(limit)
        step, looked, chosen = min(size, READ), 0, list[Parked]()
        while True:
            page = self._parked.list(where, limit=step, cursor=cursor)
            chosen += self._chosen(page, where)
            cursor, looked = page.next_cursor, looked + step
            if cursor is None or len(chosen) + step > size or looked >= LOOK_THROUGH:
                return ParkedPage(tuple(map(self._shown, chosen)), cursor)

    def get(self, job_id: str) -> Parked:
        """Return a job that waits; raises JobNotFound."""
        return self._shown(self._get(job_id))

    def find(self, job_id: str) -> Parked | None:
        """Return a job that waits, or None."""
        parked = self._stored(job_id)
        return None if parked is None else self._shown(parked)

    def id_of(self, text: str) -> str:
        """Return the id of a waiting job that is this text, or the only one that begins with it."""
        return text if self._stored(text) else only_id(text, self._parked.ids_beginning)

    @uninterrupted()
    def run(self, job_id: str) -> None:
        """Make a job due now: a worker publishes it; raises JobNotFound."""
        self._move("waiting.run", job_id, self._context.clock())

    @uninterrupted()
    def move(self, job_id: str, at: datetime) -> None:
        """Make a job due at another time; one in the past is now.

        Raises ValueError for what is no time with a zone, or too late, and JobNotFound.
        """
        due = due_from(at)
        self._move("waiting.move", job_id, due, at=format_time(due))

    def _move(self, action: str, job_id: str, due: datetime, **subject: object) -> None:
        parked = self._get(job_id)
        with self._audit.recording(action, ids=[job_id], **subject):
            if not self._parked.reschedule(parked, max(due, self._context.clock())):
                raise _gone(parked)

    @uninterrupted()
    def cancel(self, job_id: str) -> None:
        """Delete a job: it never runs again; raises JobNotFound."""
        parked = self._get(job_id)
        with self._audit.recording("waiting.cancel", ids=[job_id]):
            if not self._change(parked, None):
                raise _gone(parked)

    def drain(
        self, tasks: Sequence[str] = (), *, progress: Callable[[int], object] = lambda _: None
    ) -> Drained:
        """Publish all that waits now, delayed by its framework until it is due: the store is not needed.

        That is every kind, whatever this view shows. `tasks` are patterns of job types, such as `billing.*`;
        without them all jobs are published. Those that are parked meanwhile are published, too.
        `progress` is called with the number published so far. Raises StoreError and Unreachable, and
        ValueError for an invalid pattern.
        """
        _check(tasks)
        with self._audit.recording("waiting.drain", tasks=[*tasks]) as entry:
            entry.add(0)

            def note(published: int) -> None:
                entry.count = published
                progress(published)

            return Draining(self._context, tasks, note).run()

    def drainable(self, tasks: Sequence[str] = ()) -> Iterator[Parked]:
        """Return the jobs that `drain` would publish, in the order of their time; raises as `drain`."""
        _check(tasks)
        return map(self._shown, Draining(self._context, tasks).jobs())

    def count(self, where: Filter = EVERYTHING, **fields: Unpack[Fields]) -> int:
        """Count the jobs of a filter; for anything but a queue, a type and a kind it reads them all."""
        where = self._where(replace(where, **fields))
        if where.is_plain:
            return self._parked.count(where)
        return sum(len(page) for page, _ in self.pages(where, None))

    def in_broker(self, where: Filter = EVERYTHING, **fields: Unpack[Fields]) -> InBroker | None:
        """Count the retries that are no part of the list: they are due soon, and wait in the broker.

        None for a filter of more than a queue, a type and a kind: only the broker has their arguments.
        """
        where = self._where(replace(where, **fields))
        if where.kind in ("scheduled", "held"):
            return InBroker()
        documents = self._context.store_for("waiting jobs").documents
        return in_broker(documents, self._context.clock(), where) if where.is_plain else None

    def due(
        self,
        within: timedelta = timedelta(hours=1),
        *,
        queue: str | None = None,
        type: str | None = None,  # noqa: A002 - the spec's word
        kind: Kind | None = None,
    ) -> Ahead:
        """Count what falls due within some time from now, retries in the broker with it; it reads no job.

        Raises ValueError for held jobs, which wait for the end of their hold, and for a time that is not
        between a minute and a hundred days.
        """
        if not STEPS[0] <= within <= STEPS[-1] * MOST_STEPS:
            raise ValueError(f"within: {within} must be between a minute and 100 days")
        where = self._where(Filter(queue, type, kind=kind))
        if where.kind == "held":
            raise ValueError("kind: 'held': held jobs fall due when their hold ends")
        step = next(one for one in STEPS if within <= one * MOST_STEPS)
        now, steps = self._context.clock(), -(-within // step)
        since = from_ms(to_ms(now) // (ms := step // timedelta(milliseconds=1)) * ms)
        known, found = self._parked.due(where, since, step, steps)
        by_kind: dict[Kind, list[int | None]] = {
            each: [*found.get(each, (0,) * known), *(None,) * (steps + 1 - known)]
            for each in FALLS_DUE
            if where.kind in (None, each)
        }
        if retries := by_kind.get("retry"):
            documents = self._context.store_for("waiting jobs").documents
            for at, count in due_in_broker(documents, now, where).items():
                place = (at - since) // step + 1
                if place <= steps and (there := retries[place]) is not None:
                    retries[place] = there + count
        late = [counts.pop(0) or 0 for counts in by_kind.values()]
        return Ahead(since, step, sum(late) if known else None, by_kind)

    def pages(self, where: Filter, cursor: str | None) -> Iterator[tuple[Sequence[Parked], str | None]]:
        """Yield pages of jobs as they are stored, the next due first, each with the cursor after it."""
        where = self._where(where)
        for page in every_page(lambda at: self._parked.list(where, limit=READ, cursor=at or cursor)):
            yield self._chosen(page, where), page.next_cursor

    def pages_of_ids(
        self, ids: Sequence[str], cursor: str | None
    ) -> Iterator[tuple[Sequence[Parked], str | None]]:
        """Yield the jobs of some ids as they are stored, each page with the cursor after it."""
        return pages_of_ids(self._stored, ids, cursor)

    def change_pages(
        self, pages: Iterable[Sequence[Parked]], due: datetime | None, progress: Callable[[Bulk], object]
    ) -> None:
        """Make pages of jobs due at a time, or cancel them where it is None.

        `progress` is called with the outcome so far.
        """
        done = Bulk(0)
        for lot in (page[at : at + LOT] for page in pages for at in range(0, len(page), LOT)):
            with uninterrupted():
                wrong = [(it.id, str(_gone(it))) for it in lot if not self._change(it, due)]
                done = done.plus(len(lot), wrong)
                progress(done)

    def _change(self, parked: Parked, due: datetime | None) -> bool:
        if due is not None:
            now = self._context.clock()
            is_there = max(parked.next_retry_at, now) == max(due, now)
            return is_there or self._parked.reschedule(parked, due)
        return cancel(self._context, parked)

    def _where(self, where: Filter) -> Filter:
        """Return a filter of the kind of this view; raises ValueError for a group, or another kind."""
        if self._kind and where.kind not in (None, self._kind):
            raise ValueError(f"kind: {where.kind!r}: these are {WORDS[self._kind][1]}")
        return without_group(replace(where, kind=self._kind or where.kind))

    def _chosen(self, page: ParkedPage, where: Filter) -> Sequence[Parked]:
        """Return the jobs of a page that a filter chooses; the store knows only queue, type and kind."""
        return [
            parked
            for parked in page.jobs
            if is_among(parked, parked.parked_at, where)
            and (where.text is None or where.text.casefold() in said(self._shown(parked)))
        ]

    def _stored(self, job_id: str) -> Parked | None:
        return self._parked.get(job_id, self._kind)

    def _get(self, job_id: str) -> Parked:
        parked = self._stored(job_id)
        if parked is None:
            raise JobNotFound(f"there is no {WORDS[self._kind][0]} {job_id!r}")
        return parked

    def _shown(self, parked: Parked) -> Parked:
        """Return the redacted job."""
        if not self._context.redactor:
            return parked
        message, secrets = self._context.redactor.message(parked.message)
        state, reason = secrets.out_of(parked.state), secrets.out_of(parked.reason)
        return replace(parked, message=message, state=state, reason=reason)

    @property
    def _parked(self) -> ParkedJobs:
        return self._context.store_for("waiting jobs").parked


def _check(tasks: Sequence[str]) -> None:
    for pattern in tasks:
        check_pattern("tasks", pattern)


def _gone(parked: Parked) -> JobNotFound:
    return JobNotFound(f"{word_of(parked)} {parked.id!r} is being published, or is gone")


def due_from(at: datetime, field: str = "at") -> datetime:
    """Return a time that a user names, in whole milliseconds; raises ValueError that names the field."""
    if not (isinstance(at, datetime) and at.tzinfo):
        raise ValueError(f"{field}: {at!r} must be a time with a zone")
    try:
        return later(at.astimezone(timezone.utc), 0)
    except OverflowError:
        raise ValueError(f"{field}: {at} must be in the years 1 to 9999 of UTC") from None


@dataclass(frozen=True, slots=True)
class Drained:
    """The outcome of a drain: the number of jobs that were published, and the jobs that stay.

    `failed` has the errors by job id. `held` counts jobs that another process is publishing, or that workers
    have parked again. `others` counts jobs by framework, where this process has no app of the framework.
    """

    published: int
    failed: Mapping[str, str]
    held: int
    others: Mapping[str, int]


class Draining:
    """A drain of the jobs whose types match one of the patterns `tasks`, or of all jobs."""

    def __init__(
        self, context: Context, tasks: Sequence[str], progress: Callable[[int], object] = lambda _: None
    ) -> None:
        self._context, self._publishers = context, context.publishers
        self._parked = context.store_for("waiting jobs").parked
        self._tasks, self._progress = tasks or ("*",), progress
        self._tried: set[tuple[str, int]] = set()
        self._failed: dict[str, str] = {}
        self._published = 0

    def jobs(self) -> Iterator[Parked]:
        """Return the jobs that would be published, the next one due first; raises StoreError."""
        return (parked for parked in self._matching() if parked.framework in self._publishers)

    def run(self) -> Drained:
        """Publish in passes, until a pass can claim no job; raises StoreError, Unreachable.

        Each job is tried once: workers that park it again must not keep the drain running.
        """
        while sum(map(self._publish, self._lots())):
            pass
        held, others = 0, Counter[str]()
        for parked in self._matching():
            if parked.framework not in self._publishers:
                others[parked.framework] += 1
            elif parked.id not in self._failed:
                held += 1
        return Drained(self._published, self._failed, held, others)

    def _matching(self) -> Iterator[Parked]:
        """Yield the jobs that match, of every framework."""
        read = partial(self._parked.list, EVERYTHING, limit=MAX_PAGE)
        for page in every_page(lambda cursor: read(cursor=cursor)):
            yield from (p for p in page.jobs if any(matches(p.type, pattern) for pattern in self._tasks))

    def _lots(self) -> Iterator[Sequence[str]]:
        """Yield the keys of the jobs that were not tried."""
        keys = (parked.key for parked in self.jobs() if self._is_new(parked))
        while lot := [*islice(keys, UNPARK)]:
            yield lot

    @uninterrupted()
    def _publish(self, keys: Sequence[str]) -> int:
        """Publish the jobs of some keys that can be claimed; return their number."""
        now, ends = self._context.clock(), time.monotonic() + CLAIM.total_seconds() / 2
        due = self._parked.claim(keys, now=now, until=now + CLAIM)
        published: list[Parked] = []
        try:
            for parked in due.retries:
                # After the end of the claim another process may publish the same jobs.
                if time.monotonic() < ends and self._is_new(parked) and self._publish_one(parked):
                    published.append(parked)
        finally:
            self._let_go(due.retries, published, due.claim)
        return len(due.retries)

    def _publish_one(self, parked: Parked) -> bool:
        at = parked.next_retry_at
        state = {**parked.state, "next_retry_at": format_time(at)}
        try:
            self._publishers[parked.framework].publish(parked, state, due=at)
        except Unreachable:
            raise
        except Exception as error:  # noqa: BLE001 - one bad job must not stop the others
            self._failed[parked.id] = str(error) or repr(error)
            return False
        finally:
            self._tried.add((parked.key, parked.fence))
        return True

    def _let_go(self, claimed: Sequence[Parked], published: Sequence[Parked], claim: str) -> None:
        rest = [parked for parked in claimed if parked not in published]
        if published:
            self._context.storage_retry.run(self._parked.unpark, published, claim)
            self._published += len(published)
            self._progress(self._published)
        if rest:
            self._parked.unclaim(rest, claim)

    def _is_new(self, parked: Parked) -> bool:
        return (parked.key, parked.fence) not in self._tried
