"""The engine: the adapters have it begin a job, judge its outcome, and write down what follows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timedelta
from typing import Any, TypeVar

from ..errors import ConfigurationError, InvalidRetryPolicy, InvalidState, NotExpressible, StoreError
from ..spec.backoff import Rng
from ..spec.decision import (
    Complete,
    DeadLetter,
    Decision,
    Discard,
    GiveBack,
    RetryAt,
    Snooze,
    decide,
)
from ..spec.failures import (
    MAX_MESSAGE,
    ErrorMap,
    Failure,
    Mapped,
    Outcome,
    cut,
    outcome_of,
    safe_repr,
)
from ..spec.job import Header, Job, encode
from ..spec.patterns import check_errors
from ..spec.policy import AnyPartial, RetryPolicy, said_by
from ..store import Parked, Reservation, Settle, Store
from . import events
from .context import Context
from .harmless import Harmless
from .keeping import job_of_parked, letter_of, parked_of
from .ports import DeadQueues, Publisher
from .reservations import Reservations, TakenOver, Wait, was_lost
from .retry_on import RetryOn
from .runs import NOTHING, Begun, Drop, Native, Postpone, Refuse, Run, TaskPolicy
from .store_at_start import try_store

T = TypeVar("T")


class Engine:
    """The retry semantics of one bridge, for the adapters.

    `retry` is the app's default policy and `errors` its error map; `budget` is the most bytes of a header.
    """

    def __init__(
        self,
        context: Context,
        *,
        retry: AnyPartial | None,
        errors: Mapping[type[BaseException], Mapped],
        budget: int,
        reservation: timedelta,
        park_after: timedelta,
        fail_open: bool,
    ) -> None:
        self.context = context
        self.store = context.store
        #: How much later than now a retry must be due to wait in the store.
        self.park_after = park_after
        #: Whether anybody listens to events.
        self.listened_to = bool(context.events)
        self._events = context.events
        self._retry = retry
        self._errors = errors
        self._budget = budget
        self._rng: Rng = random
        self._fail_open = fail_open
        self._surely_held = reservation.total_seconds()
        self._reservations = Reservations(
            context.store, context.insistence, reservation, context.clock, fail_open=fail_open
        )
        # An invalid default policy is raised here, not when the first job fails.
        self.task()

    def register(self, framework: str, publisher: Publisher, dead_queues: DeadQueues | None = None) -> None:
        """Take the publisher and the dead queues of an app or broker; ConfigurationError for a second one.

        A dead letter does not say which app or broker it came from.
        """
        if self.context.publishers.setdefault(framework, publisher) != publisher:
            raise ConfigurationError(
                f"this bridge already serves another {framework} app or broker: give each a bridge of its own"
            )
        if dead_queues is not None:
            self.context.dead_queues[framework] = dead_queues

    def try_store(self, dead_queue: str) -> None:
        """Say in the log, when a worker starts, what goes without a store or with one that does not work."""
        try_store(self.store, self._reservations.prove, self.now, dead_queue, fail_open=self._fail_open)

    def store_answers(self) -> bool:
        """Return whether jobs can begin now; without a store they always can."""
        try:
            self._reservations.prove()
        except StoreError:
            return False
        return True

    def now(self) -> datetime:
        """Return the time, in UTC."""
        return self.context.clock()

    def task(
        self,
        *partials: AnyPartial | None,
        errors: Mapping[type[BaseException], Mapped] | None = None,
        reserved: Mapping[type[BaseException], Mapped] | None = None,
        native: Native = NOTHING,
        retry_on: RetryOn | None = None,
        afresh: bool = False,
    ) -> TaskPolicy:
        """Resolve the settings of one task or actor, later partials winning; raises InvalidRetryPolicy.

        `reserved` is the adapter's own map, such as time limits to `timeout`; everybody else's wins over it.
        `native` is what the framework alone would do, and `retry_on` what an owner has said of that. With
        `afresh` a job that comes without a header, and is beyond its limit, begins at attempt 1.
        """
        said = said_by(self._retry, *partials)
        layers = (self._retry, native.options, *partials)
        policy = RetryPolicy.merge(native.under(said), *layers)
        check_errors(policy)
        return TaskPolicy(
            layers,
            policy,
            ErrorMap(reserved, self._errors, errors),
            retry_on or native.rule(said),
            native,
            said,
            said_by(*partials),
            afresh,
        )

    def initial_header(self, job: Job, task: TaskPolicy, retry: AnyPartial) -> Header:
        """Return the header of a job that is enqueued with its own partial policy (spec section 11).

        Raises InvalidRetryPolicy for one that is invalid, or that no message can carry.
        """
        try:
            wire = task.for_job(retry).to_ojs(only=retry)
            return encode(job._replace(retry=wire, created_at=self.now()), budget=self._budget)
        except (NotExpressible, InvalidState) as error:
            raise InvalidRetryPolicy([str(error)]) from None

    def begin(
        self,
        job: Job | InvalidState,
        bare: Job,
        task: TaskPolicy,
        *,
        publication: str = "",
        can_wait: bool = True,
        wait: Wait | None = None,
        reserve: bool = True,
    ) -> Begun:
        """Return whether a delivered job runs, waits, was lost, is a late copy, or cannot be read by anybody.

        `job` is what `decode` returned or raised, `bare` what the framework alone says of it; `publication`
        tells one message of the same first run from another, as far as the broker does. Raises StoreError
        when the store cannot say, unless the delivery cannot wait; before, it is asked for as long as `wait`,
        which pauses, says so. What runs within its caller needs no reservation: nobody else can have it.
        """
        begun = self.admit(job, bare, task)
        if isinstance(begun, Refuse):
            return begun
        if task.afresh and job is bare:
            begun = begun.afresh()
        early = self.early(begun.job)
        if early is not None:
            return early
        found: Begun = begun
        if reserve:
            first = begun.job.next_retry_at is None
            found = self._reservations.reserve(
                begun, publication if first else "", can_wait=can_wait, wait=wait
            )
        if isinstance(found, Run) and self._events:
            # It is reserved: nothing may keep it from its handler any more.
            with Harmless(found.job):
                self._events.emit([events.started(found.job, self.now())])
        return found

    def early(self, job: Job) -> Postpone | None:
        """Return the postponement of a job that came before its time, whoever is to run it then."""
        due = job.next_retry_at
        return Postpone(job, due) if due and due > self.now() else None

    def admit(self, job: Job | InvalidState, bare: Job, task: TaskPolicy) -> Run | Refuse:
        """Return the run of a job under its own policy, whether it begins now or began elsewhere."""
        if isinstance(job, InvalidState):
            return self.refuse(bare, job)
        try:
            policy = task.for_job(job.retry)
        except InvalidRetryPolicy as error:
            return self.refuse(job, error)
        return Run(job, policy, task, time.monotonic())

    def resume(
        self,
        job: Job | InvalidState,
        bare: Job,
        task: TaskPolicy,
        *,
        publication: str = "",
        process: int | None = None,
    ) -> Run | Drop | Postpone | Refuse:
        """Return the run of a job that a process began which is dead now, as this one knows for certain.

        Or that it is to be dropped, because that process, on this machine and of that number if it is known,
        had ended it before it died, or postponed, because it had only found that somebody else runs it, or
        that it came early.
        """
        begun = self.admit(job, bare, task)
        if isinstance(begun, Refuse):
            return begun
        if task.afresh and job is bare:
            begun = begun.afresh()
        early = self.early(begun.job)
        if early is not None:
            return early
        found = self._reservations.reserve_from(process, begun, publication)
        if isinstance(found, (Drop, Postpone)):
            return found
        return found._replace(job=found.job._replace(next_retry_at=None), abandoned=True)

    def refuse(self, job: Job, error: InvalidState | InvalidRetryPolicy) -> Refuse:
        """Return the refusal of a job whose state or policy cannot be read, or carried any further."""
        failure = Failure(error.type, str(error))
        return Refuse(job, DeadLetter("invalid", failure, f"attempt {job.attempt} was not run: {error}"))

    def unbegun(self, job: Job, error: Exception) -> Refuse:
        """Return the refusal of a job that could not be begun, whatever stood in the way of it."""
        why = cut(safe_repr(error), MAX_MESSAGE)
        return self.refuse(job, InvalidState(f"the job could not be begun: {why}"))

    def impossible(self, job: Job, decision: Decision | None, error: Exception) -> DeadLetter:
        """Return the decision for a job whose own message stands in the way of what was decided."""
        why = cut(safe_repr(error), MAX_MESSAGE)
        failure = getattr(decision, "failure", None) or Failure("bridge.undeliverable", why)
        return DeadLetter("invalid", failure, f"attempt {job.attempt} cannot be followed up: {why}")

    def judge(self, run: Run, outcome: BaseException | Outcome) -> Decision:
        """Return what becomes of a job: its handler raised, came to an outcome, or succeeded (None)."""
        if isinstance(outcome, BaseException):
            outcome = outcome_of(outcome, run.task.errors, run.retry_on.rules_out(outcome))
        capped = outcome is None or not run.task.keeps_waits(run.job.retry)
        return decide(run.policy, run.job, outcome, now=self.now(), rng=self._rng, capped=capped)

    def after(self, job: Job, decision: Decision) -> Job:
        """Return the job as it goes on, or as it ends: with its failure recorded (spec section 10)."""
        match decision:
            case RetryAt():
                return job.failed(decision.failure, at=self.now(), next_at=decision.at)
            case Snooze():
                return job.snoozed(decision.at)
            case Discard() | DeadLetter():
                return job.failed(decision.failure, at=self.now())
            case _:
                return job

    def header(self, job: Job, *, ended: bool = False) -> Header:
        """Return a job's `ojs` header; with a store, the errors it has no room for are kept there.

        Not those of a job that has `ended`, whose dead letter takes them all. Raises InvalidState when the
        state is too long for any message.
        """
        return self.context.history.header(job, ended=ended)

    def bury(
        self,
        begun: Run | Refuse,
        job: Job,
        decision: DeadLetter,
        framework: str,
        message: Mapping[str, Any],
    ) -> None:
        """Write a dead letter to the store with the job's whole history (DLQ-001, DLQ-002).

        `job` is the job as `after` returned it. Raises StoreError, and TakenOver.
        """
        store, policy = self._needed(), begun.policy if isinstance(begun, Run) else RetryPolicy()
        errors = self.context.history.whole(job)
        letter = letter_of(job, decision, policy, framework, message, errors, at=self.now())
        self._write(begun, lambda settle: store.bury(letter, settle))

    def parks(self, at: datetime) -> bool:
        """Return whether what is due at a time waits in the store rather than in the broker."""
        return self.store is not None and at - self.now() > self.park_after

    def park(
        self,
        begun: Run | Refuse | Postpone,
        job: Job,
        at: datetime,
        reason: str,
        framework: str,
        message: Mapping[str, Any],
    ) -> None:
        """Write a parked retry to the store; `job` is the job as `after` returned it.

        Raises StoreError, and TakenOver.
        """
        store, limit = self._needed(), begun.policy.max_attempts if isinstance(begun, Run) else job.attempt
        state = self.header(job).state
        parked = parked_of(
            job, at, reason, framework, message, state, max_attempts=limit, parked_at=self.now()
        )
        self._write(begun, lambda settle: store.park(parked, settle))

    def _write(self, begun: Run | Refuse | Postpone, write: Callable[[Settle | None], bool]) -> None:
        """Write something to the store that ends a run, and settle its reservation in the same step."""
        if not isinstance(begun, Run) or begun.reservation is None:
            self.insist(lambda: write(None))
        elif not self._reservations.settle_with(begun, write):
            raise TakenOver(begun.job)

    def _needed(self) -> Store:
        if self.store is None:
            raise StoreError("this bridge has no store")
        return self.store

    def insist(self, operation: Callable[[], T], retry_on: tuple[type[Exception], ...] = (StoreError,)) -> T:
        """Return what an operation on the store or the broker returns, under the bridge's `storage_retry`."""
        return self.context.insistence.run(operation, retry_on)

    def at_once(self) -> AbstractContextManager[None]:
        """Have what this thread asks of the store and the broker tried once, because it must not wait."""
        return self.context.insistence.at_once()

    def check(self, run: Run | Refuse) -> None:
        """Raise TakenOver for a run whose reservation ran out and was taken over: nothing it says counts.

        The store is asked only where the reservation may have run out by this process's own clock.
        """
        if isinstance(run, Run) and run.reservation and time.monotonic() - run.since >= self._surely_held:
            self._reservations.check(run)

    def settle(self, run: Run | Refuse, decision: Decision) -> None:
        """Settle a run whose decision was carried out, and tell the log and the listeners; never raises."""
        if isinstance(run, Run):
            with Harmless(run.job):
                if isinstance(decision, GiveBack):
                    self._reservations.release(run)
                else:
                    self._reservations.settle(run)
        self._conclude(run, decision)

    def settle_with(self, run: Run, step: Callable[[Settle], bool]) -> None:
        """Settle a run that succeeded in one step with its acknowledgement, `step`; raises StoreError."""
        if not self._reservations.settle_with(run, step):
            was_lost(run.job)
        self._conclude(run, Complete())

    def _conclude(self, run: Run | Refuse, decision: Decision) -> None:
        job = run.job
        if not isinstance(decision, Complete):
            with Harmless(job):
                events.log(job, decision)
        if self._events:
            with Harmless(job):
                self._tell(run, decision)
        if (job.errors or job.errors_dropped) and isinstance(decision, (Complete, Discard)):
            with Harmless(job):
                self.context.history.forget(job)

    def _tell(self, run: Run | Refuse, decision: Decision) -> None:
        policy, since = (run.policy, run.since) if isinstance(run, Run) else (RetryPolicy(), time.monotonic())
        seconds = time.monotonic() - since
        limit = policy.max_attempts
        self._events.emit(events.of(run.job, decision, max_attempts=limit, seconds=seconds, at=self.now()))

    def release(self, run: Run) -> None:
        """Release the reservation of a run that its process does not end; never raises."""
        with Harmless(run.job):
            self._reservations.release(run)

    def settle_natively(self, run: Run) -> None:
        """Settle the reservation of a run whose job the framework itself ends; never raises."""
        with Harmless(run.job):
            self._reservations.settle(run)

    def expire(self, run: Run) -> None:
        """Extend the reservation of a run no more, because its outcome has no place but this worker.

        If the worker dies, the next delivery after the reservation ran out is a lost attempt.
        """
        self._reservations.expire(run)

    def acknowledged(self, reservation: Reservation | None) -> None:
        """Take note that the broker has deleted a reservation's message: it cannot come again."""
        self._reservations.acknowledged(reservation)

    def give_up(self, parked: Parked, error: Exception) -> None:
        """Keep a parked retry that nobody can publish as a dead letter."""
        job = job_of_parked(parked)
        decision = self.impossible(job, None, error)
        begun = Refuse(job, decision)
        self.bury(begun, self.after(job, decision), decision, parked.framework, parked.message)
        self.settle(begun, decision)

    def close(self) -> None:
        """Settle and release the reservations that are left to be; never raises."""
        with suppress(StoreError):
            self._reservations.close()
