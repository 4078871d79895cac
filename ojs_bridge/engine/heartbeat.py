"""The heartbeat of a process: it extends the reservations that the process holds."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

from ..errors import StoreError
from ..store import Reservation, Settle, Store
from .forks import starting

logger = logging.getLogger("ojs_bridge")

#: How often a reservation is extended before it runs out.
BEATS = 3
#: How many settled reservations the store forgets in one round trip, and how many seconds after the
#: acknowledgement: a broker may miss one from a connection's last moments, and deliver the message again.
_BATCH = 1000
_FORGET_AFTER = 300.0
#: How often a heartbeat that failed is repeated, in seconds.
_REPEAT = 1.0


def was_held_by(process: int | None, holder: str) -> bool:
    """Return whether a holder was the process of this number on this machine; None is any dead process."""
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


class Heartbeat:
    """The reservations that this process holds, and the thread that extends them.

    A fork starts without the reservations of its parent. A reservation that the store could not settle or
    release in time is settled or released with a later beat.
    """

    def __init__(self, store: Store, length: timedelta, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._length = length
        self._clock = clock
        #: The forks of one process share it: they are on one machine, and see each other's process numbers.
        self._family = uuid.uuid4().hex[:8]
        self._pid = 0
        #: The name under which this process holds reservations.
        self.holder = ""
        self._live: dict[Reservation, None] = {}
        #: The time of the last extension that succeeded, and its reservations.
        self._extended: tuple[float, frozenset[Reservation]] = (0.0, frozenset())
        self._unsettled: dict[Reservation, Settle] = {}
        self._unreleased: list[tuple[float, Settle]] = []
        self._done: deque[tuple[float, Reservation]] = deque()
        #: The time of the last loss of a connection to the broker.
        self._lost = 0.0
        #: The last outage of the store: from its first miss until a while after its last one.
        self._blind_since = self._blind_until = 0.0

    def start(self) -> None:
        """Start the thread of this process, once; raises StoreError where none can start."""
        if self._pid == os.getpid():
            return
        with starting.lock:
            if self._pid == os.getpid():
                return
            self.holder = f"{socket.gethostname()}:{os.getpid()}:{self._family}{uuid.uuid4().hex[:8]}"
            self._live, self._unsettled, self._unreleased, self._done = {}, {}, [], deque()
            self._extended = (0.0, frozenset())
            self._keep_beating()
            self._pid = os.getpid()

    def _keep_beating(self) -> None:
        try:
            threading.Thread(target=self._beat, name="ojs-heartbeat", daemon=True).start()
        except RuntimeError as error:
            # For want of memory or of threads, which may be over later.
            raise StoreError(f"this process cannot extend reservations: {error}") from error

    def extend(self, reservation: Reservation) -> None:
        """Extend a reservation from now on."""
        self._live[reservation] = None

    def expire(self, reservation: Reservation) -> None:
        """Extend a reservation no more."""
        self._live.pop(reservation, None)

    def holds(self, reservation: Reservation) -> bool:
        """Return whether this process extends a reservation."""
        return self._pid == os.getpid() and reservation in self._live

    def still_holds(self, reservation: Reservation) -> bool:
        """Return whether this process still holds a reservation; if the last beat is old, ask the store."""
        asked, extended = self._extended
        fresh = time.monotonic() - asked < self._length.total_seconds()
        if reservation in extended and self.holds(reservation) and fresh:
            return True
        until = self._clock() + self._length
        return not self._store.extend([reservation], holder=self.holder, until=until)

    def is_orphaned(self, holder: str) -> bool:
        """Return whether a holder was a process forked as this one was, and has ended."""
        return holder.rpartition(":")[2].startswith(self._family) and was_held_by(None, holder)

    def asks_as_of(self, now: datetime) -> datetime:
        """Return the time before which a reservation must have run out to be taken over now.

        While the store could not be reached, no holder could extend its reservation. So the holders of
        reservations that ran out since then have some time to come back.
        """
        here = time.monotonic()
        if here >= self._blind_until:
            return now
        return now - timedelta(seconds=here - self._blind_since) - self._length

    def missed(self) -> None:
        """Take note that the store could not be reached."""
        here = time.monotonic()
        if here >= self._blind_until:
            self._blind_since = here
        self._blind_until = here + self._length.total_seconds()

    def settle_later(self, settle: Settle) -> None:
        """Settle a reservation with a later beat."""
        self._unsettled[settle.reservation] = settle

    def release_later(self, settle: Settle) -> None:
        """Release with a later beat a reservation that the store may have made without an answer."""
        self._unreleased.append((time.monotonic() + self._length.total_seconds(), settle))

    def forget_later(self, reservation: Reservation) -> None:
        """Have the store delete a settled reservation after a while: its only message was acknowledged.

        It stays if a connection is lost meanwhile: then the broker may have missed the acknowledgement.
        """
        with suppress(StoreError):
            self.start()
        self._done.append((time.monotonic(), reservation))

    def lost_connection(self) -> None:
        """Take note that a connection to the broker was lost."""
        self._lost = time.monotonic()

    def close(self) -> None:
        """Settle and release the reservations that still have to be; those that are held run out."""
        if self._pid == os.getpid():
            self._catch_up()

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
                # After any error: if the heartbeat stopped, other workers would take over every live job.
                if not isinstance(error, StoreError):
                    logger.exception("reservations were not extended, and are tried again")
                self.missed()
                pause = min(_REPEAT, between)

    def _catch_up(self) -> None:
        """Settle and release the reservations that the store could not settle or release in time."""
        for reservation, settle in tuple(self._unsettled.items()):
            self._store.settle(settle)
            self._unsettled.pop(reservation, None)
        for left in tuple(self._unreleased):
            ends, settle = left
            # The store may still carry out the request to reserve it after the release.
            if self._store.release(settle) or time.monotonic() > ends:
                self._unreleased.remove(left)

    def _extend(self) -> None:
        live = tuple(self._live)
        if not live:
            return
        asked, until = time.monotonic(), self._clock() + self._length
        gone = self._store.extend(live, holder=self.holder, until=until)
        self._extended = asked, frozenset(live).difference(gone)
        for reservation in gone:
            if self._live.pop(reservation, self) is None:
                logger.warning(
                    "job %s: its reservation ran out, and it may run a second time", reservation.key
                )

    def _forget_done(self) -> None:
        old = time.monotonic() - _FORGET_AFTER
        while self._done and self._done[0][0] < old:
            batch: list[Reservation] = []
            while self._done and self._done[0][0] < old and len(batch) < _BATCH:
                at, reservation = self._done.popleft()
                if at > self._lost:
                    batch.append(reservation)
            if batch:
                self._store.expire(batch)
