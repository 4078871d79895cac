"""The turn of each run: taken before it begins, ended with it; without a store every run has its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from ..errors import StoreError
from ..spec.decision import Complete, Decision, GiveBack
from ..spec.failures import VISIBILITY_TIMEOUT, WORKER_DEATH, Failure
from ..spec.job import Job
from ..store import Grant, Reservation, Settle, Store, Turn
from .reservations import TAKEN, Reservations, Wait, asked_at, was_held_by
from .runs import Drop, Lost, Postpone, Refuse, Run
from .storage_retry import Insistence

logger = logging.getLogger("ojs_bridge")

#: How soon a delivery asks again for a turn that is still held, though its time may be over.
ASK_AGAIN = timedelta(seconds=1)

WORKER_GONE = "its worker did not extend the reservation: killed, or cut off from the store"
WORKER_DIED = "its process died, and its message came to another one of the same pool"


class TakenOver(BaseException):
    """The reservation of a run was taken over, so that nothing counts that the run says; drop its delivery.

    Not an error, and no `except Exception` on its way may take it for one.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(
            f"attempt {job.attempt} was taken for lost before it ended; what it says now is dropped"
        )


class Turns:
    """Turns of one bridge's runs (spec section 9); `length` is how long one is reserved at a time."""

    def __init__(
        self,
        store: Store | None,
        insist: Insistence,
        length: timedelta,
        clock: Callable[[], datetime],
        *,
        fail_open: bool,
    ) -> None:
        self._reservations = Reservations(store, insist, length, clock) if store else None
        self._insist = insist
        self._length = length
        self._clock = clock
        self._fail_open = fail_open

    def take(
        self, run: Run, publication: str, *, can_wait: bool, wait: Wait | None = None
    ) -> Run | Lost | Postpone | Drop:
        """Return what becomes of a run that is to begin; raises StoreError for one that can wait.

        Asks a store that does not answer for as long as `wait` says so.
        """
        if self._reservations is None:
            return run
        try:
            found, job, turn = self._reservations.take(
                run.job, publication, None if self._fail_open else wait
            )
        except StoreError:
            if can_wait and not self._fail_open:
                raise
            logger.exception("job %s: runs without a reservation", run.job.id)
            return run
        taken = Run(job, run.policy, run.task, run.since, turn)
        if found.grant is TAKEN:
            return taken
        if found.grant is Grant.HELD and self._reservations.is_orphaned(found.holder):
            death = Failure(WORKER_DEATH, WORKER_DIED)
            return Lost(taken._replace(abandoned=True), death, asked_at(found.mark))
        return self._refused(taken, found)

    def take_over(self, run: Run, publication: str, process: int | None) -> Run | Postpone | Drop:
        """Return what becomes of a run whose process, on this machine, does nothing more about it.

        Never raises StoreError: what was decided may have a place at the broker.
        """
        try:
            found = self.take(run, publication, can_wait=True)
        except StoreError as error:
            logger.info("job %s: it is ended without its reservation: %r", run.job.id, error)
            return run
        if isinstance(found, Lost):
            return found.run
        if isinstance(found, Postpone) and was_held_by(process, found.holder):
            return run._replace(job=found.job, turn=found.turn)
        return found

    def _refused(self, run: Run, found: Reservation) -> Run | Lost | Postpone | Drop:
        job = run.job
        match found.grant:
            case Grant.HELD:
                soonest = self._clock() + ASK_AGAIN
                at = max(found.until, soonest) if found.until else self._clock() + self._length
                return Postpone(job.waiting(at), at, run.turn, found.holder)
            case Grant.SETTLED:
                return Drop(job, f"attempt {job.attempt} has been dealt with, this is a late copy of it")
            case Grant.LOST:
                return Lost(run, Failure(VISIBILITY_TIMEOUT, WORKER_GONE), asked_at(found.mark))
            case _:
                return run

    def check(self, run: Run) -> None:
        """Raise TakenOver for a run whose turn the store knows to be somebody else's now.

        A store that cannot say does not keep a run from being heard.
        """
        if run.turn is None or run.abandoned or self._reservations is None:
            return
        try:
            held = self._reservations.still_holds(run.turn)
        except StoreError as error:
            logger.warning("job %s: whether its reservation still holds is not known: %s", run.job.id, error)
            return
        if not held:
            self._reservations.let_go(run.turn)
            raise TakenOver(run.job)

    def hand_over(self, begun: Run | Refuse | Postpone, write: Callable[[Settle | None], bool]) -> None:
        """Write something to the store that ends a run, and settle its turn in the same step.

        Raises StoreError, and TakenOver when the store refuses it, because the turn is somebody else's now.
        """
        if not isinstance(begun, Run) or begun.turn is None or self._reservations is None:
            self._insist.run(lambda: write(None), (StoreError,))
            return
        settle = self._reservations.settling(begun.turn, of_a_dead_holder=begun.abandoned)
        written = self._insist.run(lambda: write(settle), (StoreError,))
        self._reservations.let_go(begun.turn)
        if not written:
            raise TakenOver(begun.job)

    def end(self, run: Run | Refuse, decision: Decision) -> None:
        """Settle a run's turn, unless that was done along with what follows it; raises StoreError."""
        turn = run.turn if isinstance(run, Run) else None
        if turn is None or self._reservations is None:
            return
        abandoned = isinstance(run, Run) and run.abandoned
        if not (abandoned or self._reservations.holds(turn)):
            return
        end = self._reservations.give_back if isinstance(decision, GiveBack) else self._reservations.settle
        if not end(turn, of_a_dead_holder=abandoned):
            _was_lost(run.job)

    def end_along(self, run: Run, step: Callable[[Settle], bool]) -> None:
        """Settle a successful run's turn in one step with its acknowledgement; raises StoreError."""
        if run.turn is None or self._reservations is None:
            raise StoreError("this run has no reservation")
        if not self._reservations.settle_along(run.turn, step):
            _was_lost(run.job)

    def give_back(self, run: Run) -> None:
        """Give a run's turn back unused; raises StoreError."""
        self.end(run, GiveBack())

    def let_end(self, run: Run) -> None:
        """Settle a run's turn, because the framework itself ends the job; raises StoreError."""
        self.end(run, Complete())

    def let_run_out(self, run: Run) -> None:
        """Extend a run's turn no more: the next delivery after it ran out is a lost attempt."""
        if self._reservations and run.turn:
            self._reservations.let_go(run.turn)

    def forget(self, turn: Turn | None) -> None:
        """Have the store forget a turn, some time, whose only message was acknowledged."""
        if self._reservations and turn:
            self._reservations.forget(turn)

    def prove(self) -> None:
        """Take and give back a turn that nobody else has; raises StoreError."""
        if self._reservations:
            self._reservations.prove()

    def close(self) -> None:
        """Settle and give back what is left to be; raises StoreError."""
        if self._reservations:
            self._reservations.close()


def _was_lost(job: Job) -> None:
    logger.warning("job %s: attempt %d was taken for lost before it ended", job.id, job.attempt)
