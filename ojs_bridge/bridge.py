"""The one coordinator both adapters call: begin a job, judge its outcome, keep its dead letter."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from . import events
from .backoff import Rng
from .dead_letters import DeadLetters, Publisher
from .decision import Complete, DeadLetter, Decision, Discard, RetryAt, Snooze, decide
from .errors import ConfigurationError, InvalidRetryPolicy, InvalidState, NotExpressible
from .failures import MAX_MESSAGE, ErrorMap, Failure, Mapped, Outcome, cut, outcome_of, safe_repr
from .job import HEADER_BUDGET, MIN_HEADER_BUDGET, MIN_HISTORY, ErrorEntry, Header, Job, encode, is_cut
from .policy import PartialPolicy, RetryPolicy
from .store import Letter, Store, StoreError, open_store

logger = logging.getLogger("ojs_bridge")


@dataclass(frozen=True, slots=True)
class TaskPolicy:
    """What one task or actor is retried under: its own settings over the app's, resolved once."""

    partials: tuple[PartialPolicy | None, ...]
    policy: RetryPolicy
    errors: ErrorMap

    def for_job(self, retry: PartialPolicy | None) -> RetryPolicy:
        """Return the policy of a job that brings its own partial one; raises InvalidRetryPolicy."""
        return RetryPolicy.merge(*self.partials, retry) if retry else self.policy


@dataclass(frozen=True, slots=True)
class Run:
    """The handler is to run now, under this policy; `since` is the monotonic time it began."""

    job: Job
    policy: RetryPolicy
    errors: ErrorMap
    since: float


@dataclass(frozen=True, slots=True)
class Postpone:
    """The delivery came before its time: deliver it again at `at`."""

    job: Job
    at: datetime


@dataclass(frozen=True, slots=True)
class Refuse:
    """The message cannot be run under any policy that somebody can read; its decision is to keep it."""

    job: Job
    decision: DeadLetter


class Bridge:
    """Retry semantics of the Open Job Spec for the apps and brokers that are given this bridge.

    Every argument is optional; missing ones are read from OJS_BRIDGE_STORE, OJS_BRIDGE_NAMESPACE and
    OJS_BRIDGE_RETRY (a JSON object). Raises InvalidRetryPolicy and ConfigurationError.
    """

    def __init__(
        self,
        store: str | Store | None = None,
        retry: PartialPolicy | None = None,
        errors: Mapping[type[BaseException], Mapped] | None = None,
        listeners: Sequence[events.Listener] = (),
        *,
        namespace: str | None = None,
        history: int = MIN_HISTORY,
        header_budget: int = HEADER_BUDGET,
    ) -> None:
        self._history = _at_least("history", history, MIN_HISTORY, " (spec section 10.1)")
        self._budget = _at_least("header_budget", header_budget, MIN_HEADER_BUDGET, " bytes")
        self.store = _store(store, namespace or os.environ.get("OJS_BRIDGE_NAMESPACE") or "ojs")
        self.retry = retry if retry is not None else _retry_from_environment()
        self.publishers: dict[str, Publisher] = {}
        self._errors = _error_map(errors)
        self._rng: Rng = random
        self._events = events.Dispatcher(_listeners(listeners))
        #: Whether anybody listens to events.
        self.listened_to = bool(self._events)
        self.task()
        self.dead_letters = DeadLetters(
            self.store, self.publishers, encode=self._encode, clock=self.now, emit=self._emit
        )

    def register(self, framework: str, publisher: Publisher) -> None:
        """Take the publisher of an app or broker, for replays; raises ConfigurationError for a second one.

        A dead letter does not say which app or broker it came from.
        """
        if self.publishers.setdefault(framework, publisher) != publisher:
            raise ConfigurationError(
                f"this bridge already serves another {framework} app or broker: give each a bridge of its own"
            )

    def try_store(self, dead_queue: str) -> None:
        """Say in the log, when a worker starts, what goes without a store or with one that does not work."""
        if self.store is None:
            logger.warning(
                "no store: dead letters go to %s, where they are not searched or replayed; "
                "set Bridge(store=...) or OJS_BRIDGE_STORE",
                dead_queue,
            )
            return
        try:
            self.store.prepare()
        except StoreError as error:
            logger.error("until the store works, dead letters go to %s: %s", dead_queue, error)

    def now(self) -> datetime:
        """Return the time, in UTC."""
        return datetime.now(timezone.utc)

    def task(
        self,
        *partials: PartialPolicy | None,
        errors: Mapping[type[BaseException], Mapped] | None = None,
        reserved: Mapping[type[BaseException], Mapped] | None = None,
    ) -> TaskPolicy:
        """Resolve the settings of one task or actor, later partials winning; raises InvalidRetryPolicy.

        `reserved` is the adapter's own map, such as time limits to `timeout`; everybody else's wins over it.
        """
        layers = (self.retry, *partials)
        return TaskPolicy(layers, RetryPolicy.merge(*layers), ErrorMap(reserved, self._errors, errors))

    def initial_header(self, job: Job, task: TaskPolicy, retry: PartialPolicy) -> Header:
        """Return the header of a job that is enqueued with its own partial policy (spec section 11).

        Raises InvalidRetryPolicy for one that is invalid, or that no message can carry.
        """
        try:
            wire = task.for_job(retry).to_ojs(only=retry)
            return encode(replace(job, retry=wire, created_at=self.now()), budget=self._budget)
        except (NotExpressible, InvalidState) as error:
            raise InvalidRetryPolicy([str(error)]) from None

    def begin(self, job: Job | InvalidState, bare: Job, task: TaskPolicy) -> Run | Postpone | Refuse:
        """Return whether a delivered job runs, waits for its time, or is kept because nobody can read it.

        `job` is what `decode` returned or raised, `bare` what the framework alone says of it.
        """
        begun = self.admit(job, bare, task)
        if isinstance(begun, Refuse):
            return begun
        due = begun.job.next_retry_at
        if due and due > self.now():
            return Postpone(begun.job, due)
        if self._events:
            self._events.emit([events.started(begun.job, self.now())])
        return begun

    def admit(self, job: Job | InvalidState, bare: Job, task: TaskPolicy) -> Run | Refuse:
        """Return the run of a job under its own policy, whether it begins now or began elsewhere."""
        if isinstance(job, InvalidState):
            return self.refuse(bare, job)
        try:
            policy = task.for_job(job.retry)
        except InvalidRetryPolicy as error:
            return self.refuse(job, error)
        return Run(job, policy, task.errors, time.monotonic())

    def refuse(self, job: Job, error: InvalidState | InvalidRetryPolicy) -> Refuse:
        """Return the refusal of a job whose state or policy cannot be read, or carried any further."""
        failure = Failure(error.type, str(error))
        return Refuse(job, DeadLetter("invalid", failure, f"attempt {job.attempt} was not run: {error}"))

    def impossible(self, job: Job, decision: Decision | None, error: Exception) -> DeadLetter:
        """Return the decision for a job whose own message stands in the way of what was decided."""
        why = cut(safe_repr(error), MAX_MESSAGE)
        failure = getattr(decision, "failure", None) or Failure("bridge.undeliverable", why)
        return DeadLetter("invalid", failure, f"attempt {job.attempt} cannot be followed up: {why}")

    def judge(self, run: Run, outcome: BaseException | Outcome) -> Decision:
        """Return what becomes of a job: its handler raised, came to an outcome, or succeeded (None)."""
        if isinstance(outcome, BaseException):
            outcome = outcome_of(outcome, run.errors)
        return decide(run.policy, run.job, outcome, now=self.now(), rng=self._rng)

    def after(self, job: Job, decision: Decision) -> Job:
        """Return the job as it goes on, or as it ends: with its failure recorded (spec section 10)."""
        match decision:
            case RetryAt():
                return job.failed(decision.failure, at=self.now(), next_at=decision.at)
            case Snooze():
                return job.due(decision.at)
            case Discard() | DeadLetter():
                return job.failed(decision.failure, at=self.now())
            case _:
                return job

    def header(self, job: Job, *, ended: bool = False) -> Header:
        """Return a job's `ojs` header; with a store, the errors it has no room for are kept there.

        Not those of a job that has `ended`, whose dead letter takes them all. Raises InvalidState when the
        state is too long for any message.
        """
        header = self._encode(job)
        if header.left_out and self.store and not ended:
            try:
                self.store.keep_errors(job.id, header.left_out)
            except StoreError:
                logger.exception(
                    "job %s: %d entries of its error history are not kept", job.id, len(header.left_out)
                )
        return header

    def _encode(self, job: Job) -> Header:
        return encode(job, history=self._history, budget=self._budget)

    def bury(
        self, job: Job, decision: DeadLetter, policy: RetryPolicy, framework: str, message: Mapping[str, Any]
    ) -> None:
        """Write a dead letter to the store with the job's whole history (DLQ-001, DLQ-002).

        `job` is the job as `after` returned it. Raises StoreError.
        """
        if self.store is None:
            raise StoreError("this bridge has no store")
        self.store.bury(
            Letter(
                id=job.id,
                type=job.type,
                queue=job.queue,
                framework=framework,
                attempt=job.attempt,
                max_attempts=policy.max_attempts,
                cause=decision.cause,
                reason=decision.reason,
                discarded_at=self.now(),
                message=message,
                errors=self._whole_history(job),
                retry=job.retry,
                created_at=job.created_at,
                replay_count=job.replay_count,
            )
        )

    def _whole_history(self, job: Job) -> tuple[ErrorEntry, ...]:
        """Return every entry, those that the message has no room for from the store."""
        if self.store is None or not _is_kept_elsewhere(job):
            return job.errors
        carried = {job.errors_dropped + index: entry for index, entry in enumerate(job.errors)}
        whole = {place: entry for place, entry in carried.items() if not is_cut(entry)}
        kept = dict(self.store.kept_errors(job.id))
        length = job.errors_dropped + len(job.errors)
        if len(kept) + len(whole) < length and (earlier := self.store.get(job.id)):
            # This delivery has ended before, and came again because it was not acknowledged in time.
            kept = {**dict(enumerate(earlier.errors[:length])), **kept}
        history = {**carried, **kept, **whole}
        return tuple(history[place] for place in sorted(history))

    def settled(self, run: Run | Refuse, decision: Decision) -> None:
        """Tell the log and the listeners of a decision that was carried out; never raises."""
        job = run.job
        with _harmless(job):
            events.log(job, decision)
        if self._events:
            with _harmless(job):
                self._tell(run, decision)
        if self.store and isinstance(decision, (Complete, Discard)) and _is_kept_elsewhere(job):
            with _harmless(job):
                self.store.forget_errors(job.id)

    def _tell(self, run: Run | Refuse, decision: Decision) -> None:
        policy, since = (run.policy, run.since) if isinstance(run, Run) else (RetryPolicy(), time.monotonic())
        seconds = time.monotonic() - since
        limit = policy.max_attempts
        self._events.emit(events.of(run.job, decision, max_attempts=limit, seconds=seconds, at=self.now()))

    def flush(self, seconds: float = 2.0) -> bool:
        """Wait until the listeners have heard every event, `seconds` at most; return whether they have."""
        return self._events.flush(seconds)

    def _emit(self, event: events.Event) -> None:
        if self._events:
            self._events.emit([event])


@contextmanager
def _harmless(job: Job) -> Iterator[None]:
    """Log what fails after a decision was carried out: the job has its place already."""
    try:
        yield
    except Exception:
        with suppress(Exception):
            logger.exception("job %s: what follows a decision failed; the job is not affected", job.id)


def _is_kept_elsewhere(job: Job) -> bool:
    return job.errors_dropped > 0 or any(is_cut(entry) for entry in job.errors)


def _at_least(name: str, value: object, least: int, unit: str) -> int:
    if type(value) is not int or value < least:
        raise ConfigurationError(f"{name}: {value!r} must be at least {least}{unit}")
    return value


def _store(store: str | Store | None, namespace: str) -> Store | None:
    found = store if store is not None else os.environ.get("OJS_BRIDGE_STORE") or None
    if isinstance(found, str):
        return open_store(found, namespace)
    if found is None or isinstance(found, Store):
        return found
    raise ConfigurationError(f"store: {found!r} is neither a URL such as sqlite:///ojs.db nor a store")


def _retry_from_environment() -> PartialPolicy | None:
    text = os.environ.get("OJS_BRIDGE_RETRY")
    if not text:
        return None
    try:
        partial: PartialPolicy = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"OJS_BRIDGE_RETRY: {text!r} is not JSON: {error}") from None
    try:
        RetryPolicy.merge(partial)
    except InvalidRetryPolicy as error:
        raise InvalidRetryPolicy([f"OJS_BRIDGE_RETRY: {problem}" for problem in error.problems]) from None
    return partial


def _error_map(errors: Mapping[type[BaseException], Mapped] | None) -> dict[type[BaseException], Mapped]:
    if errors is not None and not isinstance(errors, Mapping):
        raise ConfigurationError(f"errors: {errors!r} must map exception classes to error types")
    return dict(errors or {})


def _listeners(listeners: Sequence[events.Listener]) -> Sequence[Callable[[events.Event], object]]:
    if callable(listeners) or not isinstance(listeners, Iterable):
        raise ConfigurationError(f"listeners: {listeners!r} must be a list of callables")
    listeners = tuple(listeners)
    for listener in listeners:
        if not callable(listener):
            raise ConfigurationError(f"listeners: {listener!r} is not callable")
    return listeners
