"""The heartbeat of a process: it extends the reservations that the process holds."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import StoreError, Unstorable
from ..store import KEEP, Reservation, ReservedRuns, Settle
from .threads import keep_going, starting

logger = logging.getLogger("ojs_bridge")

#: How many characters of a process's own name are the name of its family.
FAMILY = 8
#: With this before a family's name, a suspicion in the store says that the family was told to stop.
_STOPS = "stop:"
#: How often, in seconds, a worker looks whether it was told to stop.
LOOK_SECONDS = 0.5
#: How often a reservation is extended before it runs out.
BEATS = 3
#: For so long a process that ends waits for a reservation that one of its threads is about to get.
_GIVE_BACK_SECONDS = 2.0
#: How often, in seconds, a process that holds reservations ends a suspicion that it is dead.
CLEAR_SECONDS = 1.5
#: For how long, at the least, a process whose connection the broker has lost stays under suspicion before it
#: counts as dead. A process trusts its own reservations for no longer without a beat.
SUSPICION = timedelta(seconds=4)
_SUSPICION_SECONDS = SUSPICION.total_seconds()
#: What is left of a suspicion of a process that has ended on this machine.
DEAD = timedelta(days=-1)
#: How many settled reservations the store forgets in one round trip, and how many seconds after the
#: acknowledgement: a broker may miss one from a connection's last moments, and deliver the message again.
_BATCH = 1000
_FORGET_AFTER = 300.0
#: How often a heartbeat that failed is repeated, in seconds.
_REPEAT = 1.0


def was_held_by(process: int | None, holder: str) -> bool:
    """Return whether a holder was the process of this number on this machine; None is any dead process."""
    host, number, born = _read(holder)
    # Two containers may have one name, and processes of the same numbers.
    here = _born(os.getpid()).partition(".")[0]
    if host != socket.gethostname() or number is None or (born and born.partition(".")[0] != here):
        return False
    return has_ended(number) if process is None else number == process


def lives_here(holder: str) -> bool | None:
    """Return whether a holder, a process of this machine, lives; None where this process does not see it.

    Linux tells it; elsewhere, and between two containers, this is None.
    """
    _, number, born = _read(holder)
    if not born or number is None or born.partition(".")[0] != _born(os.getpid()).partition(".")[0]:
        return None
    # A process whose start cannot be read just now may live.
    return _born(number) == born or (None if not has_ended(number) else False)


def _read(holder: str) -> tuple[str, int | None, str]:
    """Return the machine's name, the process's number, and its birth, of the name of a holder."""
    place, _, names = holder.rpartition(":")
    host, _, number = place.rpartition(":")
    return host, int(number) if number.isdecimal() else None, names.partition(".")[2]


def _born(process: int) -> str:
    """Return where and when a process was born: by this boot, its room of numbers, and its start in ticks.

    "" where that is not known, and for one that has ended. The numbers of processes are used again.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        numbers = Path("/proc/self/ns/pid").readlink()
        state, *fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        # A container may see the processes of its host there.
        if state in b"ZX" or Path("/proc/self").readlink().name != str(os.getpid()):
            return ""
        room = hashlib.sha256(boot + bytes(numbers)).hexdigest()[:12]
        return f"{room}.{fields[18].decode()}"
    except (OSError, IndexError):
        return ""


def has_ended(process: int) -> bool:
    """Return whether a process of this machine has ended, though its parent may not know it yet."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"ZX"
    except OSError as error:
        # Another user's process lives.
        return isinstance(error, ProcessLookupError)


def _is_alive(owner: Any) -> bool:
    return bool(owner.is_alive() if isinstance(owner, threading.Thread) else not owner.dead)


def _family_of(holder: str) -> str:
    return holder.rpartition(":")[2][:FAMILY]


class Heartbeat:
    """The reservations that this process holds, and the thread that extends them.

    A fork starts without the reservations of its parent. A reservation that the store could not settle or
    release in time is settled or released with a later beat.
    """

    def __init__(
        self,
        reserved: ReservedRuns,
        length: timedelta,
        clock: Callable[[], datetime],
        out_of_reach: timedelta = SUSPICION,
    ) -> None:
        #: The store's part for reservations.
        self.reserved = reserved
        self._length = length
        #: For how long another process may be under suspicion before it counts as dead.
        self.out_of_reach = out_of_reach
        self._clock = clock
        #: The forks of one process share it: they are on one machine, and see each other's process numbers.
        self.family = uuid.uuid4().hex[:FAMILY]
        self._pid = 0
        self._between = length.total_seconds() / BEATS
        self._soon = min(self._between, CLEAR_SECONDS)
        #: The pause before the next beat, and when reservations are extended again.
        self._pause = self._due = 0.0
        #: The name under which this process holds reservations.
        self.holder = ""
        #: Each with its owner: the thread or greenlet that began its run, or None while any may end it.
        self._live: dict[Reservation, Any] = {}
        #: The questions for reservations that are under way, each with its process: a fork has its parent's.
        self.asking: dict[object, int] = {}
        #: Until when none is asked, since this process ends.
        self.ends = 0.0
        #: What is to run out now, because its run has no owner any more.
        self._orphans: set[Reservation] = set()
        #: The time of the last extension that succeeded, and its reservations.
        self._extended: tuple[float, frozenset[Reservation]] = (0.0, frozenset())
        #: What the store did not have at the last beat: a job that ends just then may still be held here.
        self._missing = frozenset[Reservation]()
        self._unsettled: dict[Reservation, Settle] = {}
        self._unreleased: list[tuple[float, Settle]] = []
        #: The keys of settled first attempts, by the second in which they were acknowledged: there are many.
        self._done: deque[tuple[float, list[str]]] = deque()
        #: The time of the last loss of a connection to the broker.
        self._lost = 0.0
        #: When this process last ended any suspicion against it, and when it did so after too long a time.
        self._cleared = self._doubted = 0.0
        #: The last outage of the store: from its first miss until a while after its last one.
        self._blind_since = self._blind_until = 0.0
        #: When the store was last late with an answer, or gave none.
        self._late = 0.0

    def start(self) -> None:
        """Start the thread of this process, once; raises StoreError where none can start, or as it ends."""
        if time.monotonic() < self.ends:
            raise StoreError("this process ends, and begins no job")
        if self._pid == os.getpid():
            return
        with starting.lock:
            if self._pid == os.getpid():
                return
            name, born = f"{self.family}{uuid.uuid4().hex[:8]}", _born(os.getpid())
            self.holder = f"{socket.gethostname()}:{os.getpid()}:{name}{born and f'.{born}'}"
            self._live, self._unsettled, self._unreleased, self._done = {}, {}, [], deque()
            self._orphans, self.ends = set(), 0.0
            self._extended, self._lost = (0.0, frozenset()), 0.0
            self._cleared = time.monotonic()
            self._pause, self._due = self._soon, self._cleared + self._between
            try:
                keep_going("ojs-heartbeat", self._beat)
            except RuntimeError as error:
                # For want of memory or of threads, which may be over later.
                raise StoreError(f"this process cannot extend reservations: {error}") from error
            self._pid = os.getpid()

    def extend(self, reservation: Reservation) -> None:
        """Extend a reservation from now on, while this thread or greenlet lives and begins no other run."""
        greenlet = sys.modules.get("greenlet")
        green = greenlet.getcurrent() if greenlet else None
        # The last one that an owner has begun is its last one here, too.
        self._live.pop(reservation, None)
        self._live[reservation] = green if green and green.parent is not None else threading.current_thread()

    def hand_over(self, reservation: Reservation) -> None:
        """Let another thread end the run of a reservation."""
        if reservation in self._live:
            self._live[reservation] = None

    def expire(self, reservation: Reservation) -> None:
        """Extend a reservation no more."""
        self._live.pop(reservation, None)

    def give_back(self) -> None:
        """Release all that this process holds, and begin nothing for some seconds: it ends.

        Raises StoreError.
        """
        late, is_last = time.monotonic() + _GIVE_BACK_SECONDS, False
        self.ends = late + _GIVE_BACK_SECONDS
        while not is_last:
            # A thread may be about to get one more.
            is_last = os.getpid() not in tuple(self.asking.values()) or time.monotonic() > late
            live, self._live = self._live, {}
            for reservation in live:
                self.reserved.release(Settle(reservation, self.holder, self._clock() + KEEP))
            time.sleep(0 if is_last else 0.01)

    def abandon(self, reservation: Reservation) -> None:
        """Let a reservation run out with the next beat, if it is extended: nothing ends its run."""
        if self.holds(reservation) and self._live.pop(reservation, self) is not self:
            self._orphans.add(reservation)

    def forgo(self, reservation: Reservation) -> None:
        """Release a reservation that this thread has just made, since its handler does not begin."""
        greenlet, thread = sys.modules.get("greenlet"), threading.current_thread()
        if self._live.get(reservation) in (thread, greenlet.getcurrent() if greenlet else thread):
            self.abandon(reservation)
            with suppress(StoreError):
                self.reserved.release(Settle(reservation, self.holder, self._clock() + KEEP))
                self._orphans.discard(reservation)

    def holds(self, reservation: Reservation) -> bool:
        """Return whether this process extends a reservation."""
        return self._pid == os.getpid() and reservation in self._live

    def is_orphan(self, reservation: Reservation) -> bool:
        """Return whether nothing ends the run of a reservation of this process, which is asked for anew."""
        owner = self._live.get(reservation)
        return reservation in self._orphans or (owner is not None and not _is_alive(owner))

    def still_holds(self, reservation: Reservation, since: float) -> bool:
        """Return whether this process still holds what it reserved at a monotonic time.

        Asks the store if the reservation may have run out, or a suspicion may have lasted for too long.
        """
        asked, extended = self._extended
        since = max(since, asked if reservation in extended else since)
        # A heartbeat that wakes together with the run ends the suspicion, which has done its work by then.
        trusted = since > self._doubted and time.monotonic() - max(since, self._cleared) < _SUSPICION_SECONDS
        in_time = time.monotonic() - since < self._length.total_seconds()
        if trusted and in_time and self.holds(reservation):
            return True
        until = self._clock() + self._length
        return not self.reserved.extend([reservation], holder=self.holder, until=until)

    def is_of_family(self, holder: str) -> bool:
        """Return whether a holder was this process, or forked as this one was."""
        return _family_of(holder) == self.family

    def is_orphaned(self, holder: str) -> bool:
        """Return whether a holder was a process forked as this one was, and has ended."""
        return self.is_of_family(holder) and was_held_by(None, holder)

    def left_of(self, holder: str, *, gone: bool) -> timedelta | None:
        """Return after which time a holder counts as dead; None if it is not suspected. Raises StoreError.

        With `gone`, the broker has lost its connection to the holder. A holder that lives ends a suspicion
        with its next beat. One that lives on this machine is not suspected, and one that has ended is DEAD.
        """
        lives = lives_here(holder)
        if lives or (suspected := self.reserved.suspect(_family_of(holder), gone=gone)) is None:
            return None
        if lives is False:
            return DEAD
        # Before that time the holder could not end the suspicion, either.
        return self.out_of_reach - min(suspected, timedelta(seconds=time.monotonic() - self._late))

    def note_stop(self, is_told: Callable[[], bool]) -> None:
        """Let the store know when this process and its forks are told to stop: they may be killed then.

        A thread asks for that: a signal's handler cannot start one where gevent has its place.
        """
        keep_going("ojs-stops", partial(self._look, is_told))

    def _look(self, is_told: Callable[[], bool]) -> bool:
        time.sleep(LOOK_SECONDS)
        if is_told():
            # While the store is away it is told again and again: the worker has said that it is away.
            with suppress(StoreError):
                self.reserved.suspect(_STOPS + self.family, gone=True)
                return False
        return True

    def was_stopping(self, holder: str) -> bool:
        """Return whether a holder was told to stop; False if the store does not answer."""
        with suppress(StoreError):
            return self.reserved.suspect(_STOPS + _family_of(holder), gone=False) is not None
        return False

    def asks_as_of(self, now: datetime) -> datetime:
        """Return the time before which a reservation must have run out to be taken over now.

        While the store could not be reached, no holder could extend its reservation. So the holders of
        reservations that ran out since then have some time to come back.
        """
        here = time.monotonic()
        if here >= self._blind_until:
            return now
        return now - timedelta(seconds=here - self._blind_since) - self._length

    def was_late(self) -> None:
        """Note that the store was late with an answer."""
        self._late = time.monotonic()

    def missed(self, error: BaseException) -> None:
        """Note that the store could not be reached, unless it was, and refused what it was asked."""
        if isinstance(error, Unstorable):
            return
        here = self._late = time.monotonic()
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
        """Let the store delete a settled first attempt after a while: its only message was acknowledged.

        It stays if a connection is lost meanwhile: then the broker may have missed the acknowledgement.
        """
        with suppress(StoreError):
            self.start()
        now = time.monotonic()
        if not self._done or now - self._done[-1][0] > 1 or self._done[-1][0] <= self._lost:
            self._done.append((now, []))
        self._done[-1][1].append(reservation.key)

    def lost_connection(self) -> None:
        """Note that a connection to the broker was lost: from now on this process speaks for its family.

        A child may hold its interpreter's lock for longer than a suspicion lasts.
        """
        with suppress(StoreError):
            self.start()
        self._lost = time.monotonic()

    def close(self) -> None:
        """Settle and release the reservations that still have to be; those that are held run out."""
        if self._pid == os.getpid():
            self._lose_orphans()
            self._catch_up()

    def _beat(self) -> bool:
        time.sleep(self._pause)
        try:
            self._lose_orphans()
            asked = time.monotonic()
            if asked - self._cleared >= _SUSPICION_SECONDS:
                self._doubted = asked
            held = self._live or self._lost or self._unsettled
            if held and self.reserved.suspect(self.family, gone=False) is not None:
                # A process that is about to take over a run finds its reservation extended.
                self._extend()
                self.reserved.clear(self.family)
            self._cleared = asked
            if time.monotonic() >= self._due or self._unsettled or self._unreleased:
                try:
                    self._catch_up()
                finally:
                    # Even if something can never be settled.
                    self._extend()
                self._forget_done()
                self._due = time.monotonic() + self._between
            self._pause = self._soon
        except BaseException as error:
            # If the heartbeat stopped, other workers would take over every live job.
            self.missed(error)
            self._pause, self._due = min(_REPEAT, self._between), 0.0
            if not isinstance(error, StoreError):
                raise
        return True

    def _lose_orphans(self) -> None:
        """Let the reservations run out whose owners are dead, or have begun another run."""
        live = tuple(self._live.items())
        latest = {id(owner): reservation for reservation, owner in live}
        for reservation, owner in live:
            if owner is not None and not (_is_alive(owner) and latest[id(owner)] is reservation):
                logger.error("job %s: its thread has left it, and its attempt is lost", reservation.key)
                self.abandon(reservation)
        orphans = tuple(self._orphans)
        # What was begun anew meanwhile is another run.
        if over := [reservation for reservation in orphans if reservation not in self._live]:
            # Long ago, for whoever asks in an outage or after it.
            until = self.asks_as_of(self._clock()) - self._length - timedelta(seconds=1)
            self.reserved.extend(over, holder=self.holder, until=until)
        self._orphans.difference_update(orphans)

    def _catch_up(self) -> None:
        """Settle and release the reservations that the store could not settle or release in time."""
        for reservation, settle in tuple(self._unsettled.items()):
            self.reserved.settle(settle)
            self._unsettled.pop(reservation, None)
        for left in tuple(self._unreleased):
            ends, settle = left
            # The store may still carry out the request to reserve it after the release.
            if self.reserved.release(settle) or time.monotonic() > ends:
                with suppress(ValueError):  # A process that ends may do the same beside the heartbeat.
                    self._unreleased.remove(left)

    def _extend(self) -> None:
        live = tuple(self._live)
        if not live:
            return
        asked, until = time.monotonic(), self._clock() + self._length
        gone = frozenset(self.reserved.extend(live, holder=self.holder, until=until))
        self._extended = asked, frozenset(live) - gone
        missing, self._missing = self._missing, gone
        for reservation in gone & missing:
            if self._live.pop(reservation, self) is not self:
                logger.warning(
                    "job %s: its reservation ran out, and it may run a second time", reservation.key
                )

    def _forget_done(self) -> None:
        old, keys = time.monotonic() - _FORGET_AFTER, list[str]()
        while self._done and self._done[0][0] < old:
            at, acknowledged = self._done.popleft()
            if at > self._lost:
                keys += acknowledged
        for start in range(0, len(keys), _BATCH):
            self.reserved.expire([Reservation(key, 0) for key in keys[start : start + _BATCH]])
