"""The holds of a fleet, as each process knows them, and the release of jobs that nothing holds any more."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Protocol

from ..errors import StoreError
from ..rules.decision import SnoozeUntil
from ..rules.dependencies import Dependencies
from ..rules.holds import ASK_AGAIN, Hold
from ..rules.job import Job
from ..store import (
    KEEP,
    Document,
    DocumentPage,
    Documents,
    Filter,
    Grant,
    Parked,
    Reservation,
    Settle,
    Store,
    next_of,
    readable,
)
from .scheduler import AHEAD, once_a_period
from .storage_retry import at_once
from .storing import job_of_parked
from .turns import KIND as TURNS
from .turns import Turns

logger = logging.getLogger("ojs_bridge")

#: The kind of the documents that are holds, and how the ids of operators' limits begin.
KIND, LIMIT = "hold", "limit:"
#: The time of the document of a hold that has no end: it is never old.
ON = datetime.max.replace(microsecond=0)
#: For how long a process trusts what it has read, and how long a thread waits for another one that reads, in
#: seconds.
FRESH, WAIT_SECONDS = 1.0, 5.0
#: For how long the store keeps a hold that has ended.
KEPT = timedelta(hours=1)
#: How often a worker looks for held jobs that nothing holds any more, and for how long it moves them before
#: it publishes what is due, in seconds; and for how long no other worker looks if this one dies.
RELEASE_SECONDS, GO_SECONDS, ALONE = 2.0, 0.25, timedelta(minutes=1)
#: How long after somebody has ended a hold it begins to look, and how long it looks for more: workers that
#: have read the holds before would hold a job again, or hold it still.
BEGINS, LOOKS_FOR = timedelta(seconds=2), timedelta(seconds=8)
#: How long a probe may take from the store to its worker, before another job is sent as one.
PROBE = timedelta(seconds=10)
#: For how long a job may have been on its way to the store when it was held.
PARKING = timedelta(seconds=5)
_PAGE = 500
#: How many held jobs are made due before it looks whether a hold has begun.
_GO = 25
_ANY_TIME = timedelta(days=3650)


class HoldDocuments(Protocol):
    """What holds need of the documents of a store, or of a process without one."""

    def get(self, kind: str, document_id: str) -> Document | None:
        """Return a document, or None."""

    def write(self, document: Document) -> bool:
        """Write a document; False when there is this revision, or a later one."""

    def list(self, kind: str, *, limit: int, cursor: str | None) -> DocumentPage:
        """Return a page, newest first."""


class HoldsOfBreakers(Protocol):
    """What the breakers of a process know of the holds that are theirs."""

    def lets_through(self, hold: Hold, job: Job) -> bool:
        """Return whether a job may run although a breaker is open, as a probe."""

    def have_read(self, documents: Sequence[Document]) -> None:
        """Take the holds that have been read."""


def hold_of(document: Document) -> Hold:
    """Return the hold in a document; raises ValueError and TypeError for what cannot be read."""
    return Hold.from_json({**document.body, "id": document.id})


def read(documents: HoldDocuments, breakers: HoldsOfBreakers | None = None) -> Sequence[Hold]:
    """Return the holds that are on, and those that have ended lately; raises StoreError."""
    page = documents.list(KIND, limit=_PAGE, cursor=None)
    if breakers:
        breakers.have_read(page.documents)
    return [*readable(page.documents, hold_of)]


def that_hold(holds: Iterable[Hold], job: Job, dependencies: Dependencies) -> Sequence[Hold]:
    """Return the holds that are about a job."""
    names = dependencies.names_of(job.type)
    return [hold for hold in holds if hold.covers(job.type, job.queue, names) and hold.holds(job)]


def write(documents: Documents, hold: Hold) -> None:
    """Write a hold in place of an earlier one of its id; raises StoreError."""
    at = hold.ended_at or hold.until or ON.replace(tzinfo=hold.since.tzinfo)
    while not documents.write(next_of(documents.get(KIND, hold.id), KIND, hold.id, at, hold.to_json())):
        pass


class KnownHolds:
    """The holds as this process knows them: it reads them when a job begins, at most once a second.

    The `breakers` let some jobs through as probes. A held job asks again after `most` at the latest.
    """

    def __init__(
        self,
        documents: HoldDocuments,
        clock: Callable[[], datetime],
        dependencies: Dependencies,
        breakers: HoldsOfBreakers | None = None,
        most: timedelta = ASK_AGAIN,
    ) -> None:
        self._documents, self._clock, self._most = documents, clock, most
        self._dependencies, self._breakers = dependencies, breakers
        #: The holds, and those of them about the jobs of a type and a queue: both change in one step.
        self._known: tuple[Sequence[Hold], dict[tuple[str, str], Sequence[Hold]]] = ((), {})
        #: The limits of operators by dependency; some may be over, and some hold all jobs.
        self.limits: Mapping[str | None, Hold] = {}
        self._due = 0.0
        self._reading = threading.Lock()

    def of(self, job: Job) -> Hold | None:
        """Return the hold of a job, if any; never raises.

        While the store is away, the holds are those that were read last.
        """
        self.refresh()
        kind, (known, by_kind) = (job.type, job.queue), self._known
        if (holds := by_kind.get(kind)) is None:
            names = self._dependencies.names_of(job.type)
            holds = by_kind[kind] = [hold for hold in known if hold.covers(*kind, names)]
        if not holds:
            return None
        now = self._clock()
        on = [hold for hold in holds if hold.is_on(now) and hold.holds(job)]
        breakers = self._breakers
        if breakers is None or not all(hold.lets_probe(now) for hold in on):
            return next((hold for hold in on if breakers is None or not hold.lets_probe(now)), None)
        return next((hold for hold in on if not breakers.lets_through(hold, job)), None)

    def refresh(self) -> None:
        """Read the holds if that is due; never raises."""
        # One thread reads. The others go on with what is known, or wait for it if that is two seconds old.
        late = time.monotonic() - self._due
        if late >= 0 and self._reading.acquire(timeout=0 if late < FRESH else WAIT_SECONDS):
            try:
                self._read()
            finally:
                self._reading.release()

    def decision(self, hold: Hold, job: Job) -> SnoozeUntil:
        """Return until when a job waits that a hold keeps from its begin."""
        return hold.decision(job, self._clock(), self._most)

    def forget(self) -> None:
        """Read the holds again when the next job begins: this process has changed them."""
        self._due = 0.0

    def _read(self) -> None:
        if time.monotonic() < self._due:
            return
        try:
            with at_once():
                known = read(self._documents, self._breakers)
        except StoreError as error:
            logger.debug("the holds are those that were read last: %r", error)
        else:
            if known != self._known[0]:
                self._known = known, {}
                self.limits = {hold.dependency: hold for hold in known if hold.id.startswith(LIMIT)}
        self._due = time.monotonic() + FRESH


class Releaser:
    """Makes held jobs due that nothing holds any more; one worker of the fleet does it at a time."""

    def __init__(self, store: Store, clock: Callable[[], datetime], dependencies: Dependencies) -> None:
        self._store, self._clock, self._dependencies = store, clock, dependencies
        self._holder = uuid.uuid4().hex
        #: The holds for which all held jobs were looked at, and those for which they are looked at now.
        self._done = self._looks_for = ""
        self._pages: Iterator[int] = iter(())
        self._moved = 0
        #: The holds of which the log was told that they are on.
        self._told: dict[str, Hold] = {}

    def release(self) -> bool:
        """Look at some held jobs if the holds have changed since all were looked at; raises StoreError.

        Return whether there are more to look at.
        """
        now = self._clock()
        holds = read(self._store.documents)
        self._tell({hold.id: hold for hold in holds if hold.is_on(now)})
        self.send_probes(holds, now)
        # A limit may stand in the place of one that has held all jobs.
        changed = [hold.ended_at or (hold.since if hold.is_limit else None) for hold in holds]
        ends = [at or (None if one.is_on(now) else one.until) for one, at in zip(holds, changed, strict=True)]
        latest = max((at for at in ends if at), default=None)
        if any(at and now < at + BEGINS for at in changed):
            return False
        key = _key(holds, now)
        if key == self._done:
            return False
        reservation = Reservation(f"ojs-bridge:release:{uuid.uuid5(uuid.NAMESPACE_OID, key)}", 0)
        reservations, until = self._store.reservations, now + ALONE
        asked = reservations.reserve(
            reservation, publication="", holder=self._holder, mark=uuid.uuid4().hex, now=now, until=until
        )
        if asked.grant is Grant.HELD:
            return False
        settle = Settle(reservation, self._holder, now + KEEP)
        if asked.grant is not Grant.SETTLED:
            is_more = self._goes_on(key, holds, now)
            if is_more or self._moved or (latest and now < latest + LOOKS_FOR):
                reservations.release(settle)
                return is_more
            reservations.settle(settle)
        self._done = key
        for kind in (KIND, TURNS):
            self._store.documents.forget(kind, before=now - KEPT)
        return False

    def _goes_on(self, key: str, holds: Sequence[Hold], now: datetime) -> bool:
        """Look at some pages of held jobs; return whether there are more."""
        if key != self._looks_for:
            self._pages, self._moved = self.look(holds, now), 0
        # After an error it begins again.
        self._looks_for, ends = "", time.monotonic() + GO_SECONDS
        for moved in self._pages:
            self._moved += moved
            if time.monotonic() >= ends:
                self._looks_for = key
                return True
        return False

    def send_probes(self, holds: Sequence[Hold], now: datetime) -> None:
        """Make some jobs due of each breaker that lets probes through; one worker of the fleet does it."""
        for hold in holds:
            if hold.lets_probe(now) and hold.probe_at:
                name = f"probe:{hold.id}:{hold.probe_at.timestamp()}"
                probe = partial(self._probe, hold, holds, now)
                once_a_period(self._store.reservations, name, PROBE, self._clock, probe)

    def _probe(self, hold: Hold, holds: Sequence[Hold], now: datetime) -> None:
        found, cursor = list[Parked](), None
        while len(found) < hold.probes:
            page = self._store.parked.list(Filter(kind="held"), limit=_PAGE, cursor=cursor)
            for parked in page.jobs:
                job = job_of_parked(parked)
                its = [] if job.turn else that_hold(holds, job, self._dependencies)
                if hold in its and all(one.lets_probe(now) for one in its if one.is_on(now)):
                    found.append(parked)
            if (cursor := page.next_cursor) is None:
                break
        # A probe may fail: it is rather one of those that have attempts left.
        found.sort(key=lambda parked: parked.attempt - parked.max_attempts)
        for parked in found[: hold.probes]:
            self._store.parked.reschedule(parked, now)

    def _tell(self, on: dict[str, Hold]) -> None:
        """Tell the log which holds are new, and which are over."""
        for hold in on.values():
            if hold.id not in self._told:
                logger.warning("%s %s: %s", "limits" if hold.is_limit else "holds", hold.of, hold.reason)
        for hold in self._told.values():
            if hold.id not in on:
                does = "limits" if hold.is_limit else "holds"
                logger.warning("%s %s no more: %s", does, hold.of, hold.reason)
        self._told = on

    def look(self, holds: Sequence[Hold], now: datetime) -> Iterator[int]:
        """Make jobs due that nothing holds, until a hold begins or ends; yield how many of each page."""
        cursor = None
        while True:
            page = self._store.parked.list(Filter(kind="held"), limit=_GO, cursor=cursor)
            moved, rated = 0, dict[tuple[Turns, datetime], list[Parked]]()
            for parked in page.jobs:
                its = self._ended(parked, holds, now)
                if its and any(hold.rate for hold in its):
                    rated.setdefault(self._turns(its, now), []).append(parked)
                elif its is not None and parked.next_retry_at != parked.parked_at:
                    # Without a rate they go in the order in which they came.
                    moved += self._store.parked.reschedule(parked, parked.parked_at)
            yield moved + sum(self._give(*turns, jobs) for turns, jobs in rated.items())
            cursor = page.next_cursor
            if cursor is None or _key(read(self._store.documents), self._clock()) != _key(holds, now):
                return

    def _ended(self, parked: Parked, holds: Sequence[Hold], now: datetime) -> Sequence[Hold] | None:
        """Return the holds of a held job, all of which have ended; None if it waits on."""
        job = job_of_parked(parked)
        its = [] if job.turn else that_hold(holds, job, self._dependencies)
        # The dependency of a hold may be one that this process does not know.
        on = [hold for hold in holds if hold in its or parked.reason.startswith(hold.says)]
        return None if job.turn or any(hold.is_on(now) for hold in on) else its

    def _turns(self, its: Sequence[Hold], now: datetime) -> tuple[Turns, datetime]:
        """Return the turns of a job by the slowest of its holds, and when all of them had ended."""
        ends = {hold.id: hold.ended_at or hold.until or now for hold in its}
        rated = (hold for hold in its if hold.rate)
        slowest = min(rated, key=lambda hold: (hold.rate or 0, -ends[hold.id].timestamp()))
        name = f"hold:{slowest.id}:{ends[slowest.id].timestamp()}"
        # What has asked to wait until a time works then.
        growing = slowest.ended_at if slowest.dependency else None
        return Turns(self._store.documents, name, slowest.rate or 0, growing), max(ends.values())

    def _give(self, turns: Turns, ended: datetime, jobs: Sequence[Parked]) -> int:
        """Give turns to those of some jobs that have none; return how many have got one, or will."""
        given = turns.ends(ended)

        def has_turn(parked: Parked) -> bool:
            asks_again = abs(parked.next_retry_at - parked.parked_at - ASK_AGAIN) < PARKING
            return not asks_again and ended < parked.next_retry_at < given

        left = [parked for parked in jobs if not has_turn(parked)]
        # A scheduler that claims a job after its time publishes it beside the next ones.
        times = turns.take(len(left), now=self._clock() + AHEAD, within=_ANY_TIME) if left else ()
        for parked, at in zip(left, times or (), strict=False):
            self._store.parked.reschedule(parked, at)
        return len(left)


def _key(holds: Sequence[Hold], now: datetime) -> str:
    """Return which holds there are, and which of them are on."""
    return repr(sorted((hold.id, hold.since, hold.is_on(now), hold.ended_at) for hold in holds))
