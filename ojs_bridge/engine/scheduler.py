"""The scheduler: a thread in every worker that publishes parked jobs and does the chores of the fleet."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

from ..errors import StoreError, Unpublishable, Unreachable
from ..rules.job import format_time
from ..store import Due, Grant, Parked, ParkedJobs, Reservation, ReservedRuns, Settle
from .runs import Publisher
from .storage_retry import POLLING, Outage, StorageRetry
from .threads import BetweenForks, keep_going
from .turns import Turns

T = TypeVar("T")

logger = logging.getLogger("ojs_bridge")

#: How often a scheduler looks for due retries, in seconds.
POLL_SECONDS = 1.0
#: How long before its time a scheduler claims a retry, to publish it on time: longer than between two looks.
AHEAD = timedelta(seconds=1.1)
#: How many retries it publishes under one claim, and how long the claim lasts. So late comes what a worker
#: had claimed that is killed.
BATCH = 200
CLAIM = timedelta(seconds=10)
#: The name of the turns in which the jobs leave the store.
RELEASE = "release"
#: After how many published retries the store deletes them.
UNPARK = 25
#: How often reservations are looked at, in seconds, and how many in one step. Where more than a tenth of them
#: is old, the next step follows at once.
SWEEP_SECONDS = 60.0
SWEEP = 5000
#: The errors after which the scheduler tries again.
AWAY = (StoreError, Unreachable)

_publishing = BetweenForks()


@dataclass(frozen=True, slots=True)
class Chore:
    """A task that each worker does every so many seconds; `name` is for the log.

    It returns True if it has more to do, after what is due was published.
    """

    name: str
    seconds: float
    do: Callable[[], object]


def reservation_at(name: str, period: timedelta, now: datetime) -> Reservation:
    """Return the reservation of the period that a time is in; the store keeps it like that of a job."""
    return Reservation(f"ojs-bridge:{name}", int(now.timestamp() // period.total_seconds()))


def once_a_period(
    reservations: ReservedRuns,
    name: str,
    period: timedelta,
    clock: Callable[[], datetime],
    chore: Callable[[], T],
) -> T | None:
    """Do a chore; return None if another worker has done it in this period, or is doing it.

    Each period has a reservation of its own, so that a worker that dies does not stop the chore. Raises
    StoreError.
    """
    now, holder = clock(), uuid.uuid4().hex
    reservation, until = reservation_at(name, period, now), now + 2 * period
    asked = reservations.reserve(
        reservation, publication="", holder=holder, mark=holder, now=now, until=until
    )
    if asked.grant not in (Grant.TAKEN, Grant.LOST):
        return None
    done = chore()
    reservations.settle(Settle(reservation, holder, until))
    return done


@dataclass
class Scheduler:
    """Publishes the parked jobs that are due through the publishers of this process.

    `give_up` is called with a retry whose message cannot be published, and keeps it in another way.
    """

    parked: ParkedJobs
    reservations: ReservedRuns
    publishers: Mapping[str, Publisher]
    clock: Callable[[], datetime]
    give_up: Callable[[Parked, Exception], None]
    chores: Sequence[Chore] = ()
    polling: StorageRetry = POLLING
    outage: Outage = field(default_factory=Outage)
    #: Limits how fast the jobs of the whole fleet leave the store.
    turns: Turns | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    #: The frameworks whose broker takes no retry, and whether the store is away.
    _waiting: set[str] = field(default_factory=set)
    _is_away: bool = False
    #: The chores that have failed. An outage of the store needs no line for each.
    _undone: dict[str, BaseException] = field(default_factory=dict)
    _due: dict[Chore, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        #: How many retries are claimed at once.
        self.batch = min(BATCH, self.turns.most_within(POLL_SECONDS)) if self.turns else BATCH

    def start(self) -> None:
        """Start the thread, once; it ends with `stop`."""
        if self._thread is None:
            chores = (Chore("sweeping old reservations", SWEEP_SECONDS, self._sweep), *self.chores)
            self._due = dict.fromkeys(chores, time.monotonic())
            self._is_away = self.outage.since is not None
            self._thread = keep_going("ojs-scheduler", self._round)

    def stop(self, seconds: float = 5.0) -> None:
        """End the thread; it may publish some retries more, for so many seconds at most."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def publish_due(self, framework: str, publisher: Publisher, ahead: timedelta = timedelta(0)) -> int:
        """Publish one batch of the retries that are due within some time, each when it is due.

        Return its size, or 0 if it is not its turn; raises StoreError and Unreachable.
        """
        now, began = self.clock(), time.monotonic()
        due = self.parked.claim_due(framework, now=now + ahead, until=now + CLAIM, limit=self.batch)
        times = [parked.next_retry_at for parked in due.retries]
        if self.turns and times:
            turns = self._turns_of(self.turns, due, now)
            if turns is None:
                return 0
            times = [max(pair) for pair in zip(times, turns, strict=True)]
        self.publish(due, publisher, began + CLAIM.total_seconds() / 2, times)
        return len(due.retries)

    def _turns_of(self, turns: Turns, due: Due, now: datetime) -> Sequence[datetime] | None:
        """Take the turns of claimed jobs; without any, the claim ends, and this returns None."""
        times = None
        try:
            times = turns.take(len(due.retries), now=now, within=CLAIM / 4)
        finally:
            if times is None:
                self.parked.unclaim(due.retries, due.claim)
        return times

    def publish(
        self, due: Due, publisher: Publisher, ends: float, times: Sequence[datetime] | None = None
    ) -> None:
        """Publish claimed retries, each at its time, until a monotonic time.

        Raises StoreError and Unreachable.
        """
        left = deque(zip(times or [parked.next_retry_at for parked in due.retries], due.retries, strict=True))
        try:
            # After the end of the claim other workers publish the same retries: publish none then.
            while left and time.monotonic() < ends:
                early = (left[0][0] - self.clock()).total_seconds()
                # A clock that is set back must not stop this thread.
                if self._stop.wait(max(min(early, ends - time.monotonic()), 0.0)):
                    break
                published: list[Parked] = []
                try:
                    while left and len(published) < UNPARK and time.monotonic() < ends:
                        at, parked = left[0]
                        if at > self.clock():
                            break
                        if self._publish(parked, publisher):
                            published.append(parked)
                        left.popleft()
                finally:
                    if published:
                        unpark = partial(self.parked.unpark, published, due.claim)
                        self.polling.run(unpark, retry_on=AWAY, wait=self._stop.wait)
        finally:
            if left:
                self.parked.unclaim([parked for _, parked in left], due.claim)

    def _publish(self, parked: Parked, publisher: Publisher) -> bool:
        """Publish a retry; False if an error of its own keeps it in the store until its claim ends."""
        # An operator may have asked for it sooner than its message says.
        state = {**parked.state, "next_retry_at": format_time(parked.next_retry_at)}
        try:
            with _publishing.lock:
                publisher.publish(parked, state)
        except Unreachable:
            raise
        except Unpublishable as error:
            logger.exception("job %s: it is parked, and cannot be published", parked)
            self.give_up(parked, error)
        except (Exception, SystemExit):
            logger.exception("job %s: it is parked, was not published, and waits", parked)
            return False
        return True

    def _round(self) -> bool:
        """Publish a batch for each framework, do the chores that are due, and rest if no batch was full."""
        if self._stop.is_set():
            return False
        is_more, began = False, time.monotonic()
        for framework, publisher in tuple(self.publishers.items()):
            try:
                published = self.polling.run(
                    self.publish_due, framework, publisher, AHEAD, retry_on=AWAY, wait=self._stop.wait
                )
            except StoreError as error:
                self._is_away, began = True, time.monotonic()
                self._undone.clear()
                self.outage.meet(error)
                continue
            except (Exception, SystemExit) as error:  # noqa: BLE001 - after any error it is tried again
                began = time.monotonic()
                self._wait(framework, error)
                continue
            is_more = is_more or published == self.batch
            if self._is_away or self._undone:
                self._answers()
            if framework in self._waiting:
                self._waiting.remove(framework)
                logger.warning("parked jobs of %s go on", framework)
        if not self._did_more() and not is_more:
            self._stop.wait(max(0.0, began + POLL_SECONDS - time.monotonic()))
        return True

    def _wait(self, framework: str, error: BaseException) -> None:
        if framework not in self._waiting:
            self._waiting.add(framework)
            logger.warning("parked jobs of %s wait (%s: %s)", framework, type(error).__name__, error)

    def _answers(self) -> None:
        """Say that an outage of the store is over, and which chores failed though the store answers."""
        if self._is_away:
            self._is_away = False
            self.outage.over()
        for name, error in self._undone.items():
            logger.warning("%s: not done this time: %s: %s", name, type(error).__name__, error)
        self._undone.clear()

    def _did_more(self) -> bool:
        """Do the chores that are due; return whether one has more to do.

        It never raises, and after any error a chore comes again in its time.
        """
        is_more = False
        for chore, due in self._due.items():
            if time.monotonic() >= due:
                self._due[chore] = time.monotonic() + chore.seconds
                try:
                    if chore.do() is True:
                        self._due[chore], is_more = 0.0, True
                except (Exception, SystemExit) as error:  # noqa: BLE001 - the log is told by the next round
                    self._undone[chore.name] = error
        return is_more

    def _sweep(self) -> None:
        with suppress(StoreError):
            while (
                not self._stop.is_set()
                and self.reservations.expire_before(self.clock(), limit=SWEEP) > SWEEP // 10
            ):
                pass
