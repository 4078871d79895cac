"""Shadow mode on Celery: receivers of signals, which only watch."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from celery import Celery, Task, bootsteps, signals
from celery.app import autoretry
from celery.exceptions import MaxRetriesExceededError, Retry
from celery.utils.serialization import UnpickleableExceptionWrapper
from celery.utils.time import maybe_iso8601, maybe_make_aware

from ...bridge import Bridge
from ...celery.attach import FRAMEWORK, is_bridged, resolved
from ...celery.native_options import native_of
from ...celery.task import runs_natively
from ...celery.wire import expiry
from ...config.policy_files import PoliciesOrFile
from ...config.settings import the_policies
from ...engine.runs import TaskPolicy
from ...errors import ConfigurationError
from ...spec.failures import Failure, Outcome, outcome_of
from ...spec.job import Job
from . import SHADOW, Shadow
from .comparing import Ended, Native, Retried
from .recording import FailedRun, harmless


class AppShadow(Shadow):
    """The shadow of an app: receivers of Celery's signals."""

    def __init__(self, app: Celery, bridge: Bridge | None, policies: PoliciesOrFile | None) -> None:
        super().__init__(bridge, policies)
        self._app = app

    def start(self) -> None:
        """Start shadow mode, before the pool forks its processes."""
        self._begin(FRAMEWORK)
        receivers = {
            signals.task_retry: self._retried,
            signals.task_failure: self._failed,
            signals.worker_process_shutdown: self._end,
            signals.worker_shutdown: self._end,
        }
        for signal, receiver in receivers.items() if self._recorder else ():
            # Without a uid, Celery before 5.5 takes the methods of two objects for one receiver.
            signal.connect(receiver, weak=False, dispatch_uid=f"{SHADOW}-{id(self)}")

    def _retried(self, sender: Any = None, request: Any = None, reason: Any = None, **_: Any) -> None:
        if self._recorder is not None and sender.app is self._app:
            with harmless("a failed run is not compared"):
                self._note(sender, request, reason)

    def _failed(self, sender: Any = None, task_id: Any = None, exception: Any = None, **_: Any) -> None:
        if self._recorder is not None and sender.app is self._app:
            with harmless("a failed run is not compared"):
                request = sender.request
                # For a killed child, the main process sends this signal, and its request is another one.
                if request.id == task_id:
                    self._note(sender, request, _original(exception, sys.exc_info()[1]))

    def _note(self, task: Task, request: Any, raised: BaseException) -> None:
        """Have a failed run compared, if its task is shadowed."""
        policy = self._policy(task.name, is_bridged=is_bridged(task) and not runs_natively(request))
        if policy is None:
            return
        now = self.bridge.engine.now()
        native = self._native(raised, now)
        job = self._job(task, request)
        if policy.layers.limit_is_native and _is_asked(raised):
            # The bridge would read the max_retries of this call, as Celery did.
            job = job._replace(retry={"max_attempts": job.attempt + isinstance(native, Retried)})
        self._compare(FailedRun(job, policy, _outcome(task, raised, native, policy), native, now))

    def _named(self) -> Iterable[str]:
        self._moved = the_policies(self._policies)
        self._moved.check(self._app.tasks, f"task of the app {self._app.main!r}")
        return filter(self._is_moved, self._app.tasks)

    def _resolved(self, name: str) -> TaskPolicy | None:
        if not self._is_moved(name):
            return None
        task = self._app.tasks[name]
        native = task.ojs_native if is_bridged(task) else native_of(task)
        return resolved(self.bridge.engine, task, self._moved, native)

    def _is_moved(self, name: str) -> bool:
        return not name.startswith("celery.") and self._moved.of(name) is not None

    def _native(self, raised: BaseException, now: datetime) -> Native:
        if not isinstance(raised, Retry):
            return Ended(kept=False)
        if isinstance(raised.when, (int, float)):
            return Retried(float(raised.when))
        at = maybe_make_aware(maybe_iso8601(raised.when), self._app.timezone) if raised.when else now
        return Retried(max((at - now).total_seconds(), 0.0))

    def _job(self, task: Task, request: Any) -> Job:
        retries = request.retries or 0
        return Job(
            id=request.id,
            type=task.name,
            queue=str((request.delivery_info or {}).get("routing_key") or ""),
            attempt=1 + retries,
            fence=retries,
            expires=expiry(self._app, {"expires": request.expires}),
        )


def _outcome(task: Task, raised: BaseException, native: Native, policy: TaskPolicy) -> Outcome:
    """Translate the task's exception, also that of `self.retry`, as the bridge would."""
    if not _is_asked(raised):
        automatic = isinstance(raised, Retry) and raised.__context__
        error: BaseException = automatic or raised
        return outcome_of(error, policy.errors, policy.layers.retries.rules_out(error))
    found = outcome_of(_cause(raised), policy.errors)
    if not isinstance(found, Failure):
        return found
    hints = isinstance(raised, Retry) and (
        policy.layers.waits_are_native or raised.when != task.default_retry_delay
    )
    if isinstance(native, Retried) and hints:
        return replace(found, code="RETRY", retry_after=timedelta(seconds=native.delay))
    return replace(found, code="RETRY")


def _is_asked(raised: BaseException) -> bool:
    """Return whether the task's code called `self.retry`, and not autoretry_for."""
    asker = _asker(raised)
    if asker is None:
        return isinstance(raised, (Retry, MaxRetriesExceededError))
    return asker != str(autoretry.__file__)


def _asker(raised: BaseException) -> str | None:
    """Return the file of the code that called `Task.retry`, if that raised the exception; else None."""
    trace, caller = raised.__traceback__, None
    while trace is not None:
        code = trace.tb_frame.f_code
        if code is Task.retry.__code__:
            return caller
        trace, caller = trace.tb_next, code.co_filename
    return None


def _cause(signal: BaseException) -> BaseException:
    """Return the error for which `self.retry` was called."""
    given = getattr(signal, "exc", None)
    if given is None or isinstance(given, UnpickleableExceptionWrapper):
        given = signal.__context__
    return given or MaxRetriesExceededError("self.retry() was called")


def _original(shown: BaseException, raised: BaseException | None) -> BaseException:
    """Return the raised exception. Celery may show a base class or a wrapper in its place."""
    stands_in = isinstance(shown, UnpickleableExceptionWrapper) or isinstance(raised, type(shown))
    return raised if raised is not None and stands_in else shown


class Start(bootsteps.Step):  # type: ignore[misc]
    """Starts shadow mode with a worker."""

    def create(self, worker: Any) -> None:
        """Start the shadow of the worker's app."""
        shadow: AppShadow = getattr(worker.app, SHADOW)
        shadow.start()


def shadow_app(app: Celery, bridge: Bridge | None, policies: PoliciesOrFile | None) -> None:
    """Give an app a shadow; raises ConfigurationError for an app that has one."""
    if SHADOW in vars(app):
        raise ConfigurationError(f"shadow: the Celery app {app.main!r} has it already: call it once")
    setattr(app, SHADOW, AppShadow(app, bridge, policies))
    app.steps["worker"].add(Start)
