"""`OJSTask` and `@ojs_task`: a Celery task whose failures the bridge judges."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery, Task, shared_task
from celery.canvas import Signature
from celery.exceptions import Retry
from celery.local import Proxy

from ..errors import ConfigurationError
from ..failures import ErrorMap, Mapped
from ..policy import PartialPolicy, RetryPolicy
from .attach import RETRY_OPTION, attach, header_for
from .execution import Execution, Wish
from .options import refuse_native
from .wire import HEADER, KEY, Wire, eager

_RUNNING = "ojs_execution"


class Bridged:
    """What a task does under the bridge, whatever its other base classes are."""

    Request = "ojs_bridge.celery.request:OJSRequest"
    reject_on_worker_lost = False
    retry_on_worker_lost = False
    acks_on_failure_or_timeout = True
    ojs_bridged = True
    ojs_native: PartialPolicy | None = None
    ojs_retry: PartialPolicy | None = None
    ojs_errors: Mapping[type[BaseException], Mapped] | None = None

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the task: under the bridge when a worker or `apply` does it, plainly when it is just called."""
        request = self.request
        if request.called_directly or _RUNNING in vars(request):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        execution = Execution(self, request, _take_wire(self, request))
        setattr(request, _RUNNING, execution)
        return execution.run(_body(self), args, kwargs)

    def retry(
        self: Any,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: Any = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Retry:
        """Ask for a retry, as Celery's `Task.retry` does; `countdown` and `eta` are hints.

        The attempt counts, `max_interval` caps the hint, and the policy's `max_attempts` takes the place of
        `max_retries`.
        """
        execution: Execution | None = vars(self.request).get(_RUNNING)
        if execution is None:
            native: Callable[..., Retry] = super().retry  # type: ignore[misc]
            return native(args, kwargs, exc, throw, eta, countdown, max_retries, **options)
        wish = Wish(exc or sys.exc_info()[1], args, kwargs, eta, countdown, options)
        execution.wish = wish
        if throw:
            raise wish.signal
        return wish.signal

    def apply(self: Any, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Run the task here and now, retries included; their delays are not waited for."""
        partial = options.pop(RETRY_OPTION, None)
        if partial is not None:
            header = header_for(self.app, self.name, partial)
            options["headers"] = {**(options.get("headers") or {}), HEADER: header}
        try:
            return super().apply(args, kwargs, *rest, **options)  # type: ignore[misc]
        except Retry as signal:
            # With task_eager_propagates Celery would let the first retry out instead of running it.
            if signal.sig is None:
                raise
            return signal.sig.apply(retries=(options.get("retries") or 0) + 1, throw=True)

    def signature(self: Any, args: Any = None, *rest: Any, **options: Any) -> CheckedSignature:
        """Return a signature whose `set(ojs_retry=...)` is checked where it is written."""
        options.setdefault("app", self.app)
        return CheckedSignature(self, args, *rest, **options)

    subtask = signature

    @classmethod
    def on_bound(cls: Any, app: Celery) -> None:
        """Give the app a default bridge if it has none, and refuse native retry options on this task."""
        super().on_bound(app)  # type: ignore[misc]
        attach(app)
        if cls.name and issubclass(cls, OJSTask):
            refuse_native(str(cls.name), _own_options(cls))


class OJSTask(Bridged, Task):  # type: ignore[misc]
    """A Celery task under the bridge; `acks_late` unless the task says otherwise.

    Class attributes or task options: `ojs_retry`, a partial policy, and `ojs_errors`, an error map.
    """

    abstract = True
    acks_late = True


class CheckedSignature(Signature):  # type: ignore[misc]
    """A signature that refuses an invalid `ojs_retry` at once."""

    def set(self, immutable: bool | None = None, **options: Any) -> CheckedSignature:
        """Set options, as Celery's own does; raises InvalidRetryPolicy."""
        if options.get(RETRY_OPTION) is not None:
            header_for(self.app, self["task"], options[RETRY_OPTION])
        super().set(immutable, **options)
        return self


def ojs_task(
    app: Celery | Callable[..., Any] | None = None,
    *,
    retry: PartialPolicy | None = None,
    errors: Mapping[type[BaseException], Mapped] | None = None,
    base: type[Task] | None = None,
    **options: Any,
) -> Any:
    """Make a function a Celery task under the bridge; without an app it is a shared task.

    `options` are Celery's own. Raises InvalidRetryPolicy, and ConfigurationError for an invalid error map and
    for Celery's own retry options, which would retry beside the policy.
    """
    if app is not None and not isinstance(app, Celery):
        return ojs_task(retry=retry, errors=errors, base=base, **options)(app)
    RetryPolicy.merge(retry)
    ErrorMap(errors)

    def decorate(fun: Callable[..., Any]) -> Any:
        name = str(options.get("name") or getattr(fun, "__name__", fun))
        if isinstance(fun, (Task, Proxy)):
            raise ConfigurationError(f"task {name}: @ojs_task takes the place of @app.task and @shared_task")
        mixed = _with_bridge(base or getattr(app, "Task", Task))
        refuse_native(name, {**_own_options(mixed), **options})
        task = shared_task if app is None else app.task
        return task(base=mixed, ojs_retry=retry, ojs_errors=errors, **options)(fun)

    return decorate


def _with_bridge(base: type[Task]) -> type[Task]:
    if issubclass(base, Bridged):
        return base
    return type(base.__name__, (OJSTask, base), {"abstract": True, "__module__": base.__module__})


def _own_options(cls: type[Task]) -> dict[str, Any]:
    """Return what the classes between a task and Celery's own Task set."""
    options: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base not in (Bridged, OJSTask, object) and base.__module__ != "celery.app.task":
            options.update(vars(base))
    return options


def _take_wire(task: Task, request: Any) -> Wire:
    """Return the delivered message, and take it out of the request, whose headers users pass on."""
    carried = vars(request).pop(KEY, None)
    if request.headers:
        request.headers.pop(KEY, None)
    return carried if carried is not None else eager(task.app, task.name, request)


def _body(task: Any) -> Any:
    """Return what runs the user's code: a `__call__` of the user's own base class, or `run`."""
    classes = type(task).__mro__
    for cls in classes[classes.index(Bridged) + 1 :]:
        if "__call__" in vars(cls) and cls.__module__ != "celery.app.task":
            return vars(cls)["__call__"].__get__(task)
    return task.run
