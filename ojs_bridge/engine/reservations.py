"""The reservations of runs (spec section 9): an attempt is reserved before it runs, and settled after it.

Without a store every run begins without a reservation.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TypeAlias

from ..errors import StoreError, Unstorable
from ..rules.decision import RetryAt, decide
from ..rules.failures import VISIBILITY_TIMEOUT, WORKER_DEATH, Failure, Snoozed
from ..rules.job import Job
from ..store import KEEP, Grant, Reservation, ReserveAnswer, ReservedRuns, Settle, from_ms, to_ms
from .behind import Behind
from .heartbeat import DEAD, SUSPICION, Heartbeat, was_held_by
from .running import Runs
from .runs import Drop, Lost, Postpone, Run
from .storage_retry import StorageRetry, pause

logger = logging.getLogger("ojs_bridge")

#: How soon, at the least and at the most, a delivery asks again for an attempt that is reserved: its holder
#: may be suspected meanwhile.
ASK_AGAIN, ASK_AT_LAST = timedelta(seconds=1), timedelta(seconds=5)
#: After how long an answer of the store is so late that others may still wait to end a suspicion.
LATE = timedelta(seconds=0.5)
#: For how long a process that ends, or has the same job again, waits until its successes are settled.
FLUSH_SECONDS = 2.0
#: Waits after the store did not answer; returns whether to ask it again.
Wait: TypeAlias = Callable[[StoreError], bool]
#: Looked up once, because enumerations are slow and every job comes by here.
_TAKEN, _RESENT = Grant.TAKEN, Grant.RESENT

#: The publication of a message whose broker says neither its name nor whether it comes again.
UNTOLD = "?"
#: How many jobs of one id such a broker may bring while the store knows of them, each after the one before.
_AGAIN = 20

_GONE = Failure(
    VISIBILITY_TIMEOUT, "its worker did not extend the reservation: killed, or cut off from the store"
)
_STOPPED = Snoozed(timedelta(), "its worker was killed while it stopped: the job begins anew")
_DIED = Failure(WORKER_DEATH, "its process died, and its message came to another one of the same pool")


class TakenOver(BaseException):
    """The reservation of a run was taken over: the outcome of the run does not count, drop its delivery.

    It is no Exception, so that no `except Exception` on its way catches it.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        super().__init__(
            f"attempt {job.attempt} was taken for lost before it ended; what it says now is dropped"
        )


class Unanswered(TakenOver):
    """The store did not say whether a run still counts, and its worker stops: its delivery goes back."""

    def __str__(self) -> str:
        return f"attempt {self.job.attempt} ended while the store is away; its worker stops, and it goes back"


class Reservations:
    """The reservations of the runs of one bridge; an attempt is reserved for `length` at a time."""

    def __init__(
        self,
        reserved: ReservedRuns | None,
        retry: StorageRetry,
        length: timedelta,
        clock: Callable[[], datetime],
        *,
        fail_open: bool,
        settle_behind: bool,
        out_of_reach: timedelta = SUSPICION,
    ) -> None:
        self._behind = Behind(reserved.settle_all, was_lost) if settle_behind and reserved else None
        #: Whether many successes are settled in one step, and none behind its job.
        self.settles_together = reserved is not None and self._behind is None
        #: Extends the reservations of the runs that go on; None without a store.
        self.heart = Heartbeat(reserved, length, clock, out_of_reach) if reserved else None
        #: The runs that go on here.
        self.runs = Runs(self.heart.holds if self.heart else lambda _reservation: False)
        self._retry = retry
        self._length = length
        self._clock = clock
        self._fail_open = fail_open
        self._requests = itertools.count()

    def reserve(
        self, run: Run, publication: str, *, can_wait: bool, wait: Wait | None = None, gone: bool = False
    ) -> Run | Lost | Postpone | Drop:
        """Reserve the attempt of a run; return what becomes of it. Raises StoreError if the run can wait.

        `publication` tells the messages apart that a user has sent under one id; "" if nothing tells. An
        UNTOLD message is a copy until the attempt is settled, and then a new job. A store
        that does not answer is asked again as long as `wait` returns True. With `gone`, the broker has lost
        its connection to the worker that had the message.
        """
        if self.heart is None:
            return run
        heart, job = self.heart, run.job
        reservation = Reservation(job.key, job.fence)
        wait = None if self._fail_open else wait
        if self._behind and job.key in self._behind.waiting:
            self._behind.flush(FLUSH_SECONDS)
        try:
            answer = self._ask(heart, reservation, publication, wait)
            if answer.grant is _RESENT or (publication == UNTOLD and answer.grant is Grant.SETTLED):
                job, answer = self._next_of_its_id(heart, job, publication, wait)
                reservation = Reservation(job.key, job.fence)
            is_held, wanting = answer.grant is Grant.HELD, run._replace(job=job)
            left = self._left_of(heart, answer, wanting, gone=gone) if is_held else None
            if left is not None and left <= timedelta() and answer.until:
                # As if the reservation had run out. It is still held if it was extended meanwhile.
                after = answer.until + timedelta(milliseconds=1)
                answer = self._ask(heart, reservation, publication, wait, as_of=after)
        except StoreError:
            if can_wait and not self._fail_open:
                raise
            logger.exception("job %s: runs without a reservation", run.job)
            return run
        reserved = Run(job, run.policy, run.task, run.since, reservation)
        if answer.grant is _TAKEN:
            if not (runs := self.runs).noted:
                runs.starts()
            runs.noted[reservation] = reserved
            return reserved
        if answer.grant is Grant.HELD and heart.is_orphaned(answer.holder):
            return Lost(reserved._replace(abandoned=True, began=asked_at(answer.mark)), _DIED)
        return self._refused(reserved, answer, left)

    def _next_of_its_id(
        self, heart: Heartbeat, job: Job, publication: str, wait: Wait | None
    ) -> tuple[Job, ReserveAnswer]:
        """Ask for a job whose id a user has sent before: it gets a chain of its own.

        Where nothing tells the messages apart, it gets the first one that is not settled.
        """
        untold = [f"{job.chain}again{n}" for n in range(_AGAIN)]
        for chain in untold if publication == UNTOLD else [publication]:
            again = job._replace(chain=chain)
            answer = self._ask(heart, Reservation(again.key, again.fence), publication, wait)
            if answer.grant is not Grant.SETTLED:
                break
        return again, answer

    def _left_of(self, heart: Heartbeat, answer: ReserveAnswer, run: Run, *, gone: bool) -> timedelta | None:
        """Return after which time the holder of a reservation counts as dead; None if it is not suspected."""
        if answer.holder == heart.holder and heart.is_orphan(Reservation(run.job.key, run.job.fence)):
            return timedelta()
        if answer.until is None or heart.is_of_family(answer.holder):
            return None
        left = heart.left_of(answer.holder, gone=gone)
        if left in (None, DEAD):
            return left
        if not isinstance(decide(run.policy, run.job, _GONE, now=self._clock(), rng=random), RetryAt):
            # Nothing would begin sooner by it, and the job's end tells failures that no success takes back.
            return None
        # A suspicion may be older than the reservation: a worker ends it only while it holds one.
        return max(left, answer.until - self._length + heart.out_of_reach - self._clock())

    def reserve_from(self, process: int | None, run: Run, publication: str) -> Run | Postpone | Drop:
        """Reserve the attempt of a run that another process of this machine began, and does not end.

        Raises StoreError if the store does not answer, unless jobs may go on without it (`fail_open`).
        """
        reserved = self.reserve(run, publication, can_wait=True)
        if isinstance(reserved, Lost):
            return reserved.run
        if isinstance(reserved, Postpone) and was_held_by(process, reserved.holder):
            return run._replace(
                job=reserved.job, reservation=reserved.reservation, began=reserved.began or run.began
            )
        return reserved

    def check(self, run: Run, *, can_wait: bool, waits: bool) -> None:
        """Raise TakenOver for a run if the store says that another worker has its reservation now.

        Raises StoreError if the store does not answer: the outcome of the run waits for it. It counts if its
        message cannot wait, since then no other worker gets it, or with `fail_open`. With `waits` the store
        is asked for half the length of a reservation, which is extended as soon as that is possible.
        """
        if run.reservation is None or run.abandoned or self.heart is None:
            return
        ends = time.monotonic() + self._length.total_seconds() / 2 * waits
        while True:
            try:
                held = self.heart.still_holds(run.reservation, run.since)
                break
            except StoreError as error:
                if not can_wait or self._fail_open:
                    logger.warning(
                        "job %s: whether its reservation still holds is not known: %s", run.job, error
                    )
                    return
                if time.monotonic() >= ends:
                    raise
                pause(ASK_AGAIN.total_seconds())
        if not held:
            self.heart.expire(run.reservation)
            raise TakenOver(run.job)

    def settle_success(self, run: Run) -> None:
        """Settle a run that has succeeded, if possible soon and without waiting for it. Raises StoreError."""
        reservation, heart, behind = run.reservation, self.heart, self._behind
        if behind and heart and reservation and heart.holds(reservation) and not run.abandoned:
            job = run.job if reservation.fence else None
            order = Settle(reservation, heart.holder, self._clock() + KEEP, job=job)
            if behind.settle(run.job, order):
                heart.expire(reservation)
                return
        self.settle(run, ends=True)

    def settle_successes(self, runs: Sequence[Run]) -> None:
        """Settle successes, in one step and one try; raises StoreError: then a later heartbeat does it."""
        heart = self.heart
        if heart is None:
            return
        held = {run.reservation: run for run in runs if run.reservation and heart.holds(run.reservation)}
        if not held:
            return
        holder, keep_until = heart.holder, self._clock() + KEEP
        orders = [
            Settle(reservation, holder, keep_until, job=run.job if reservation.fence else None)
            for reservation, run in held.items()
        ]
        try:
            for lost in heart.reserved.settle_all(orders):
                was_lost(held[lost].job)
        except BaseException:
            # Not only a StoreError: an interrupt may break in, too.
            for order in orders:
                heart.settle_later(order)
            raise
        finally:
            for reservation in held:
                heart.expire(reservation)

    def settle(self, run: Run, *, used: bool = True, ends: bool = False) -> None:
        """Settle a run, unless it was settled in one step with what follows it; release an attempt not used.

        Where a job `ends` without a letter, what its earlier messages have left in the store goes, too.
        The settlement is tried once, because the acknowledgement waits for it: if the worker is killed
        meanwhile, the job runs again. Raises StoreError: then a later heartbeat settles the run.
        """
        reservation, heart = run.reservation, self.heart
        if reservation is None or heart is None or not (run.abandoned or heart.holds(reservation)):
            return
        holder, job = None if run.abandoned else heart.holder, run.job if ends and reservation.fence else None
        settle = Settle(reservation, holder, self._clock() + KEEP, job=job)
        try:
            if not used:
                # A pool that kills a run has told of it before the run hears of it.
                self._retry.run(heart.reserved.release, settle)
            elif not heart.reserved.settle(settle):
                was_lost(run.job)
        except BaseException:
            # Not only a StoreError: an interrupt may break in, too.
            if used:
                heart.settle_later(settle)
            raise
        finally:
            # If it were extended on, a redelivery would wait for as long as this process lives.
            heart.expire(reservation)

    def settle_with(self, run: Run, step: Callable[..., bool], *args: object) -> bool:
        """Settle a run in one step with something else; False if its reservation was taken over.

        The step gets the arguments, and then how the run is settled. Raises StoreError: then this process
        still holds the reservation.
        """
        if run.reservation is None or self.heart is None:
            raise StoreError("this run has no reservation")
        holder = None if run.abandoned else self.heart.holder
        settled = self._retry.run(step, *args, Settle(run.reservation, holder, self._clock() + KEEP))
        self.heart.expire(run.reservation)
        return settled

    def expire(self, run: Run) -> None:
        """Extend the reservation of a run no more: the next delivery after it ran out is a lost attempt."""
        if self.heart and run.reservation:
            self.heart.expire(run.reservation)

    def give_back(self) -> None:
        """Release the attempts of this process unused, since it ends before its jobs; never raises."""
        try:
            if self.heart:
                self.heart.give_back()
        except Exception as error:  # noqa: BLE001 - the process ends all the same
            logger.warning("what this process ran may count as lost: it was not given back: %r", error)

    def keep(self, lost: Lost) -> None:
        """Extend the reservation of a lost attempt until it is settled: its handler had begun elsewhere."""
        if self.heart and lost.run.reservation and not lost.run.abandoned:
            self.heart.extend(lost.run.reservation)

    def hand_over(self, run: Run) -> None:
        """Let another thread than the one that began a run end it."""
        if self.heart and run.reservation:
            self.heart.hand_over(run.reservation)

    def acknowledged(self, reservation: Reservation | None) -> None:
        """Note that the broker has deleted the only message of a reservation."""
        if self.heart and reservation and reservation.fence == 0:
            self.heart.forget_later(reservation)

    @property
    def family(self) -> str:
        """The name that the forks of one process share; "" without a store."""
        return self.heart.family if self.heart else ""

    def suspect(self, family: str) -> None:
        """Suspect a family of processes to be dead: the broker has lost their connection."""
        if self.heart and family:
            self.heart.reserved.suspect(family, gone=True)

    def lost_connection(self) -> None:
        """Note that a connection was lost on which messages were acknowledged."""
        if self.heart:
            self.heart.lost_connection()

    def prove(self) -> None:
        """Prove that the store can be written: reserve and release something; raises StoreError."""
        if self.heart is None:
            return
        proof, now = Reservation(f"proof:{uuid.uuid4()}", 0), self._clock()
        until = now + self._length
        reserved = self.heart.reserved
        reserved.reserve(proof, publication="", holder="proof", mark=proof.key, now=now, until=until)
        reserved.release(Settle(proof, "proof", now))

    def starts(self) -> Iterator[Callable[[], object]]:
        """Yield what starts each of the threads of this process; raises StoreError where none can start."""
        if self.heart:
            yield self.heart.start
        if self._behind:
            yield self._behind.start

    def flush(self, seconds: float) -> None:
        """Wait until the successes are settled, for so many seconds at most."""
        if self._behind:
            self._behind.flush(seconds)

    def close(self) -> None:
        """Settle and release the reservations that still have to be; raises StoreError."""
        self.flush(FLUSH_SECONDS)
        if self.heart:
            self.heart.close()

    def _ask(
        self,
        heart: Heartbeat,
        wanted: Reservation,
        publication: str,
        wait: Wait | None,
        *,
        as_of: datetime | None = None,
    ) -> ReserveAnswer:
        # By its mark the store knows a question that this holder has asked before.
        asked = f"{to_ms(self._clock())}:{next(self._requests)}"

        def ask() -> ReserveAnswer:
            now = self._clock()
            try:
                heart.start()
                answer = heart.reserved.reserve(
                    wanted,
                    publication=publication,
                    holder=heart.holder,
                    mark=asked,
                    now=as_of or heart.asks_as_of(now),
                    until=now + self._length,
                )
                if answer.grant is _TAKEN:
                    heart.extend(wanted)
                if answer.grant is Grant.HELD and self._clock() - now > LATE:
                    heart.was_late()
                return answer
            except StoreError as error:
                heart.missed(error)
                raise

        retry, question = self._retry, object()
        heart.asking[question] = os.getpid()
        try:
            while True:
                try:
                    return retry.run(ask)
                except StoreError as error:
                    if isinstance(error, Unstorable) or wait is None or not wait(error):
                        raise
                    retry = StorageRetry.disabled()
        except BaseException as error:
            # Not only a StoreError: a soft time limit may break in, too. The store may have reserved the
            # attempt all the same, though no worker runs it.
            if not isinstance(error, Unstorable):
                heart.release_later(Settle(wanted, heart.holder, self._clock() + KEEP, asked))
            raise
        finally:
            heart.asking.pop(question, None)

    def _refused(
        self, run: Run, answer: ReserveAnswer, left: timedelta | None
    ) -> Run | Lost | Postpone | Drop:
        job = run.job
        match answer.grant:
            case Grant.HELD:
                now = self._clock()
                if left is None:
                    at = answer.until or now + ASK_AT_LAST
                else:
                    # Often, so that an outage of the store does not go by unseen.
                    at = now + (left if left < 2 * ASK_AGAIN else ASK_AGAIN)
                at = min(max(at, now + ASK_AGAIN), now + ASK_AT_LAST)
                return Postpone(job.waiting(at), at, run.reservation, answer.holder, asked_at(answer.mark))
            case Grant.SETTLED:
                return Drop(job, f"attempt {job.attempt} has been dealt with, this is a late copy of it")
            case Grant.LOST:
                stopped = self.heart is not None and self.heart.was_stopping(answer.holder)
                return Lost(run._replace(began=asked_at(answer.mark)), _STOPPED if stopped else _GONE)
            case _:
                return run


def asked_at(mark: str) -> datetime | None:
    """Return the time of the request for a reservation, by its holder's clock, from the request's mark."""
    try:
        return from_ms(int(mark.partition(":")[0]))
    except (ValueError, OverflowError):
        return None


def was_lost(job: Job) -> None:
    """Say in the log that a run ended whose reservation was taken over."""
    logger.warning("job %s: attempt %d was taken for lost before it ended", job, job.attempt)
