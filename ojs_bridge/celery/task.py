"""`OJSTask`, a Celery task under the bridge: `__call__` is the entrance of a job."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from celery import Celery, Task
from celery.canvas import Signature
from celery.exceptions import Retry, TaskPredicate
from celery.local import Proxy
from kombu.utils.imports import symbol_by_name

from ..adapters.terms import misnamed
from ..config.policies import MISNAMED
from ..engine.layers import Layers, RetryOnLike
from ..errors import ConfigurationError
from ..messages import HEADER, RETRY_OPTION
from ..rules.dependencies import DependsLike
from ..rules.failures import Errors
from ..rules.policy import PartialPolicy
from . import compat
from .delivery import Delivery
from .ends import Keep, Kept, telling
from .installation import LATER, check_signatures, header_for, prepare, refuse_misnamed
from .native import NATIVE, of
from .receiving import Handler, Outside, receiver
from .run import TaskRun
from .wire import EAGER_RETRIES, KEY, is_broadcast, known
from .wish import ENDED, OURS, Ended, Running, Wish

logger = logging.getLogger("ojs_bridge")

#: The mark of a request whose job Celery itself runs.
NATIVELY = Running()
#: How often in a row an eager task may snooze: as no time passes, it might snooze for ever.
EAGER_SNOOZES = 100
#: The bridge's own request class, and the attribute of a task that names one.
_OURS = "ojs_bridge.celery.request:OJSRequest"
_NAME = "Request"

#: Celery's own retry options, which a task with a policy may not set.
_REFUSED = (
    "autoretry_for",
    "default_retry_delay",
    "dont_autoretry_for",
    "max_retries",
    "retry_backoff",
    "retry_backoff_max",
    "retry_jitter",
    "retry_kwargs",
    "retry_on_worker_lost",
)
#: The option that requeues a job after the policy has ended it, so that it would never end.
_REQUEUEING = "reject_on_worker_lost"


class RequestClass:
    """The attribute `Request` of a task under the bridge: the user's class, with the bridge's as its base.

    A user's method comes first, and calls the bridge's by `super()`. A dotted path is imported when a worker
    asks for the class; earlier that might fail.
    """

    def __init__(self, given: Any = None) -> None:
        self._given = given

    def __get__(self, task: Any, cls: type) -> Any:
        """Return the task's request class, or the dotted path of the bridge's."""
        own = (vars(task).get(_NAME) if task is not None else None) or self._given or _inherited(cls)
        return _OURS if own is None else _composed(symbol_by_name(own))

    def __set__(self, task: Any, given: Any) -> None:
        """Take a class that is assigned to a task."""
        vars(task)[_NAME] = given


def _inherited(cls: type) -> Any:
    """Return the request class of the user's own base classes."""
    own = (vars(base).get(_NAME) for base in cls.__mro__ if base.__module__ != NATIVE)
    return next((given for given in own if given is not None and not isinstance(given, RequestClass)), None)


@functools.cache
def _composed(own: type) -> Any:
    from celery.worker.request import Request

    from .request import OJSRequest

    if issubclass(own, OJSRequest):
        return own
    if own is Request:
        return OJSRequest
    return type(own.__name__, (own, OJSRequest), {"__module__": own.__module__})


class BrokenOff(BaseException):
    """A run has broken off for want of memory: its process counts as lost.

    Celery takes no BaseException for an error of the task's own.
    """


class Bridged:
    """The behaviour of a task under the bridge, whatever its other base classes are."""

    Request = RequestClass()
    reject_on_worker_lost = False
    retry_on_worker_lost = False
    ojs_bridged = True
    # No annotations: typing.get_type_hints(task) would take them for those of the task's own function.
    ojs_outside = cast("Outside | None", None)
    ojs_native = cast("Layers | None", None)
    ojs_retry = cast("PartialPolicy | None", None)
    ojs_retry_on = cast("RetryOnLike | None", None)
    ojs_errors = cast("Errors | None", None)
    ojs_depends = cast("DependsLike", None)

    def __init_subclass__(cls, **options: Any) -> None:
        # The user's hook does not hear of the class that `install` makes: it may refuse a second class.
        if "ojs_outside" not in vars(cls):
            super().__init_subclass__(**options)
        given = inspect.getattr_static(cls, _NAME)
        if not isinstance(given, RequestClass):
            # A request class that a class of bridged tasks names itself is composed, too.
            setattr(cls, _NAME, RequestClass(given))
        hook = inspect.getattr_static(cls, "before_start")
        if hook is not Task.before_start:
            cls.before_start = functools.partialmethod(_before_a_run, hook)  # type: ignore[attr-defined]

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the task: under the bridge in a worker and in `apply`, plainly in a direct call."""
        try:
            request = self.request
            if request.called_directly or isinstance(request.ojs_run, (Running, Ended)):
                run, body = None, super().__call__  # type: ignore[misc]
            else:
                # The job is outside the canary, or a broadcast; any other's request has its message.
                outside: Outside | None = self.ojs_outside
                if request.is_eager:
                    headers = {**(request.headers or {}), "id": request.id} if outside else {}
                    natively = outside is not None and outside.has(headers)
                else:
                    natively = KEY not in (request.properties or {}) and (
                        outside is not None or is_broadcast(self.app, request.delivery_info)
                    )
                run = None if natively else TaskRun(Delivery(self, request))
                request.ojs_run = run or NATIVELY
                body = _body(self, natively=run is None)
        except TaskPredicate:
            raise
        except Exception as error:
            if self.request.called_directly or self.request.is_eager:
                raise
            raise _could_not_begin(self, self.request, error) from None
        try:
            if run is None:
                return body(*args, **kwargs)
            try:
                result = run.run(body, args, kwargs)
            finally:
                # The run and its request know each other: together they would keep the job's arguments alive.
                request.ojs_run = run.reserved or ENDED
            if run.reserved is not None:
                # Last: a run has not ended that something breaks into.
                run.reserved.is_over = True
            return result
        except MemoryError as raised:
            if run is None or request.is_eager:
                raise
            # Celery would take it for an error of the task's own.
            raise BrokenOff(repr(raised)) from None

    def start_strategy(self: Any, app: Celery, consumer: Any, **options: Any) -> Handler:
        """Return the function that the worker calls with each message of this task."""
        handler: Handler = compat.start_strategy(super())(app, consumer, **options)

        @functools.cache
        def natively() -> Handler:
            start = compat.start_strategy(super(Bridged, type(self)))
            native: Handler = start(NativeTask(lambda: self), app, consumer, **options)
            return native

        if self.ojs_outside is not None:
            handler = self.ojs_outside.apart(handler, natively())
        return receiver(self, consumer, handler, natively)

    def apply(self: Any, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Run the task here and now, retries included; their delays are not waited for.

        Raises RuntimeError for a task that does nothing but snooze.
        """
        if EAGER_RETRIES in options:
            # Celery would run each eager retry within the run that asked for it.
            return EagerRetry(args, kwargs, options)
        partial = options.pop(RETRY_OPTION, None)
        refuse_misnamed(self.name, options)
        if partial is not None:
            header = header_for(self.app, self.name, partial)
            options["headers"] = {**(options.get("headers") or {}), HEADER: header}
        return apply_to_the_end(super().apply, self.name, args, kwargs, *rest, **options)  # type: ignore[misc]

    @classmethod
    def on_bound(cls: Any, app: Celery) -> None:
        """Let the app carry policies, and refuse native retry options on this task."""
        super().on_bound(app)  # type: ignore[misc]
        prepare(app)
        if cls.name and issubclass(cls, OJSTask):
            refuse_native(str(cls.name), cls)


def _before_a_run(task: Task, hook: Any, *args: Any, **kwargs: Any) -> None:
    """Call a hook that comes before a run: what it calls directly is no run, as after one."""
    before, task.request.ojs_run = task.request.ojs_run, ENDED
    try:
        hook.__get__(task, type(task))(*args, **kwargs)
    finally:
        task.request.ojs_run = before


class NativeTask(Proxy):  # type: ignore[misc]
    """A task without the bridge's attributes: Celery's own request needs it for a job outside the canary."""

    def __getattr__(self, name: str) -> Any:
        task = compat.get_current_object(self)()
        own, acks_late = vars(task), of(task).acks_late
        if name == "acks_late" and acks_late is not None:
            return acks_late
        return own[name] if name in own else getattr(super(Bridged, task), name)


class ReplacedMethods(Task):  # type: ignore[misc]
    """Methods in place of Celery's own; a user's class may override them, and call them by `super()`."""

    abstract = True

    def retry(
        self: Any,
        args: Any = None,
        kwargs: Any = None,
        exc: Any = None,
        throw: bool = True,
        eta: Any = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Retry:
        """Ask for a retry, as Celery's `Task.retry` does; `countdown` and `eta` are hints.

        The attempt counts. A policy's `max_interval` caps the hint, and its `max_attempts` takes the place of
        `max_retries`; where no owner has said any, both are as under Celery alone. When no retry is allowed,
        `exc` is raised, or MaxRetriesExceededError. The retry goes the task's own way, by its
        `signature_from_request` and its `apply_async`, with the `options`; the bridge publishes its message.
        """
        run = self.request.ojs_run
        if not isinstance(run, TaskRun):
            native: Callable[..., Retry] = super().retry
            return native(args, kwargs, exc, throw, eta, countdown, max_retries, **options)
        wish = Wish(self, exc, args, kwargs, eta, countdown, max_retries, options)
        answer = run.retry(wish)
        if throw or answer is not wish.signal:
            raise answer
        return wish.signal

    setattr(retry, OURS, True)

    def signature(self: Any, args: Any = None, *rest: Any, **options: Any) -> CheckedSignature:
        """Return a signature whose `ojs_retry` is checked where it is written."""
        options.setdefault("app", self.app)
        made = CheckedSignature(self, args, *rest, **options)
        # A retry's policy was checked when its job was sent.
        is_running = isinstance(self.request.ojs_run, Running)
        is_retry = is_running and not any(map(made.options.get, (RETRY_OPTION, *LATER)))
        return made if is_retry else made.set()

    subtask = signature


class OJSTask(Bridged, ReplacedMethods):
    """The class of `@ojs_task`'s tasks: under the bridge, and `acks_late` unless the task says otherwise.

    Class attributes or task options: `ojs_retry`, a partial policy, `ojs_retry_on`, the failures that are
    retried, `ojs_errors`, an error map, and `ojs_depends`, the names of the dependencies of its jobs.
    """

    abstract = True
    acks_late = True


class CheckedSignature(Signature):  # type: ignore[misc]
    """A signature that refuses an invalid `ojs_retry` at once."""

    def set(self, immutable: bool | None = None, **options: Any) -> CheckedSignature:
        """Set options, as Celery's own does; raises InvalidRetryPolicy."""
        super().set(immutable, **options)
        check_signatures(self.app, self)
        return self


def refuse_native(name: str, cls: type[Task], given: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigurationError for a task that has Celery's own retry options beside a retry policy.

    The options are those that are given, and the attributes of the task's classes, but for Celery's and the
    bridge's classes.
    """
    options: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base not in (Bridged, ReplacedMethods, OJSTask, object) and base.__module__ != NATIVE:
            options.update(vars(base))
    options.update(given or {})
    if not MISNAMED.isdisjoint(options) and (lines := misnamed(options, RETRY_OPTION)):
        raise ConfigurationError(f"task {name}: {'; '.join(lines)}")
    if options.get(_REQUEUEING):
        raise ConfigurationError(
            f"task {name}: {_REQUEUEING}={options[_REQUEUEING]!r} would requeue what the policy has ended, "
            "for ever"
        )
    refused = [option for option in _REFUSED if option in options]
    if refused:
        raise ConfigurationError(
            f"task {name}: {', '.join(refused)} would retry beside the ojs policy; put it in the policy, "
            "where max_attempts = max_retries + 1, initial_interval and max_interval are the backoff, and "
            "non_retryable_errors names what is not retried"
        )


def leave_native(task: Task, why: str) -> None:
    """Give a task that `install` took over back to Celery."""
    kept = of(task)
    task.__class__, kept.taken_from, kept.why_native = kept.taken_from, None, why
    if kept.autoretrying is not None:
        task.run, kept.autoretrying = kept.autoretrying, None
    if kept.acks_late is not None:
        task.acks_late, kept.acks_late = kept.acks_late, None
    logger.warning("task %s stays native: %s", task.name, why)


def autoretrying_outside(task: Task) -> Callable[..., Any]:
    """Return a task's `run`, whose `autoretry_for` works unless the bridge runs the job."""
    autoretrying = task.run

    @functools.wraps(compat.orig_run(task))
    def run(*args: Any, **kwargs: Any) -> Any:
        is_ours = isinstance(task.request.ojs_run, TaskRun)
        return (compat.orig_run(task) if is_ours else autoretrying)(*args, **kwargs)

    return run


def _could_not_begin(task: Any, request: Any, error: Exception) -> Exception:
    """Keep a job that could not be begun; return the exception that tells Celery of it."""
    try:
        run, request.ojs_run = request.ojs_run, None
        delivery = run.delivery if isinstance(run, TaskRun) else Delivery(task, request)
        return telling(task, request, delivery.could_not_begin(error))
    except Exception:
        logger.critical("job %s waits in its worker as it came", known(request), exc_info=error)
        return Keep(Kept(repr(error)))


@functools.cache
def _user_call(cls: Any) -> Any:
    """Return the `__call__` of the user's own base class, or None."""
    for base in cls.__mro__[cls.__mro__.index(Bridged) + 1 :]:
        if "__call__" in vars(base) and base.__module__ != NATIVE:
            return vars(base)["__call__"]
    return None


def _body(task: Any, *, natively: bool) -> Any:
    """Return the user's code: `__call__` of the user's own base class, or `run`."""
    call, request = _user_call(task.__class__), task.request
    if not natively and request.headers and HEADER in request.headers:
        # Its task may pass its headers on to other jobs.
        request.headers = {k: v for k, v in request.headers.items() if k != HEADER} or None
        if call is not None:
            # Celery makes a request of its own for it, and gathers the headers anew.
            vars(request).pop(HEADER, None)
    if call is not None:
        return call.__get__(task)
    # `install` has put the automatic retries of a task aside.
    return (natively and of(task).autoretrying) or task.run


@dataclass(frozen=True, slots=True)
class EagerRetry:
    """The result of an eager retry's signature: the arguments of the next run, not its outcome."""

    args: Any
    kwargs: Any
    options: dict[str, Any]


def apply_to_the_end(apply: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
    """Run a task eagerly, and again as often as it is retried; return its result.

    Raises RuntimeError when it does nothing but snooze.
    """
    outcome = _apply_once(apply, *args, **options)
    retries, snoozes = 0, 0
    while isinstance(outcome, EagerRetry):
        options = {**outcome.options, "retries": outcome.options[EAGER_RETRIES]}
        del options[EAGER_RETRIES]
        snoozes = snoozes + 1 if options["retries"] == retries else 0
        if snoozes > EAGER_SNOOZES:
            raise RuntimeError(f"task {name}: more than {EAGER_SNOOZES} eager snoozes in a row")
        retries = options["retries"]
        outcome = _apply_once(apply, outcome.args, outcome.kwargs, **options)
    return outcome


def _apply_once(apply: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return apply(*args, **options)
    except Retry as signal:
        # With task_eager_propagates Celery raises the first retry and does not run it.
        if signal.sig is None or EAGER_RETRIES not in signal.sig.options:
            raise
        return signal.sig.apply(throw=True)
