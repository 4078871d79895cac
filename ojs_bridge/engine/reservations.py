"""The turns that this process holds: taken before a job runs, kept alive while it does, settled after."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TypeAlias

from ..errors import StoreError
from ..spec.job import Job
from ..store import Grant, Reservation, Settle, Store, Turn
from ..store.records import from_ms, to_ms
from .forks import starting
from .storage_retry import Insistence, StorageRetry

logger = logging.getLogger("ojs_bridge")

#: How long a settled turn is remembered, so that a late copy of its message is dropped.
KEEP = timedelta(days=1)
#: How often a reservation is extended before it runs out.
BEATS = 3
#: How many settled turns are forgotten in one round trip, and how long after their acknowledgement, in
#: seconds: RabbitMQ delivers again what it was told in a connection's last moments.
_BATCH = 1000
_FORGET_AFTER = 300.0
#: How often a heartbeat that failed is repeated, in seconds.
_REPEAT = 1.0
#: Waits after a question that the store did not answer; returns whether to ask it again.
Wait: TypeAlias = Callable[[StoreError], bool]
#: Looked up once, because enumerations are slow and every job comes by here.
TAKEN, LOST, RESENT = Grant.TAKEN, Grant.LOST, Grant.RESENT


def turn_of(job: Job) -> Turn:
    """Return the turn that a job at this point stands for."""
    return Turn(job.key, job.fence)


def asked_at(mark: str) -> datetime | None:
    """Return when a turn was asked for, by the clock of who asked, from the mark of that request."""
    try:
        return from_ms(int(mark.rsplit(":", 2)[1]))
    except (IndexError, ValueError, OverflowError):
        return None


def was_held_by(process: int | None, holder: str) -> bool:
    """Return whether a holder was the process of that number on this machine, for None any that has ended."""
    host, _, rest = holder.rpartition(":")[0].rpartition(":")
    if host != socket.gethostname() or not rest.isdecimal():
        return False
    return _has_ended(int(rest)) if process is None else int(rest) == process


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


class Reservations:
    """Reservations of one bridge; a fork starts with none of its parent's. Methods raise StoreError."""

    def __init__(
        self, store: Store, insist: Insistence, length: timedelta, clock: Callable[[], datetime]
    ) -> None:
        self._store = store
        self._insist = insist
        self._length = length
        self._clock = clock
        #: What forks of one process share, who are on one machine and see each other's numbers.
        self._family = uuid.uuid4().hex[:8]
        self._pid = 0
        self._holder = ""
        self._requests = itertools.count()
        self._live: dict[Turn, None] = {}
        #: When the last extension was asked for that succeeded, and of which turns.
        self._extended: tuple[float, frozenset[Turn]] = (0.0, frozenset())
        self._unsettled: dict[Turn, Settle] = {}
        self._ghosts: list[tuple[float, Settle]] = []
        self._done: deque[tuple[float, Turn]] = deque()
        self._blind_until = 0.0

    def take(self, job: Job, publication: str, wait: Wait | None = None) -> tuple[Reservation, Job, Turn]:
        """Ask for a job's turn; the job comes back with a chain of its own when a user has sent it twice.

        `publication` tells one message of the same first turn from another, "" when nobody knows. The
        store is asked for as long as `wait` says so.
        """
        self._start()
        turn = turn_of(job)
        found = self._reserve(turn, publication, wait)
        if found.grant is RESENT:
            job = job._replace(chain=publication)
            turn = turn_of(job)
            found = self._reserve(turn, publication, wait)
        if found.grant is TAKEN or found.grant is LOST:
            self._live[turn] = None
        return found, job, turn

    def _reserve(self, turn: Turn, publication: str, wait: Wait | None) -> Reservation:
        mark = f"{self._holder}:{to_ms(self._clock())}:{next(self._requests)}"

        def reserve() -> Reservation:
            now = self._clock()
            # Who could not reach the store either has not had the time yet to extend what it holds.
            asked = now - self._length if time.monotonic() < self._blind_until else now
            until = now + self._length
            return self._store.reserve(
                turn, publication=publication, holder=self._holder, mark=mark, now=asked, until=until
            )

        insist = self._insist.run
        try:
            # The mark stays, by which the store knows a question that it was asked before.
            while True:
                try:
                    return insist(reserve, (StoreError,))
                except StoreError as error:
                    self._be_blind()
                    if wait is None or not wait(error):
                        raise
                    insist = StorageRetry.disabled().run
        except BaseException:
            # Nobody runs what may have been reserved all the same.
            ends = time.monotonic() + self._length.total_seconds()
            self._ghosts.append((ends, self.settling(turn)._replace(mark=mark)))
            raise

    def _be_blind(self) -> None:
        self._blind_until = time.monotonic() + self._length.total_seconds()

    def prove(self) -> None:
        """Take a turn that nobody else has and give it back, which only a store that can be written does."""
        turn, now = Turn(f"proof:{uuid.uuid4()}", 0), self._clock()
        until = now + self._length
        self._store.reserve(turn, publication="", holder="proof", mark=turn.key, now=now, until=until)
        self._store.give_back(Settle(turn, "proof", now))

    def settling(self, turn: Turn, *, of_a_dead_holder: bool = False) -> Settle:
        """Return what a store is told along with a dead letter or a parked retry."""
        return Settle(turn, None if of_a_dead_holder else self._holder, self._clock() + KEEP)

    def settle(self, turn: Turn, *, of_a_dead_holder: bool = False) -> bool:
        """Mark a turn as dealt with; False when somebody else has taken it for lost meanwhile."""
        settle = self.settling(turn, of_a_dead_holder=of_a_dead_holder)
        try:
            return self._insist.run(lambda: self._store.settle(settle), (StoreError,))
        except StoreError:
            self._unsettled[turn] = settle
            raise
        finally:
            # Extended for ever, it would keep a redelivery waiting for as long as this process lives.
            self.let_go(turn)

    def settle_along(self, turn: Turn, step: Callable[[Settle], bool]) -> bool:
        """Mark a turn as dealt with in one step with something else; it is held until that succeeds."""
        settle = self.settling(turn)
        settled = self._insist.run(lambda: step(settle), (StoreError,))
        self.let_go(turn)
        return settled

    def give_back(self, turn: Turn, *, of_a_dead_holder: bool = False) -> bool:
        """Give a turn back unused; False when it is not ours to give."""
        settle = self.settling(turn, of_a_dead_holder=of_a_dead_holder)
        try:
            return self._insist.run(lambda: self._store.give_back(settle), (StoreError,))
        finally:
            self.let_go(turn)

    def holds(self, turn: Turn) -> bool:
        """Return whether this process holds a turn, unsettled."""
        return self._pid == os.getpid() and turn in self._live

    def still_holds(self, turn: Turn) -> bool:
        """Return whether a turn is still ours; the store is asked unless the last extension says so."""
        asked, extended = self._extended
        if turn in extended and self.holds(turn) and time.monotonic() - asked < self._length.total_seconds():
            return True
        until = self._clock() + self._length
        return not self._store.extend([turn], holder=self._holder, until=until)

    def is_orphaned(self, holder: str) -> bool:
        """Return whether a holder was a process forked as this one was, and has ended."""
        return holder.rpartition(":")[2].startswith(self._family) and was_held_by(None, holder)

    def let_go(self, turn: Turn) -> None:
        """Extend a turn no more: it was settled along with something else."""
        self._live.pop(turn, None)

    def forget(self, turn: Turn) -> None:
        """Have a settled turn's record deleted, after a while: its only message was acknowledged."""
        if turn.fence == 0:
            self._start()
            self._done.append((time.monotonic(), turn))

    def close(self) -> None:
        """Settle and give back what is left to be; what is still held runs out by itself."""
        if self._pid == os.getpid():
            self._catch_up()

    def _start(self) -> None:
        if self._pid == os.getpid():
            return
        with starting():
            if self._pid == os.getpid():
                return
            self._holder = f"{socket.gethostname()}:{os.getpid()}:{self._family}{uuid.uuid4().hex[:8]}"
            self._live, self._unsettled, self._ghosts, self._done = {}, {}, [], deque()
            self._extended = (0.0, frozenset())
            threading.Thread(target=self._beat, name="ojs-heartbeat", daemon=True).start()
            self._pid = os.getpid()

    def _beat(self) -> None:
        between = self._length.total_seconds() / BEATS
        pause = between
        while True:
            time.sleep(pause)
            try:
                self._catch_up()
                self._extend()
                self._forget_done()
                pause = between
            except Exception as error:
                # Whatever it is: a heart that stopped would give every live job to somebody else.
                if not isinstance(error, StoreError):
                    logger.exception("reservations were not extended, and are tried again")
                self._be_blind()
                pause = min(_REPEAT, between)

    def _catch_up(self) -> None:
        """Do what the store could not be told in its time."""
        for turn, settle in tuple(self._unsettled.items()):
            self._store.settle(settle)
            self._unsettled.pop(turn, None)
        for ghost in tuple(self._ghosts):
            ends, settle = ghost
            # The store may carry out what was asked of it after it was taken back.
            if self._store.give_back(settle) or time.monotonic() > ends:
                self._ghosts.remove(ghost)

    def _extend(self) -> None:
        turns = tuple(self._live)
        if not turns:
            return
        asked, until = time.monotonic(), self._clock() + self._length
        gone = self._store.extend(turns, holder=self._holder, until=until)
        self._extended = asked, frozenset(turns).difference(gone)
        for turn in gone:
            if self._live.pop(turn, self) is None:
                logger.warning("job %s: its reservation ran out, and it may run a second time", turn.key)

    def _forget_done(self) -> None:
        old = time.monotonic() - _FORGET_AFTER
        while self._done and self._done[0][0] < old:
            count = min(len(self._done), _BATCH)
            self._store.forget([self._done.popleft()[1] for _ in range(count)])
