"""The engine of a bridge: it begins a job, judges its outcome, and carries the decision out."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Collection
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

from ..errors import ConfigurationError, InvalidRetryPolicy, InvalidState, NotExpressible, StoreError
from ..rules.backoff import Rng
from ..rules.decision import DeadLettered, Decision, SnoozeUntil, decide
from ..rules.dependencies import Dependencies
from ..rules.failures import MAX_MESSAGE, ErrorMap, Errors, Failure, Outcome, cut, outcome_of, safe_repr
from ..rules.job import Header, Job, encode
from ..rules.policy import AnyPartial, check_errors
from ..store import MEMORY, Parked, Reservation
from . import events
from .breakers import Breakers
from .budgets import Budgets
from .carrying import Carrying, Settling
from .context import Context
from .events import harmless
from .holds import KnownHolds
from .instruments import Instrument
from .layers import Layers, TaskPolicy
from .limits import Argument, Limits
from .outbox import Outbox
from .reservations import Reservations, Wait
from .runs import Admission, DeadQueues, Drop, Held, Lost, Postpone, Publisher, Refuse, Run
from .storage_retry import Outage
from .storing import Storing, job_of_parked

logger = logging.getLogger("ojs_bridge")

#: How many seconds the clocks of a worker and its store may differ before a worker says so.
MAX_SKEW = 2.0


class Engine:
    """The retry semantics of one bridge, for the adapters.

    `retry` is the app's default policy, and `errors` its error map.
    """

    def __init__(
        self,
        context: Context,
        *,
        retry: AnyPartial | None,
        errors: Errors,
        dependencies: Dependencies,
        reservation: timedelta,
        park_after: timedelta,
        fail_open: bool,
        settle_behind: bool,
        out_of_reach: timedelta,
    ) -> None:
        self.context = context
        self.store = context.store
        #: Returns the time, in UTC.
        self.now = context.clock
        self.instruments = context.instruments
        store = context.store
        self.reservations = Reservations(
            *(store.reservations if store else None, context.storage_retry, reservation, context.clock),
            fail_open=fail_open,
            # A store in memory is a test's, which has one thread.
            settle_behind=settle_behind and not (store and store.is_in_memory),
            out_of_reach=out_of_reach,
        )
        self.outbox = Outbox(context, self.give_up)
        #: The dependencies of each job type.
        self.dependencies = dependencies
        self.breakers = Breakers(context, dependencies) if dependencies else None
        self.holds = self.breakers.known if self.breakers else None
        if store and not self.holds:
            self.holds = KnownHolds(store.documents, context.clock, dependencies)
        #: The limits of dependencies: those that they have, or that an operator gives them.
        self.limits = None
        publish = partial(self.outbox.expect, seconds=0.0)
        if store and dependencies and self.holds:
            self.limits = Limits(store, context.clock, dependencies, self.holds, publish)
        #: The budgets of retries, if a dependency has one.
        self.budgets = Budgets(context, dependencies, publish) if dependencies.budgets else None
        self.storing = Storing(context, self.reservations, park_after)
        self.settling = Settling(
            *(context, self.reservations, self.storing, self.limits, reservation, park_after), self.breakers
        )
        self.carrying = Carrying(context, self.storing)
        #: Of the store or the broker: all threads of a worker tell of it in one line.
        self.outage = Outage()
        #: Whether nobody needs to know that a job has begun.
        self.is_silent = store is None and self.breakers is None and not context.events.listeners
        self._retry = retry
        self._errors = errors
        self._rng: Rng = random
        self._fail_open = fail_open
        # An invalid default policy is raised here, not when the first job fails.
        self.task()

    def register(self, framework: str, publisher: Publisher, dead_queues: DeadQueues | None = None) -> None:
        """Take the publisher and the dead queues of an app or broker.

        Raises ConfigurationError for a second app or broker of one framework: a dead letter does not say from
        which of them it came.
        """
        if self.context.publishers.setdefault(framework, publisher) != publisher:
            raise ConfigurationError(
                f"this bridge already serves another {framework} app or broker: give each a bridge of its own"
            )
        if dead_queues is not None:
            self.context.dead_queues[framework] = dead_queues

    def instrument(self, instrument: Instrument) -> None:
        """Let an instrument watch all jobs from now on."""
        self.instruments.add(instrument)
        self.is_silent = False

    def try_store(self, dead_queue: str, *, is_program: bool = False) -> None:
        """Prepare the store as a worker starts; the log says if the store is missing or does not work.

        Raises ConfigurationError for a store in memory if the worker is a program of its own: no other
        process sees what it keeps, and what it keeps is gone with it.
        """
        if is_program and self.store and self.store.is_in_memory:
            raise ConfigurationError(
                f"store: {MEMORY!r} is in one process only, for tests, and this worker is a process of its "
                "own: name a store that processes share, such as sqlite:///ojs.db"
            )
        if self.store is None:
            logger.warning(
                "no store: the attempt of a killed worker does not count, long delays wait in the memory of "
                "workers, and dead letters go to %s; set Bridge(store=...) or OJS_BRIDGE_STORE",
                dead_queue,
            )
            if self.breakers:
                logger.warning("no store: each process has breakers and budgets of its own")
            return
        try:
            self.store.prepare()
            self.reservations.prove()
            apart = abs((self.store.clock() - self.now()).total_seconds())
        except StoreError as error:
            if self._fail_open:
                logger.error("until the store works, dead letters go to %s: %s", dead_queue, error)
            else:
                self.outage.meet(error)
            return
        if is_program and self.store.is_on_one_host:
            logger.warning(
                "the store is a SQLite file: all workers must run on this host, and share the file"
            )
        if apart > MAX_SKEW:
            logger.error(
                "this machine's clock and the store's are %.1f s apart: retries run early or late, and live "
                "jobs may be taken for lost; set the clocks",
                apart,
            )

    def tell_unused(self, types: Collection[str], what: str) -> None:
        """Tell the log which dependencies, or patterns of them, need none of some types; each is a `what`."""
        for name, pattern in self.dependencies.unused(types):
            if pattern:
                logger.warning("dependency %s: jobs: %r matches no %s", name, pattern, what)
            else:
                logger.warning(
                    "dependency %s: its limits are about no job: it has no jobs, and no %s names it",
                    name,
                    what,
                )

    def start_threads(self) -> None:
        """Start the threads that the first job would start; never raises.

        Up to Python 3.11 an interrupt for a thread may strike the thread that it is just starting. Then the
        first waits for ever, and so does every thread that starts another. A thread that cannot be started
        now is started by the first job.
        """
        for start in (self.context.events.start, self.settling.start, *self.reservations.starts()):
            with suppress(RuntimeError, StoreError):
                start()

    def store_answers(self) -> bool:
        """Return whether jobs can begin now; without a store they always can begin."""
        try:
            self.reservations.prove()
        except StoreError:
            return False
        return True

    def task(
        self,
        layers: Layers | None = None,
        *,
        errors: Errors | None = None,
        reserved: Errors | None = None,
        afresh: bool = False,
    ) -> TaskPolicy:
        """Resolve the settings of one task or actor, which lie over the app's; raises InvalidRetryPolicy.

        `reserved` is the adapter's own error map, as from time limits to `timeout`; the other maps win over
        it. With `afresh` a job without a header that is beyond its limit begins at attempt 1.
        """
        layers = replace(layers or Layers(), app=self._retry)
        policy = layers.policy()
        check_errors(policy)
        return TaskPolicy(
            layers, policy, ErrorMap(reserved, self._errors, errors, loaded=sys.modules), afresh
        )

    def initial_header(self, job: Job, task: TaskPolicy, retry: AnyPartial) -> Header:
        """Return the header of a job that is enqueued with its own partial policy (spec section 11).

        Raises InvalidRetryPolicy for a policy that is invalid, or that no message can carry.
        """
        try:
            wire = replace(task.layers, job=retry).policy().to_ojs(only=retry)
            check_errors(retry)
            return encode(job._replace(retry=wire, created_at=self.now()), budget=self.context.budget)
        except (NotExpressible, InvalidState) as error:
            raise InvalidRetryPolicy([str(error)]) from None

    def begin(
        self,
        job: Job | InvalidState,
        bare: Job,
        task: TaskPolicy,
        *,
        publication: str = "",
        redelivered: bool = False,
        can_wait: bool = True,
        wait: Wait | None = None,
        reserve: bool = True,
        argument: Argument = lambda _name: None,
    ) -> Admission:
        """Return whether a delivered job runs, is held, waits, was lost, is a late copy, or cannot be read.

        `job` is the job by its header, or the error in its header; `bare` is the job as the framework alone
        knows it. `publication` is the broker's name for the message, if it has one. A message is
        `redelivered` if the broker has lost its connection to the worker that had it. If the store does not
        answer, it is asked again as long as `wait`, which pauses, returns True; then this raises StoreError,
        unless the delivery cannot wait. A job that runs within its caller needs no reservation. `argument`
        returns an argument of the job by its name.
        """
        admitted = self.admit(job, bare, task)
        if isinstance(admitted, Refuse):
            return admitted
        admission: Admission = self.early(admitted.job) or admitted
        if isinstance(admission, Postpone):
            return admission
        try:
            if reserve:
                admission = self.reservations.reserve(
                    admitted, _sender(job, bare, publication), can_wait=can_wait, wait=wait, gone=redelivered
                )
                if isinstance(admission, Run) and (
                    held := self._held(admission, argument, can_wait=can_wait, wait=wait)
                ):
                    return Held(admission, held)
            if isinstance(admission, Run) and admission.job.operation:
                self.settling.tell_operation(admission.job, None)
            if isinstance(admission, Run) and self.context.events.listeners:
                job = admission.job
                # The attempt is reserved: no error may keep the job from its handler any more.
                harmless(job, lambda: self.context.events.emit([events.started(job, self.now())]))
            if isinstance(admission, Lost):
                self.reservations.keep(admission)
        except BaseException:
            # Not only a StoreError: memory may run out, or an interrupt break in. A lost attempt has begun.
            if reserve and self.reservations.heart and not isinstance(admission, Lost):
                self.reservations.heart.forgo(Reservation(admitted.job.key, admitted.job.fence))
            raise
        return admission

    def _held(self, run: Run, argument: Argument, *, can_wait: bool, wait: Wait | None) -> SnoozeUntil | None:
        """Return until when a hold or a limit keeps a reserved job from its begin, if one does."""
        job, budgets, limits = run.job, self.budgets, self.limits
        if self.holds and (hold := self.holds.of(job)):
            return self.holds.decision(hold, job)
        # A breaker would wait for ever for a probe that a budget holds.
        if budgets and self.breakers and self.breakers.probed_by(job):
            budgets = None
        while budgets or limits:
            try:
                if budgets and (held := budgets.hold(job)):
                    return held
                budgets = None  # it has had its turn
                return limits.hold(job, run.reservation, argument) if limits else None
            except StoreError as error:
                if self._fail_open or not can_wait:
                    logger.warning("job %s: begins, and its limits are not known: %s", job, error)
                    break
                if wait is None or not wait(error):
                    raise
        return None

    def early(self, job: Job) -> Postpone | None:
        """Return the postponement of a job that came before its time, or None."""
        due = job.next_retry_at
        return Postpone(job, due) if due and due > self.now() else None

    def admit(self, job: Job | InvalidState, bare: Job, task: TaskPolicy) -> Run | Refuse:
        """Return the run of a job under its own policy; it may have begun elsewhere."""
        if isinstance(job, InvalidState):
            return self.refuse(bare, job)
        try:
            own = task.of_job(job.retry)
        except InvalidRetryPolicy as error:
            return self.refuse(job, error)
        if task.afresh and job is bare and job.attempt > own.policy.runs:
            job = job._replace(attempt=1)
        return Run(job, own.policy, own, time.monotonic())

    def resume(
        self,
        job: Job | InvalidState,
        bare: Job,
        task: TaskPolicy,
        *,
        publication: str = "",
        process: int | None = None,
    ) -> Run | Drop | Postpone | Refuse:
        """Return the run of a job that another process of this machine began, which is dead now.

        `process` is the number of that process, if it is known. The job is dropped if that process had ended
        it. It is postponed if another worker runs it, or if it came early.
        """
        run = self.admit(job, bare, task)
        if isinstance(run, Refuse):
            return run
        if early := self.early(run.job):
            return early
        reserved = self.reservations.reserve_from(process, run, _sender(job, bare, publication))
        if isinstance(reserved, (Drop, Postpone)):
            return reserved
        return reserved._replace(job=reserved.job._replace(next_retry_at=None), abandoned=True)

    def refuse(self, job: Job, error: Exception) -> Refuse:
        """Return the refusal of a job that cannot be read, or that any error kept from being begun."""
        if not isinstance(error, (InvalidState, InvalidRetryPolicy)):
            error = InvalidState(f"the job could not be begun: {cut(safe_repr(error), MAX_MESSAGE)}")
        failure = Failure(error.type, str(error))
        return Refuse(job, DeadLettered("invalid", failure, f"attempt {job.attempt} was not run: {error}"))

    def judge(self, run: Run, outcome: BaseException | Outcome) -> Decision:
        """Return the decision about a job whose handler raised, came to an outcome, or succeeded (None)."""
        if isinstance(outcome, BaseException):
            outcome = outcome_of(outcome, run.task.errors, run.task.layers.retries.rules_out(outcome))
        capped = outcome is None or not run.task.layers.waits_are_native
        is_measured = outcome and self.instruments.all
        with self.instruments.step("ojs.retry.evaluate", run.job) if is_measured else nullcontext():
            decision = decide(run.policy, run.job, outcome, now=self.now(), rng=self._rng, capped=capped)
        return self.breakers.spare(run, decision) if self.breakers else decision

    def give_up(self, parked: Parked, error: Exception) -> None:
        """Keep a parked job that cannot be published as a dead letter."""
        job = job_of_parked(parked)
        decision = self.carrying.impossible(job, None, error)
        run = Refuse(job, decision)
        self.storing.bury(run, self.carrying.after(job, decision), decision, parked.framework, parked.message)
        self.settling.settle(run, decision)

    def close(self) -> None:
        """Publish the jobs of transactions, and settle and release what still has to be; never raises."""
        self.outbox.close()
        with suppress(StoreError):
            self.reservations.close()


def _sender(job: Job | InvalidState, bare: Job, publication: str) -> str:
    """Return the publication of a message that a user has sent; "" for one that the bridge has sent on.

    The bridge may send a job on twice, and the second message is a copy. A user who sends a job twice has two
    jobs.
    """
    if isinstance(job, Job) and job.publication:
        return job.publication
    by_user = job is bare or (isinstance(job, Job) and job.fence == 0 and job.next_retry_at is None)
    return publication if by_user else ""
