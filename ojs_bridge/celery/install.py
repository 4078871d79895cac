"""`ojs_task` puts one task under the bridge, and `install` a whole Celery app, whose code it leaves alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

from celery import Celery, Task, current_app
from celery.local import Proxy
from celery.result import AsyncResult

from ..adapters.terms import InFlight, Percentages, Terms, misnamed
from ..bridge import Bridge
from ..config.policies import MISNAMED, PoliciesOrFile
from ..engine.layers import RetryOn, RetryOnLike
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..messages import DEPENDS_OPTION, OUTBOX_OPTION, RETRY_OPTION
from ..rules.dependencies import DependsLike
from ..rules.failures import ErrorMap, Errors
from ..rules.policy import PartialPolicy, RetryPolicy, check_errors, check_partial
from . import compat
from .installation import (
    attach,
    check_signatures,
    check_task,
    check_whole,
    header_for,
    installation,
    prepare,
    refuse_misnamed,
)
from .native import native_of, of, unreadable
from .receiving import Outside, outside_of
from .task import (
    Bridged,
    CheckedSignature,
    OJSTask,
    ReplacedMethods,
    autoretrying_outside,
    refuse_native,
)

logger = logging.getLogger("ojs_bridge")

#: The method of Django's task class that sends a job after a commit: such a class needs one base more.
_ON_COMMIT = "apply_async_on_commit"
#: The options of a task that are the bridge's.
_OWN = (RETRY_OPTION, "ojs_retry_on", "ojs_errors", "ojs_park_delays", OUTBOX_OPTION, DEPENDS_OPTION)
_MISNAMED = MISNAMED - {"retry"} | set(_OWN)


def install(
    app: Celery,
    bridge: Bridge | None = None,
    *,
    policies: PoliciesOrFile | None = None,
    canary: Percentages | None = None,
    in_flight: InFlight = "counted",
    park_delays: bool | None = None,
    outbox: bool | None = None,
) -> Bridge:
    """Put a whole app, or the tasks that `policies` names, under the bridge without touching their code.

    `policies` maps task name patterns to partial policies, or is the path of a TOML or JSON file of them; an
    entry's `acks_late` is that of its tasks' jobs under the bridge. Tasks that no pattern names stay as they
    are. Without it the configured ones count (OJS_BRIDGE_POLICIES); without those every task of the app is
    under the bridge. `canary` is the percentage of their jobs that is, or maps task name patterns to
    percentages (OJS_BRIDGE_CANARY); Celery itself runs the others, but for those that bring their own policy.
    `in_flight` is about jobs that were retried natively more often than their policy allows: `"counted"`,
    they end at their next failure, or `"afresh"`, they begin at attempt 1. `park_delays` and `outbox` are
    those of the bridge, for the tasks of this app. Returns the bridge. Raises InvalidRetryPolicy, and
    ConfigurationError for an app that already has another bridge, for what is not a percentage, for another
    `in_flight`, and for an `outbox` without a store in a SQL database.
    """
    bridge = Bridge() if bridge is None else bridge
    terms = Terms.of("install", bridge, policies, canary, in_flight, park_delays, outbox)
    attach(app, bridge)
    own = installation(app)
    own.is_installed, own.terms, own.adopt = True, terms, _adopt
    if own.delays:
        own.delays.parks, own.delays.outbox = terms.park_delays, terms.outbox
    _adopt_new_tasks(app)
    for name, declared in own.declared.items():
        check_whole(app, name, declared)
    for name in list(compat.tasks(app)):
        check_task(app, name)
    return bridge


def _adopt_new_tasks(app: Celery) -> None:
    """Adopt the tasks that there are, and each task that is registered later."""
    create, register = compat.task_from_fun(app), app.register_task

    @functools.wraps(create)
    def create_and_adopt(fun: Any, name: str | None = None, *args: Any, **options: Any) -> Task:
        task = create(fun, name, *args, **options)
        _adopt(task, app)
        return task

    @functools.wraps(register)
    def register_and_adopt(task: Any, **options: Any) -> Task:
        registered = register(task, **options)
        _adopt(registered, app)
        return registered

    compat.task_from_fun.set(app, create_and_adopt)
    app.register_task = register_and_adopt

    def adopt_all(**_: Any) -> None:
        for task in list(compat.tasks(app).values()):
            _adopt(task, app)

    app.on_after_finalize.connect(adopt_all, weak=False)
    # A task may run here and now before the app is finalized, and Celery makes a task when it is used first.
    adopt_all()
    for made_later in compat.pending_tasks(app):
        compat.when_made(made_later)(lambda lazy=made_later: _adopt(compat.get_current_object(lazy)(), app))


def _adopt(task: Task, app: Celery) -> None:
    """Put a registered task under the bridge if a policy names it; its own class stays its base."""
    if getattr(task, "ojs_bridged", False) or task.name.startswith("celery."):
        return
    kept, installed = of(task), installation(app).terms.policies.of(task.name)
    if kept.why_native or (installed is None and getattr(task, RETRY_OPTION, None) is None):
        return
    why, outside, native = unreadable(task), outside_of(task), type(task)
    if why is None:
        try:
            _take_over(task, outside)
        except Exception as error:  # noqa: BLE001 - a metaclass is the user's code
            why = _why(task, error)
    if why is not None:
        kept.why_native = why
        logger.warning("task %s stays native: %s", task.name, why)
        return
    kept.taken_from = native
    if installed and installed.acks_late is not None:
        kept.acks_late, task.acks_late = bool(task.acks_late), installed.acks_late
    if compat.orig_run.name in vars(task):
        kept.autoretrying = task.run
        # The policy retries; autoretry_for says only which errors are retried.
        task.run = autoretrying_outside(task) if outside else compat.orig_run(task)


def why_native(task: Task) -> str:
    """Return why `install` leaves a task native whatever the policies say, or "" if it does not."""
    if why := unreadable(task):
        return why
    native = type(task)
    try:
        _take_over(task, None)
    except Exception as error:  # noqa: BLE001 - as above
        return _why(task, error)
    task.__class__ = native
    return ""


def _why(task: Task, error: Exception) -> str:
    return f"its class {type(task).__qualname__} cannot be taken over: {type(error).__name__}: {error}"


def _take_over(task: Task, outside: Outside | None) -> None:
    native = type(task)
    attributes = {
        "__module__": native.__module__,
        "__doc__": native.__doc__,
        "ojs_native": property(native_of),
        "ojs_outside": outside,
        # The class of a task has its options; the bridge's own class would hide them.
        **{name: getattr(native, name) for name in _OWN if hasattr(native, name)},
    }
    ours = (*((SentOnCommit,) if hasattr(native, _ON_COMMIT) else ()), Bridged)
    try:
        task.__class__ = type(native.__name__, (*ours, native, ReplacedMethods), attributes)
    except TypeError:
        # Python takes the layout of an object from the first base. Bridged has another layout than a class
        # whose own first base has no dictionary: ABC, Generic, or a class with `__slots__ = ()`.
        meta = type(type(native).__name__, (_BridgeFirst, type(native)), {})
        task.__class__ = meta(native.__name__, (native, *ours, ReplacedMethods), attributes)


class _BridgeFirst(type):
    """The metaclass of a class whose first base is the user's, and whose first methods are the bridge's."""

    def mro(cls) -> list[type]:
        """Return the classes in the order in which a method is looked for."""
        own, *others = super().mro()
        ours = cls.__bases__[1:-1] if Bridged in cls.__bases__ else ()
        return [own, *ours, *(base for base in others if base not in ours)]


class SentOnCommit:
    """Refuses an invalid policy where the job is sent: after the commit it is too late."""

    def apply_async_on_commit(self: Any, *args: Any, **options: Any) -> None:
        """Send the job after the commit, as Celery's own does; raises InvalidRetryPolicy at once."""
        refuse_misnamed(self.name, options)
        check_task(self.app, self.name)
        if options.get(RETRY_OPTION) is not None:
            header_for(self.app, self.name, options[RETRY_OPTION])
        for later in ("link", "link_error"):
            if options.get(later):
                check_signatures(self.app, options[later])
        super().apply_async_on_commit(*args, **options)  # type: ignore[misc]


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
    errors: Errors | None = None,
    park_delays: bool | None = None,
    outbox: bool | None = None,
    depends: DependsLike = None,
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
    errors: Errors | None = None,
    park_delays: bool | None = None,
    outbox: bool | None = None,
    depends: DependsLike = None,
    base: type[Task] | None = None,
    **options: Any,
) -> Decorator: ...


def ojs_task(
    app: Celery | Callable[..., Any] | None = None,
    *,
    retry: PartialPolicy | None = None,
    retry_on: RetryOnLike | None = None,
    errors: Errors | None = None,
    park_delays: bool | None = None,
    outbox: bool | None = None,
    depends: DependsLike = None,
    base: type[Task] | None = None,
    **options: Any,
) -> Any:
    """Make a function a Celery task under the bridge; without an app it is a shared task.

    `retry_on` says which failures are retried: `"failure"`, all that are not non-retryable; `"asked"`, those
    for which the task's code asks; or exception classes, and what the code asks for. `park_delays` and
    `outbox` are those of the bridge, for this task. `depends` names the dependencies of its jobs, one or
    several, or maps them to the weights of its jobs. `options` are Celery's own. Raises InvalidRetryPolicy,
    and ConfigurationError for an invalid error map or `retry_on` and for Celery's own retry options, which
    would retry beside the policy.
    """
    if app is not None and not isinstance(app, Celery):
        options.update(park_delays=park_delays, outbox=outbox, depends=depends)
        return ojs_task(retry=retry, retry_on=retry_on, errors=errors, base=base, **options)(app)
    if not _MISNAMED.isdisjoint(options):
        _refuse_misnamed(options)
    check_partial(retry)
    check_errors(retry)
    ErrorMap(errors)
    if retry_on is not None:
        RetryOn(retry_on)

    def decorate(fun: Callable[..., Any]) -> Any:
        name = str(options.get("name") or getattr(fun, "__name__", fun))
        if isinstance(fun, (Task, Proxy)):
            raise ConfigurationError(f"task {name}: @ojs_task takes the place of @app.task and @shared_task")
        refuse_native(name, base or getattr(app, "Task", Task), options)
        settings = {**options, "ojs_retry": retry, "ojs_retry_on": retry_on, "ojs_errors": errors}
        settings.update({"ojs_park_delays": park_delays, OUTBOX_OPTION: outbox, DEPENDS_OPTION: depends})
        if app is None:
            return _shared(fun, base, settings)
        own = prepare(app)
        full_name = options.get("name") or app.gen_task_name(fun.__name__, fun.__module__)
        if own.terms.policies.is_named:
            check_whole(app, full_name, retry)
        elif own.bridge:
            try:
                RetryPolicy.merge(own.bridge.settings.retry, retry)
            except InvalidRetryPolicy as error:
                raise error.under(f"task {full_name}") from None
        own.declared[full_name] = retry
        return app.task(base=_with_bridge(base or app.Task), **settings)(fun)

    return decorate


def _refuse_misnamed(options: Mapping[str, Any]) -> None:
    lines = misnamed(options, "retry", ours=True)
    for option in sorted(options.keys() & {*_OWN[1:]}):
        lines.append(f"{option}: has the name {option.removeprefix('ojs_')} here")
    if lines:
        raise ConfigurationError(f"@ojs_task: {'; '.join(lines)}")


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
    bases = (*((SentOnCommit,) if hasattr(base, _ON_COMMIT) else ()), OJSTask, base, *last)
    return type(base.__name__, bases, {"abstract": True, "__module__": base.__module__})
