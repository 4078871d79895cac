"""The limits of dependencies, which all workers share: rates, and slots that go with a job's reservation."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple, TypeAlias

from ..errors import StoreError
from ..rules.decision import SnoozeUntil, later, until_turn
from ..rules.dependencies import Dependencies, Dependency
from ..rules.holds import ASK_AGAIN
from ..rules.job import Job
from ..rules.rates import Pace, every_of
from ..store import Document, Filter, Parked, Reservation, Store, Unreadable, next_of, readable, reading
from .heartbeat import lives_here
from .holds import PARKING, RELEASE_SECONDS, KnownHolds
from .scheduler import once_a_period

logger = logging.getLogger("ojs_bridge")

#: The kinds of the documents of rates and of slots.
RATE, SLOTS = "rate", "slots"
#: For how long a slot is kept for a job that was given it and has not begun.
GIVEN = timedelta(seconds=10)
#: The most jobs that a document of slots lists as waiting. Of more, the next is looked for: so many held
#: jobs at a time, and so many at the most.
WAIT, LOOKS, LOOKS_AT = 200, 100, 1000
#: For how long the store keeps what is known of a limit after its last use. No job runs for as long as
#: LONGEST.
KEPT, LONGEST = timedelta(hours=1), timedelta(days=30)
#: How often a worker of the fleet looks at the turns of a rate.
LOOK = timedelta(seconds=RELEASE_SECONDS)
#: Returns the value of an argument of a job by its name.
Argument: TypeAlias = Callable[[str], object]


class Taken(NamedTuple):
    """Since when a job has slots, and how many: its weight."""

    at: datetime
    weight: int


class Waits(NamedTuple):
    """The reservation of a job that waits for slots, as it will ask for them; how many, and since when."""

    reservation: Reservation
    weight: int
    since: datetime


#: The jobs that have slots by their reservations, and those that wait for some by their ids, in order.
AllTaken: TypeAlias = Mapping[Reservation, Taken]
AllWaits: TypeAlias = Mapping[str, Waits]


class Limits:
    """The limits of a fleet's dependencies; all methods but `release` raise StoreError."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], datetime],
        dependencies: Dependencies,
        known: KnownHolds,
        publish: Callable[[Parked], object],
    ) -> None:
        self._store, self._clock, self._dependencies, self._known = store, clock, dependencies, known
        #: Has a held job published now.
        self._publish = publish
        #: The slots that the runs of this process have.
        self._mine: dict[Reservation, list[tuple[str, Dependency]]] = {}

    def hold(self, job: Job, reservation: Reservation | None, argument: Argument) -> SnoozeUntil | None:
        """Return until when a reserved job waits for its turn or for a slot; None if it may begin."""
        # A job that waits for a slot has had its turns up to there.
        waits_for = job.turn if job.turn.startswith(f"{SLOTS}:") else ""
        for dependency in self._dependencies.of_type(job.type):
            every, most = self._limit(dependency)
            if not (every or most):
                continue
            name = said = dependency.name
            if dependency.key:
                name, said = _part(name, repr(argument(dependency.key))), f"{name} by {dependency.key}"
            turn, weight = f"{RATE}:{name}", self._dependencies.weight(dependency, job.type)
            if every and not waits_for:
                at = self._turn(name, every, weight, has_turn=job.turn == turn)
                if at is not None:
                    self.release(job, reservation)
                    return self._until(job, at, turn, f"the rate of {said}: its turn is at {at:%H:%M:%S} UTC")
            if waits_for == f"{SLOTS}:{name}":
                waits_for = ""
            if most and reservation:
                if not self._has_slots(name, dependency, job, reservation, min(weight, most)):
                    self.release(job, reservation)
                    needs = f"all {most} are taken" if weight == 1 else f"it needs {weight} of {most}"
                    text = f"the slots of {said}: {needs}"
                    return self._until(job, self._clock() + ASK_AGAIN, f"{SLOTS}:{name}", text)
                self._mine.setdefault(reservation, []).append((name, dependency))
        return None

    def _limit(self, dependency: Dependency) -> tuple[timedelta | None, int | None]:
        """Return in which length of time one job begins, and how many run at a time; None for any number.

        The limit of an operator counts in the place of the dependency's own.
        """
        every, most = dependency.every, dependency.concurrency
        hold = self._known.limits.get(dependency.name) if self._known.limits else None
        if hold and hold.is_limit and hold.is_on(self._clock()):
            every = every if hold.limit_rate is None else every_of(hold.limit_rate)
            most = most if hold.limit_concurrency is None else hold.limit_concurrency
        return every, most

    def release(self, job: Job, reservation: Reservation | None) -> None:
        """Give the slots of a run that has ended to the jobs that wait for them; never raises."""
        if reservation is None:
            return
        slots = self._mine.pop(reservation, None)
        if slots is None:
            # Another process has begun it.
            of_type = self._dependencies.of_type(job.type)
            slots = [(one.name, one) for one in of_type if self._limit(one)[1] and not one.key]
        for name, dependency in slots:
            try:
                self._give(name, dependency, ended=reservation)
            except StoreError as error:
                logger.debug("a slot of %s is free, and nobody is told: %r", name, error)

    def wake(self) -> None:
        """Give free slots to jobs that wait for them: a worker may have died; bring turns forward.

        Raises StoreError.
        """
        self._known.refresh()
        operators = self._known.limits
        its = [one for one in self._dependencies.by_name.values() if one.is_limited or one.name in operators]
        for dependency in its:
            if not self._limit(dependency)[1]:
                if dependency.name in operators:
                    self._let_go(dependency)
                continue
            turns = dict.fromkeys(turn for _, turn in self._waiting(dependency))
            for kind, _, name in (turn.partition(":") for turn in turns):
                if kind == SLOTS:
                    with suppress(Unreadable):
                        self._give(name, dependency)
        # One whose rate was taken away in the code has given out turns, too.
        by_name, soon = self._dependencies.by_name, self._clock() + GIVEN
        for known in self._store.documents.list(RATE, limit=LOOKS, cursor=None).documents:
            one = by_name.get(known.id) or by_name.get(known.id.rpartition(":")[0])
            if one and known.at > soon:
                bring = partial(self._bring_forward, known, one)
                with suppress(Unreadable):
                    once_a_period(self._store.reservations, f"turns:{known.id}", LOOK, self._clock, bring)

    def _let_go(self, dependency: Dependency) -> None:
        """Make the jobs due that wait for slots of which there are any number again."""
        for job, turn in list(self._waiting(dependency)):
            if turn.startswith(f"{SLOTS}:"):
                self._store.parked.reschedule(job, job.parked_at)

    def _bring_forward(self, known: Document, dependency: Dependency) -> None:
        """Bring turns forward that are farther apart than the rate: it has grown, or jobs were cancelled."""
        now, every = self._clock(), self._limit(dependency)[0] or timedelta(milliseconds=1)
        pace, looked = _pace(known, now, every).at_rate(now, every), list(self._waiting(dependency))
        waiting = {job.id: job for job, turn in looked if turn == f"{RATE}:{known.id}"}
        at = max(pace.begun, now)
        for job in sorted(waiting.values(), key=lambda job: job.next_retry_at):
            if job.next_retry_at > at + GIVEN:
                self._store.parked.reschedule(job, later(at, 0))
            at += every * self._dependencies.weight(dependency, job.type)
        if len(looked) < LOOKS_AT and at < known.at - GIVEN:
            self._write_pace(known.id, pace._replace(planned=at), known)

    def forget(self) -> None:
        """Delete what is known of limits that nobody has used for long; raises StoreError."""
        for kind in (RATE, SLOTS):
            self._store.documents.forget(kind, before=self._clock() - KEPT)

    def _until(self, job: Job, at: datetime, hold: str, why: str) -> SnoozeUntil:
        return until_turn(job, self._clock(), at, hold, why)

    def _turn(self, name: str, every: timedelta, weight: int, *, has_turn: bool) -> datetime | None:
        while True:
            known, now = self._store.documents.get(RATE, name), self._clock()
            pace = _pace(known, now, every).at_rate(now, every)
            pace, turn = pace.next(now, has_turn=has_turn, weight=weight)
            if self._write_pace(name, pace, known):
                return turn

    def _write_pace(self, name: str, pace: Pace, known: Document | None) -> bool:
        begun, planned = pace.begun.isoformat(), pace.planned.isoformat()
        every = pace.every.total_seconds()
        body = {"begun": begun, "planned": planned, "every": every, "weight": pace.weight}
        return self._store.documents.write(next_of(known, RATE, name, max(pace.begun, pace.planned), body))

    def _has_slots(
        self, name: str, dependency: Dependency, job: Job, reservation: Reservation, weight: int
    ) -> bool:
        while True:
            known, now, most = self._store.documents.get(SLOTS, name), self._clock(), self._most(dependency)
            taken, waits = _read(known)
            given = taken.get(reservation)
            if given and now - given.at < GIVEN / 2:
                return True  # they were given to this job
            # Else others may have counted them as free before this job had reserved its attempt.
            taken = {held: its for held, its in taken.items() if held != reservation}
            if _used(taken) + weight > most:
                taken = _live(self._store, taken, now)
            # Nobody goes before those that wait, or a job that needs many slots would wait for ever.
            is_next = given is not None or next(iter(waits), job.id) == job.id
            has_them, is_known = is_next and _used(taken) + weight <= most, True
            if has_them:
                taken = {**taken, reservation: Taken(now, weight)}
                waits = {job_id: its for job_id, its in waits.items() if job_id != job.id}
            elif job.id in waits or len(waits) < WAIT:
                # It keeps its place when it asks again.
                asks = Waits(Reservation(reservation.key, reservation.fence + 1), weight, now)
                waits = {**waits, job.id: asks}
            else:
                is_known = False
            if not is_known or self._wrote_slots(name, taken, waits, known):
                break
        if not is_next and _used(taken) < most:
            self._give(name, dependency)
        return has_them

    def _give(self, name: str, dependency: Dependency, *, ended: Reservation | None = None) -> None:
        """Give free slots to the jobs that have waited longest, in their order."""
        while True:
            known, now, most = self._store.documents.get(SLOTS, name), self._clock(), self._most(dependency)
            taken, before = _read(known)
            if ended and ended not in taken:
                return
            taken = _live(self._store, {held: its for held, its in taken.items() if held != ended}, now)
            waits, given = before, list[Parked]()
            while _used(taken) < most:
                following, its, waits = self._next(name, dependency, taken, waits)
                if following is None or its is None:
                    break
                weight = min(its.weight, most)
                if _used(taken) + weight > most:
                    waits = {following.id: its, **waits}
                    break
                taken = {**taken, its.reservation: Taken(now, weight)}
                given.append(following)
            if not (given or ended or waits != before):
                return
            if self._wrote_slots(name, taken, waits, known):
                break
        for job in given:
            if self._store.parked.reschedule(job, now):
                self._publish(job)

    def _next(
        self, name: str, dependency: Dependency, taken: AllTaken, waits: AllWaits
    ) -> tuple[Parked | None, Waits | None, AllWaits]:
        """Return the job that has waited longest for slots, what it waits for, and those that wait on."""
        left, parking = dict(waits), dict[str, Waits]()
        while left:
            job_id = next(iter(left))
            its = left.pop(job_id)
            parked = self._store.parked.get(job_id, "held")
            if parked and (parked.key, parked.fence) == its.reservation:
                return parked, its, {**parking, **left}
            # It is on its way to the store, or it was cancelled, or has another chain.
            if self._clock() - its.since < PARKING:
                parking[job_id] = its
        for job, turn in self._waiting(dependency):
            asks = Reservation(job.key, job.fence)
            if turn == f"{SLOTS}:{name}" and asks not in taken:
                weight = self._dependencies.weight(dependency, job.type)
                return job, Waits(asks, weight, job.parked_at), parking
        return None, None, parking

    def _waiting(self, dependency: Dependency) -> Iterator[tuple[Parked, str]]:
        """Yield held jobs that need a dependency, by type in the order of their time.

        Each comes with the slots or the rate of it that it waits for, if it does.
        """
        for pattern in self._dependencies.jobs_of(dependency.name):
            where, cursor = Filter(type=pattern, kind="held"), None
            for _ in range(LOOKS_AT // LOOKS):
                page = self._store.parked.list(where, limit=LOOKS, cursor=cursor)
                for job in page.jobs:
                    turn = str(job.state.get("turn", ""))
                    name = turn.partition(":")[2]
                    own = name.rpartition(":")[0] if dependency.key else name
                    yield job, turn if own == dependency.name else ""
                cursor = page.next_cursor
                if cursor is None:
                    break

    def _most(self, dependency: Dependency) -> int:
        return self._limit(dependency)[1] or 0

    def _wrote_slots(self, name: str, taken: AllTaken, waits: AllWaits, known: Document | None) -> bool:
        body = {
            "taken": [[*held, its.at.isoformat(), its.weight] for held, its in taken.items()],
            "waits": [
                [job_id, *its.reservation, its.weight, its.since.isoformat()] for job_id, its in waits.items()
            ],
        }
        at = self._clock() + (LONGEST if taken else timedelta())
        return self._store.documents.write(next_of(known, SLOTS, name, at, body))


def parts_of(name: str, value: str) -> Sequence[str]:
    """Return the names that the limit of a value of an argument may have: of a text, or of anything else."""
    return _part(name, repr(value)), _part(name, value)


def use_of(
    store: Store, names: Sequence[str], now: datetime, *, with_values: bool
) -> tuple[int, datetime | None]:
    """Return how many slots of a limit are taken, and until when its turns are given out, if it has any.

    It has one of some names. With the values of its argument, the number is that of all, and no turn is
    known. Raises StoreError.
    """
    documents = store.documents
    slots = [found for name in names if (found := documents.get(SLOTS, name))]
    rates = [found for name in names if (found := documents.get(RATE, name))]
    if with_values:
        page = documents.list(SLOTS, limit=LOOKS_AT, cursor=None).documents
        slots, rates = [one for one in page if one.id.rpartition(":")[0] in names], []
    taken = {held: its for one, _ in readable(slots, _read) for held, its in one.items()}
    return _used(_live(store, taken, now)), max((one.at for one in rates), default=None)


def _part(name: str, value: str) -> str:
    # Nobody but the job is to have the argument, which may be a secret.
    return f"{name}:{hashlib.sha256(value.encode('utf-8', 'replace')).hexdigest()[:16]}"


def _live(store: Store, taken: AllTaken, now: datetime) -> AllTaken:
    """Return the slots whose jobs are under way, or were just given some.

    A job is not under way whose process has ended on this machine, though its message has not come back.
    """
    held_by = store.reservations.under_way([*taken], now=now)
    is_live = {held: lives_here(holder) is not False for held, holder in held_by.items()}
    return {held: its for held, its in taken.items() if is_live.get(held, now - its.at < GIVEN)}


@reading(RATE)
def _pace(known: Document | None, now: datetime, every: timedelta) -> Pace:
    if known is None:
        return Pace(now, now, every)
    begun, planned = (datetime.fromisoformat(known.body[field]) for field in ("begun", "planned"))
    return Pace(begun, planned, timedelta(seconds=known.body["every"]), int(known.body["weight"]))


@reading(SLOTS)
def _read(known: Document | None) -> tuple[AllTaken, AllWaits]:
    body = known.body if known else {"taken": (), "waits": ()}
    taken = {
        Reservation(key, int(fence)): Taken(datetime.fromisoformat(at), int(weight))
        for key, fence, at, weight in body["taken"]
    }
    waits = {
        job_id: Waits(Reservation(key, int(fence)), int(weight), datetime.fromisoformat(since))
        for job_id, key, fence, weight, since in body["waits"]
    }
    return taken, waits


def _used(taken: AllTaken) -> int:
    return sum(its.weight for its in taken.values())
