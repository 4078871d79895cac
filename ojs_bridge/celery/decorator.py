"""`@ojs_task`: the decorator that makes a function a task under the bridge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

from celery import Celery, Task, current_app
from celery.local import Proxy
from celery.result import AsyncResult

from ..engine.retry_on import RetryOn, RetryOnLike
from ..errors import ConfigurationError
from ..rules.failures import ErrorMap, Mapped
from ..rules.policy import PartialPolicy, check_partial
from . import compat
from .attach import prepare, sent_on_commit
from .native_options import refuse_native
from .task import Bridged, CheckedSignature, OJSTask, ReplacedMethods, own_options

if TYPE_CHECKING:
    P = ParamSpec("P")
    R = TypeVar("R")

    class TaskOf(OJSTask, Generic[P, R]):
        """A task that takes what its function takes."""

        run: Callable[P, R]
        delay: Callable[P, AsyncResult]
        s: Callable[..., CheckedSignature]
        si: Callable[P, CheckedSignature]

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
            return self.run(*args, **kwargs)

        def apply_async(
            self,
            args: Sequence[Any] | None = None,
            kwargs: Mapping[str, Any] | None = None,
            *more: Any,
            ojs_retry: PartialPolicy | None = None,
            **options: Any,
        ) -> AsyncResult: ...

    class Decorator(Protocol):
        """The result of `ojs_task(...)`; after `@ojs_task` without parentheses it is the task itself.

        A type checker that does not know Celery's types cannot tell an app from a function.
        """

        @overload
        def __call__(self, fun: Callable[P, R], /) -> TaskOf[P, R]: ...
        @overload
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
        def __getattr__(self, name: str) -> Any: ...

    class BindingDecorator(Protocol):
        """The result of `ojs_task(..., bind=True)`: the function's first parameter is the task."""

        def __call__(self, fun: Callable[Concatenate[Any, P], R], /) -> TaskOf[P, R]: ...


@overload
def ojs_task(
    app: Celery | None = None,
    *,
    bind: Literal[True],
    retry: PartialPolicy | None = None,
    retry_on: RetryOnLike | None = None,
    errors: Mapping[type[BaseException], Mapped] | None = None,
    base: type[Task] | None = None,
    **options: Any,
) -> BindingDecorator: ...


@overload
def ojs_task(
    app: Celery | Callable[..., Any] | None = None,
    *,
    bind: Literal[False] = False,
    retry: PartialPolicy | None = None,
    retry_on: RetryOnLike | None = None,
    errors: Mapping[type[BaseException], Mapped] | None = None,
    base: type[Task] | None = None,
    **options: Any,
) -> Decorator: ...


def ojs_task(
    app: Celery | Callable[..., Any] | None = None,
    *,
    retry: PartialPolicy | None = None,
    retry_on: RetryOnLike | None = None,
    errors: Mapping[type[BaseException], Mapped] | None = None,
    base: type[Task] | None = None,
    **options: Any,
) -> Any:
    """Make a function a Celery task under the bridge; without an app it is a shared task.

    `retry_on` says which failures are retried: `"failure"`, all that are not non-retryable; `"asked"`, those
    for which the task's code asks; or exception classes, and what the code asks for. `options` are Celery's
    own. Raises InvalidRetryPolicy, and ConfigurationError for an invalid error map or `retry_on` and for
    Celery's own retry options, which would retry beside the policy.
    """
    if app is not None and not isinstance(app, Celery):
        return ojs_task(retry=retry, retry_on=retry_on, errors=errors, base=base, **options)(app)
    check_partial(retry)
    ErrorMap(errors)
    if retry_on is not None:
        RetryOn(retry_on)

    def decorate(fun: Callable[..., Any]) -> Any:
        name = str(options.get("name") or getattr(fun, "__name__", fun))
        if isinstance(fun, (Task, Proxy)):
            raise ConfigurationError(f"task {name}: @ojs_task takes the place of @app.task and @shared_task")
        refuse_native(name, {**own_options(base or getattr(app, "Task", Task)), **options})
        settings = {**options, "ojs_retry": retry, "ojs_retry_on": retry_on, "ojs_errors": errors}
        if app is None:
            return _shared(fun, base, settings)
        prepare(app)
        return app.task(base=_with_bridge(base or app.Task), **settings)(fun)

    return decorate


def _shared(fun: Callable[..., Any], base: type[Task] | None, options: dict[str, Any]) -> Any:
    """Do what Celery's `shared_task` does, with each app's own default class as the base."""

    def add_to(app: Celery) -> None:
        prepare(app)
        compat.task_from_fun(app)(fun, base=_with_bridge(base or app.Task), **options)

    compat.connect_on_app_finalize.find()(add_to)
    for app in compat.get_active_apps.find()():
        if app.finalized:
            add_to(app)

    def current() -> Task:
        app = current_app
        return app.tasks[options.get("name") or app.gen_task_name(fun.__name__, fun.__module__)]

    return Proxy(current)


def _with_bridge(base: type[Task]) -> type[Task]:
    if issubclass(base, Bridged):
        return base
    # Celery's own class overrides nothing.
    last = () if base is Task else (ReplacedMethods,)
    bases = (*sent_on_commit(base), OJSTask, base, *last)
    return type(base.__name__, bases, {"abstract": True, "__module__": base.__module__})
