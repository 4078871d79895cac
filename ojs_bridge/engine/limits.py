"""The limits of dependencies, which all workers share: rates, and slots that go with a job's reservation."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import TypeAlias

from ..errors import StoreError
from ..rules.decision import SnoozeUntil, until_turn
from ..rules.dependencies import Dependencies, Dependency
from ..rules.holds import ASK_AGAIN
from ..rules.job import Job
from ..rules.rates import Pace
from ..store import Document, Filter, Parked, Reservation, Store, next_of

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
#: Returns the value of an argument of a job by its name.
Argument: TypeAlias = Callable[[str], object]
#: The jobs that have a slot: their reservations, and since when.
Taken: TypeAlias = Mapping[Reservation, datetime]
#: The jobs that wait for a slot: their ids, and the reservations that they will ask for.
Waits: TypeAlias = Mapping[str, Reservation]


class Limits:
    """The limits of a fleet's dependencies; all methods but `release` raise StoreError."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], datetime],
        dependencies: Dependencies,
        publish: Callable[[Parked], object],
    ) -> None:
        self._store, self._clock, self._dependencies = store, clock, dependencies
        #: Has a held job published now.
        self._publish = publish
        #: The slots that the runs of this process have.
        self._mine: dict[Reservation, list[tuple[str, Dependency]]] = {}

    def hold(self, job: Job, reservation: Reservation | None, argument: Argument) -> SnoozeUntil | None:
        """Return until when a reserved job waits for its turn or for a slot; None if it may begin."""
        # A job that waits for a slot has had its turns up to there.
        waits_for = job.turn if job.turn.startswith(f"{SLOTS}:") else ""
        for dependency in self._dependencies.of_type(job.type):
            if not dependency.is_limited:
                continue
            name = said = dependency.name
            if dependency.key:
                # Nobody but the job is to have the argument, which may be a secret.
                value = hashlib.sha256(repr(argument(dependency.key)).encode("utf-8", "replace")).hexdigest()
                name, said = f"{name}:{value[:16]}", f"{name} by {dependency.key}"
            turn = f"{RATE}:{name}"
            if dependency.every and not waits_for:
                at = self._turn(name, dependency.every, has_turn=job.turn == turn)
                if at is not None:
                    self.release(job, reservation)
                    return self._until(job, at, turn, f"the rate of {said}: its turn is at {at:%H:%M:%S} UTC")
            if waits_for == f"{SLOTS}:{name}":
                waits_for = ""
            if dependency.concurrency and reservation:
                if not self._has_slot(name, dependency.concurrency, job, reservation):
                    self.release(job, reservation)
                    text = f"the slots of {said}: all {dependency.concurrency} are taken"
                    return self._until(job, self._clock() + ASK_AGAIN, f"{SLOTS}:{name}", text)
                self._mine.setdefault(reservation, []).append((name, dependency))
        return None

    def release(self, job: Job, reservation: Reservation | None) -> None:
        """Give the slots of a run that has ended to the jobs that wait for them; never raises."""
        if reservation is None:
            return
        slots = self._mine.pop(reservation, None)
        if slots is None:
            # Another process has begun it.
            of_type = self._dependencies.of_type(job.type)
            slots = [(one.name, one) for one in of_type if one.concurrency and not one.key]
        for name, dependency in slots:
            try:
                self._give(name, dependency, ended=reservation)
            except StoreError as error:
                logger.debug("a slot of %s is free, and nobody is told: %r", name, error)

    def wake(self) -> None:
        """Give free slots to jobs that wait for them: a worker may have died; take turns back.

        Raises StoreError.
        """
        for dependency in self._dependencies.limited:
            if dependency.concurrency:
                names = dict.fromkeys(name for _, name in self._waiting(dependency))
                for name in names:
                    while self._give(name, dependency):
                        pass
        if any(dependency.every for dependency in self._dependencies.limited):
            self._take_back()

    def _take_back(self) -> None:
        """Take turns back for which no job waits any more: jobs were cancelled."""
        documents, soon = self._store.documents, self._clock() + GIVEN
        known = [one for one in documents.list(RATE, limit=LOOKS, cursor=None).documents if one.at > soon]
        held = self._store.parked.list(Filter(kind="held"), limit=LOOKS, cursor=None) if known else None
        if held and held.next_cursor is None:
            turns = {job.state.get("turn") for job in held.jobs}
            for one in known:
                if f"{RATE}:{one.id}" not in turns:
                    begun = one.body["begun"]
                    at, body = datetime.fromisoformat(begun), {"begun": begun, "planned": begun}
                    documents.write(next_of(one, RATE, one.id, at, body))

    def forget(self) -> None:
        """Delete what is known of limits that nobody has used for long; raises StoreError."""
        for kind in (RATE, SLOTS):
            self._store.documents.forget(kind, before=self._clock() - KEPT)

    def _until(self, job: Job, at: datetime, hold: str, why: str) -> SnoozeUntil:
        return until_turn(job, self._clock(), at, hold, why)

    def _turn(self, name: str, every: timedelta, *, has_turn: bool) -> datetime | None:
        while True:
            known, now = self._store.documents.get(RATE, name), self._clock()
            pace = Pace(now, now)
            if known:
                pace = Pace(*(datetime.fromisoformat(known.body[field]) for field in Pace._fields))
            pace, turn = pace.next(now, every, has_turn=has_turn)
            body = {field: at.isoformat() for field, at in pace._asdict().items()}
            if self._store.documents.write(next_of(known, RATE, name, max(pace), body)):
                return turn

    def _has_slot(self, name: str, most: int, job: Job, reservation: Reservation) -> bool:
        while True:
            known, now = self._store.documents.get(SLOTS, name), self._clock()
            taken, waits = _read(known)
            taken, given = dict(taken), taken.get(reservation)
            if given and now - given < GIVEN / 2:
                return True  # it was given to this job
            # Else others may have counted it as free before this job had reserved its attempt.
            taken.pop(reservation, None)
            if len(taken) >= most:
                taken = self._live(taken, now)
            has_it = len(taken) < most
            if has_it:
                taken = {**taken, reservation: now}
            elif job.id in waits or len(waits) < WAIT:
                # It keeps its place when it asks again.
                waits = {**waits, job.id: Reservation(reservation.key, reservation.fence + 1)}
            else:
                return False
            if self._wrote_slots(name, taken, waits, known):
                return has_it

    def _give(self, name: str, dependency: Dependency, *, ended: Reservation | None = None) -> bool:
        """Give a free slot to the next job that waits for it; return whether one has got it."""
        while True:
            known, now = self._store.documents.get(SLOTS, name), self._clock()
            taken, waits = _read(known)
            if ended and ended not in taken:
                return False
            taken = self._live({held: at for held, at in taken.items() if held != ended}, now)
            following = None
            if len(taken) < (dependency.concurrency or 0):
                following, waits = self._next(name, dependency, taken, waits)
            if following is not None:
                taken = {**taken, Reservation(following.key, following.fence): now}
            elif ended is None:
                return False
            if self._wrote_slots(name, taken, waits, known):
                break
        if following is not None and self._store.parked.reschedule(following, now):
            self._publish(following)
        return following is not None

    def _next(
        self, name: str, dependency: Dependency, taken: Taken, waits: Waits
    ) -> tuple[Parked | None, Waits]:
        """Return the job that has waited longest for a slot, and those that wait on."""
        left = dict(waits)
        while left:
            job_id = next(iter(left))
            its = left.pop(job_id)
            parked = self._store.parked.get(job_id, "held")
            # It may have been cancelled, or have another chain.
            if parked and (parked.key, parked.fence) == its:
                return parked, left
        others = (job for job, its_name in self._waiting(dependency) if its_name == name)
        return next((job for job in others if Reservation(job.key, job.fence) not in taken), None), left

    def _live(self, taken: Taken, now: datetime) -> dict[Reservation, datetime]:
        """Return the slots whose jobs are under way, or were just given one."""
        under_way = {*self._store.reservations.under_way([*taken], now=now)}
        return {held: at for held, at in taken.items() if held in under_way or now - at < GIVEN}

    def _waiting(self, dependency: Dependency) -> Iterator[tuple[Parked, str]]:
        """Yield held jobs that wait for slots of a dependency, by type in the order of their time.

        Each comes with the name of its slots.
        """
        for pattern in self._dependencies.jobs_of(dependency.name):
            where, cursor = Filter(type=pattern, kind="held"), None
            for _ in range(LOOKS_AT // LOOKS):
                page = self._store.parked.list(where, limit=LOOKS, cursor=cursor)
                for job in page.jobs:
                    kind, _, name = str(job.state.get("turn", "")).partition(":")
                    own = name.rpartition(":")[0] if dependency.key else name
                    if kind == SLOTS and own == dependency.name:
                        yield job, name
                cursor = page.next_cursor
                if cursor is None:
                    break

    def _wrote_slots(self, name: str, taken: Taken, waits: Waits, known: Document | None) -> bool:
        body = {
            "taken": [[held.key, held.fence, at.isoformat()] for held, at in taken.items()],
            "waits": [[job_id, its.key, its.fence] for job_id, its in waits.items()],
        }
        at = self._clock() + (LONGEST if taken else timedelta())
        return self._store.documents.write(next_of(known, SLOTS, name, at, body))


def _read(known: Document | None) -> tuple[Taken, Waits]:
    body = known.body if known else {"taken": (), "waits": ()}
    taken = {Reservation(key, fence): datetime.fromisoformat(at) for key, fence, at in body["taken"]}
    return taken, {job_id: Reservation(key, fence) for job_id, key, fence in body["waits"]}
