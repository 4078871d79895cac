"""One run of a Celery task: begin, run, have it judged, execute the decision."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown, WorkerTerminate
from kombu.exceptions import OperationalError

from ..bridge import Bridge, Postpone, Refuse, Run
from ..decision import DeadLetter, Decision, RetryAt, Snooze
from ..errors import InvalidState
from ..failures import Failure, Outcome, outcome_of
from ..job import Job, decode
from ..policy import RetryPolicy
from ..store import StoreError
from . import wire as wires
from .attach import FRAMEWORK, attach, task_policy
from .wire import HEADER, Wire

logger = logging.getLogger("ojs_bridge")

NOT_NAMED = "which the task's autoretry_for does not name"
#: Seconds before a delivery goes back to a broker or store that could not be reached.
PAUSE = 1.0


class HandlerFailed(Exception):
    """Stands for what a task raised and Celery's pools cannot carry, such as MemoryError or SystemExit."""


class RefusedJob(Exception):
    """The message's retry state or policy cannot be read, so its task was not run."""


@dataclass
class Wish:
    """What `self.retry(...)` asked for, and the exception that says so."""

    exc: BaseException | None
    args: Any
    kwargs: Any
    eta: Any
    countdown: float | None
    options: Mapping[str, Any]
    signal: Retry = field(init=False)

    def __post_init__(self) -> None:
        shown = self.exc if isinstance(self.exc, Exception) else None
        self.signal = Retry(exc=shown, when=self.eta or self.countdown)

    def after(self, now: datetime) -> timedelta | None:
        """Return the hint on the delay, if there is one."""
        if isinstance(self.eta, datetime):
            eta = self.eta if self.eta.tzinfo else self.eta.replace(tzinfo=timezone.utc)
            return max(eta - now, timedelta(0))
        return None if self.countdown is None else timedelta(seconds=max(float(self.countdown), 0))


class Execution:
    """One run of a task under the bridge: it translates and executes, it never decides."""

    def __init__(self, task: Task, request: Any, wire: Wire) -> None:
        self.task = task
        self.request = request
        self.wire = wire
        self.bridge: Bridge = attach(task.app)
        self.policy = task_policy(task.app, task)
        self.wish: Wish | None = None

    def run(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the user's code and carry out what is decided; raises what tells Celery of it."""
        begun = self.begin()
        if isinstance(begun, Postpone):
            raise self._postpone(begun)
        if isinstance(begun, Refuse):
            raise self.conclude(begun, begun.decision, RefusedJob(begun.decision.reason))
        try:
            result = body(*args, **kwargs)
        except (Ignore, Reject):
            raise
        except BaseException as exc:  # noqa: BLE001 - what is not the task's own is raised again below
            raised = exc
        else:
            if self.wish is None:
                self.bridge.settled(begun, self.bridge.judge(begun, None))
                return result
            raised = self.wish.signal
        if not self._is_the_tasks_own(raised):
            raise raised
        decision = self.bridge.judge(begun, self._outcome(begun, raised))
        raise self.conclude(begun, decision, self._shown(raised))

    def begin(self) -> Run | Postpone | Refuse:
        """Ask the bridge whether the delivered job runs."""
        bare = self._bare_job()
        return self.bridge.begin(self._job(bare), bare, self.policy)

    def resume(self) -> Run | Refuse:
        """Return the run that another process began and did not end."""
        bare = self._bare_job()
        return self.bridge.admit(self._job(bare), bare, self.policy)

    def conclude(self, begun: Run | Refuse, decision: Decision, shown: Exception) -> Exception:
        """Carry a decision out and return the exception that tells Celery of it.

        What can never be carried out becomes a dead letter; what cannot be now is given back to its queue.
        """
        try:
            signal = self._execute(begun, decision, shown)
        except self._out_of_reach() as error:
            return self._give_back(error, shown)
        except Exception as error:
            logger.exception("job %s: what was decided cannot be carried out", begun.job.id)
            decision = _impossible(begun.job, decision, error)
            try:
                signal = self._execute(begun, decision, shown)
            except Exception as worse:  # noqa: BLE001 - the delivery itself is the last place for the job
                return self._give_back(worse, shown)
        self.bridge.settled(begun, decision)
        return signal

    def _execute(self, begun: Run | Refuse, decision: Decision, shown: Exception) -> Exception:
        match decision:
            case RetryAt() | Snooze():
                return self._send_on(self.bridge.after(begun.job, decision), decision, shown)
            case DeadLetter():
                self._bury(begun, decision)
        return shown

    def _out_of_reach(self) -> tuple[type[BaseException], ...]:
        connection = self.task.app.producer_pool.connections.connection
        return (OperationalError, StoreError, ConnectionError, *connection.recoverable_connection_errors)

    def _give_back(self, error: BaseException, shown: Exception) -> Exception:
        if self.task.acks_late and not self.request.is_eager:
            logger.error("job %s goes back to its queue, its attempt unused: %r", self.request.id, error)
            time.sleep(PAUSE)
            requeued: Exception = Reject(error, requeue=True)
            return requeued
        logger.critical(
            "job %s is lost: it was acknowledged before it ran (acks_late is off), and now %r",
            self.request.id,
            error,
        )
        return shown

    def _send_on(self, job: Job, decision: RetryAt | Snooze, shown: Exception) -> Retry:
        signal = Retry(exc=shown, when=decision.delay, is_eager=self.request.is_eager)
        # The frames of what was raised, so that the traceback shown with RETRY is the task's.
        signal.__traceback__ = shown.__traceback__
        if self.request.is_eager:
            # Eager retries run at once: a due time would only postpone them.
            header = self.bridge.header(replace(job, next_retry_at=None))
            signal.sig = self._eager_signature(job, {**(self.request.headers or {}), HEADER: header})
        else:
            self._publish(decision.at, {"retries": job.attempt - 1, HEADER: self.bridge.header(job)})
        return signal

    def _publish(self, at: datetime, changes: Mapping[str, Any]) -> None:
        wire, wish = self.wire, self.wish
        if wish and (wish.args is not None or wish.kwargs is not None):
            request = self.request
            args = request.args if wish.args is None else wish.args
            kwargs = request.kwargs if wish.kwargs is None else wish.kwargs
            wire = wires.with_arguments(wire, args, kwargs)
        options = wish.options if wish else {}
        wires.publish(self.task.app, wire, {**changes, "eta": at.isoformat()}, due=at, options=options)

    def _postpone(self, begun: Postpone) -> Exception:
        ignored: Exception = Ignore()
        try:
            self._publish(begun.at, {})
        except Exception as error:  # noqa: BLE001 - the delivery itself is the last place for the job
            return self._give_back(error, ignored)
        return ignored

    def _eager_signature(self, job: Job, headers: dict[str, Any]) -> Any:
        wish = self.wish
        return self.task.signature_from_request(
            self.request,
            wish.args if wish else None,
            wish.kwargs if wish else None,
            retries=job.attempt - 1,
            headers=headers,
        )

    def _bury(self, begun: Run | Refuse, decision: DeadLetter) -> None:
        job = self.bridge.after(begun.job, decision)
        policy = begun.policy if isinstance(begun, Run) else RetryPolicy()
        if self.bridge.store is not None:
            try:
                self.bridge.bury(job, decision, policy, FRAMEWORK, wires.to_json(self.wire))
            except StoreError:
                logger.exception("job %s: kept in the broker's dead queue, not in the store", job.id)
            else:
                return
        if not self.request.is_eager:
            wires.bury(self.task.app, self.wire, {"retries": job.attempt, HEADER: self.bridge.header(job)})

    def _bare_job(self) -> Job:
        return Job(
            id=self.request.id,
            type=self.task.name,
            queue=self.wire.queue,
            attempt=1 + (self.request.retries or 0),
            expires=wires.expiry(self.wire.headers),
        )

    def _job(self, bare: Job) -> Job | InvalidState:
        state = self.wire.headers.get(HEADER)
        if state is None:
            return bare
        try:
            return decode(state, bare)
        except InvalidState as error:
            return error

    def _is_the_tasks_own(self, exc: BaseException) -> bool:
        """Tell a failure of the task from what Celery's pools raise in it to end it."""
        if isinstance(exc, Retry):
            return self.wish is not None
        if isinstance(exc, (WorkerShutdown, WorkerTerminate)):
            return False
        if isinstance(exc, SystemExit):
            return not _pool_ends_the_process()
        return isinstance(exc, Exception) or not type(exc).__module__.startswith(
            ("gevent", "greenlet", "eventlet")
        )

    def _outcome(self, begun: Run, exc: BaseException) -> Outcome:
        wish = self.wish
        if wish is None:
            return self._ruled(outcome_of(exc, begun.errors), exc)
        asked = outcome_of(wish.exc or exc, begun.errors)
        if not isinstance(asked, Failure):
            return asked
        return replace(asked, code="RETRY", retry_after=wish.after(self.bridge.now()) or asked.retry_after)

    def _ruled(self, outcome: Outcome, exc: BaseException) -> Outcome:
        """Apply a native task's autoretry_for: what it does not name was never retried, and still is not."""
        named = tuple(getattr(self.task, "autoretry_for", ()))
        if not named or not isinstance(outcome, Failure) or outcome.code != "RETRY":
            return outcome
        excluded = tuple(getattr(self.task, "dont_autoretry_for", ()))
        if isinstance(exc, named) and not isinstance(exc, excluded):
            return outcome
        return replace(outcome, final=NOT_NAMED)

    def _shown(self, exc: BaseException) -> Exception:
        """Return the exception that Celery is shown, one that its pools can carry."""
        if self.wish and isinstance(self.wish.exc, Exception):
            exc = self.wish.exc
        if isinstance(exc, Exception) and not isinstance(exc, MemoryError):
            return exc
        return HandlerFailed(f"{type(exc).__name__}: {exc}").with_traceback(exc.__traceback__)


def _impossible(job: Job, decision: Decision, error: Exception) -> DeadLetter:
    """Return the decision for a job whose own message stands in the way of what was decided."""
    failure = getattr(decision, "failure", None) or Failure("bridge.undeliverable", repr(error))
    return DeadLetter("invalid", failure, f"attempt {job.attempt} cannot be followed up: {error!r}")


def _pool_ends_the_process() -> bool:
    """Return whether SystemExit may be billiard's own way of unwinding a terminated child."""
    from billiard import common

    fired = getattr(common, "terminate_handler_fired", None)
    return fired is None or bool(fired())
