"""The turns that this process holds: taken before a job runs, kept alive while it does, settled after."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta

from .job import Job
from .storage_retry import StorageRetry
from .store import Grant, Reservation, Settle, Store, StoreError, Turn

logger = logging.getLogger("ojs_bridge")

#: How long a settled turn is remembered, so that a late copy of its message is dropped.
KEEP = timedelta(days=1)
#: How often a reservation is extended before it runs out.
BEATS = 3
#: How many settled turns are forgotten in one round trip.
_BATCH = 1000


def turn_of(job: Job) -> Turn:
    """Return the turn that a job at this point stands for."""
    return Turn(job.key, job.fence)


class Reservations:
    """Reservations of one bridge; a fork starts with none of its parent's. Methods raise StoreError."""

    def __init__(
        self, store: Store, insist: StorageRetry, length: timedelta, clock: Callable[[], datetime]
    ) -> None:
        self._store = store
        self._insist = insist
        self._length = length
        self._clock = clock
        self._pid = 0
        self._holder = ""
        self._live: dict[Turn, None] = {}
        self._done: list[Turn] = []
        self._flushing = threading.Event()

    def take(self, job: Job, publication: str) -> tuple[Reservation, Job]:
        """Ask for a job's turn; the job comes back with a chain of its own when a user has sent it twice.

        `publication` tells one message of the same first turn from another, "" when nobody knows.
        """
        self._start()
        found = self._reserve(turn_of(job), publication)
        if found.grant is Grant.RESENT:
            job = replace(job, chain=publication)
            found = self._reserve(turn_of(job), publication)
        if found.grant in (Grant.TAKEN, Grant.LOST):
            self._live[turn_of(job)] = None
        return found, job

    def _reserve(self, turn: Turn, publication: str) -> Reservation:
        def reserve() -> Reservation:
            now = self._clock()
            until = now + self._length
            return self._store.reserve(
                turn, publication=publication, holder=self._holder, now=now, until=until
            )

        try:
            return self._insist.run(reserve, (StoreError,))
        except Exception:
            raise
        except BaseException:
            # Interrupted: nobody runs what may have been reserved.
            with suppress(StoreError):
                self.give_back(turn)
            raise

    def prove(self) -> None:
        """Take a turn that nobody else has and give it back, which only a store that can be written does."""
        turn, now = Turn(f"proof:{uuid.uuid4()}", 0), self._clock()
        self._store.reserve(turn, publication="", holder="proof", now=now, until=now + self._length)
        self._store.give_back(Settle(turn, "proof", now))

    def settling(self, turn: Turn, *, of_a_dead_holder: bool = False) -> Settle:
        """Return what a store is told along with a dead letter or a parked retry."""
        return Settle(turn, None if of_a_dead_holder else self._holder, self._clock() + KEEP)

    def settle(self, turn: Turn, *, of_a_dead_holder: bool = False) -> bool:
        """Mark a turn as dealt with; False when somebody else has taken it for lost meanwhile."""
        settle = self.settling(turn, of_a_dead_holder=of_a_dead_holder)
        try:
            return self._insist.run(lambda: self._store.settle(settle), (StoreError,))
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

    def let_go(self, turn: Turn) -> None:
        """Extend a turn no more: it was settled along with something else."""
        self._live.pop(turn, None)

    def forget(self, turn: Turn) -> None:
        """Have a settled turn's record deleted, some time soon: its only message was acknowledged."""
        if turn.fence == 0:
            self._done.append(turn)

    def close(self) -> None:
        """Delete what is to be forgotten; what is still held runs out by itself."""
        if self._pid == os.getpid():
            self._forget_done()

    def _start(self) -> None:
        if self._pid == os.getpid():
            return
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._live, self._done, self._flushing = {}, [], threading.Event()
        self._pid = os.getpid()
        threading.Thread(target=self._beat, args=(self._flushing,), name="ojs-heartbeat", daemon=True).start()

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(self._length.total_seconds() / BEATS):
            with suppress(StoreError):
                self._extend()
            with suppress(StoreError):
                self._forget_done()

    def _extend(self) -> None:
        turns = tuple(self._live)
        if not turns:
            return
        until = self._clock() + self._length
        extend = self._store.extend
        gone = self._insist.run(lambda: extend(turns, holder=self._holder, until=until), (StoreError,))
        for turn in gone:
            if self._live.pop(turn, self) is None:
                logger.warning("job %s: its reservation ran out, and it may run a second time", turn.key)

    def _forget_done(self) -> None:
        while self._done:
            batch, self._done = self._done[:_BATCH], self._done[_BATCH:]
            self._store.forget(batch)
