"""A wish is a call of `self.retry(...)`: a delay, a limit, and the arguments and options of the next run."""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from celery import Celery, Task
from celery.exceptions import MaxRetriesExceededError, Retry, TaskPredicate
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.compression import get_encoder
from kombu.entity import Exchange, Queue
from kombu.serialization import dumps

from ..engine.runs import Run
from ..messages import HEADER
from ..rules.decision import Decision, RetryAt
from ..rules.failures import safe_repr, traceback_of
from ..rules.job import Header, Job
from ..rules.policy import RetryPolicy
from .attach import LATER, LONGEST, attempts, automatic, autoretry_for, check_signatures
from .wire import EAGER_RETRIES, Arguments, Wire, arguments_of, with_arguments

logger = logging.getLogger("ojs_bridge")

_SECONDS = (int, float, type(None))
_SIGNATURES = (Mapping, list, tuple, type(None))
#: The types of the options that the message of the next run must be able to carry.
_KINDS: dict[str, tuple[type, ...]] = {
    "queue": (str, Queue),
    "exchange": (str, Exchange),
    "routing_key": (str,),
    "headers": (Mapping,),
    "time_limit": _SECONDS,
    "soft_time_limit": _SECONDS,
    "expires": (*_SECONDS, str, datetime),
    "shadow": (str,),
    "task_id": (str,),
    "stamped_headers": (list, tuple),
    **dict.fromkeys(LATER, _SIGNATURES),
}
#: The options of `apply_async` that say how Celery publishes. The bridge publishes in its own way.
_ON_PUBLISHING = frozenset(
    {
        "add_to_parent", "confirm_timeout", "connection", "declare", "event_dispatcher", "now", "producer",
        "publisher", "result_cls", "retry", "retry_policy", "route_name", "router", "task_type", "timeout",
        "timezone",
    }
)  # fmt: skip
#: The attribute of a task with the options of which the log has said that they do not count.
_SAID = "_ojs_said"

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def changed(run: Callable[..., Any], given: Arguments, args: Any, kwargs: Any) -> Arguments:
    """Return the arguments of a retry: `args` and `kwargs` replace those that were `given` to this run.

    A parameter that was passed the other way, by place or by name, is not passed twice. Raises TypeError for
    arguments that no message can carry.
    """
    if args is not None and not isinstance(args, (list, tuple)):
        raise TypeError(f"self.retry(args={args!r}): must be a list or a tuple")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"self.retry(kwargs={kwargs!r}): must be a mapping")
    if args is not None and kwargs is not None:
        return args, kwargs
    if args is not None:
        return args, _not_among(run, args, given[1])
    return given if kwargs is None else _by_name(run, given[0], kwargs)


def _not_among(run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keyword arguments without those that are passed by place now."""
    by_place = [p for p in _parameters(run).values() if p.kind in _BY_PLACE]
    passed = {p.name for p in by_place[: len(args)] if p.kind is p.POSITIONAL_OR_KEYWORD}
    return {name: value for name, value in kwargs.items() if name not in passed}


def _by_name(run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments with those replaced that are passed by name now."""
    parameters, rest = _parameters(run), dict(kwargs)
    replaced = list(args)
    for place, parameter in enumerate(p for p in parameters.values() if p.kind in _BY_PLACE):
        if place < len(args) and parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name in rest:
            replaced[place] = rest.pop(parameter.name)
    return tuple(replaced), rest


def _parameters(run: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(run).parameters
    except (TypeError, ValueError):
        return {}


class Asked(NamedTuple):
    """What a retry changes of its job: the arguments, None if they stay, and options of `apply_async`."""

    arguments: Arguments | None = None
    options: Mapping[str, Any] = {}


NOTHING_ASKED = Asked()


def automatically(task: Task, raised: BaseException, given: Callable[..., Arguments]) -> Asked:
    """Return what a task's `retry_kwargs` ask for an error that Celery retries by itself.

    The limit and the waits in them are in the policy. `given` returns the arguments of the run.
    """
    if not issubclass(type(raised), autoretry_for(task)):
        return NOTHING_ASKED
    never = (TaskPredicate, *automatic(task, "dont_autoretry_for", default=()))
    kept = automatic(task, "retry_kwargs", default=None) or {}
    options = {name: kept[name] for name in kept if name not in ("max_retries", "countdown", "throw")}
    if not options or issubclass(type(raised), never):
        return NOTHING_ASKED
    if options.pop("eta", None):
        say_once(task, "eta", "a time in retry_kwargs would be the same for every job")
    args, kwargs = options.pop("args", None), options.pop("kwargs", None)
    try:
        wish = Wish(
            task,
            given(partly=(args is None) is not (kwargs is None)),
            None,
            args,
            kwargs,
            None,
            None,
            options,
        )
    except (TypeError, ValueError) as error:
        say_once(task, "**retry_kwargs", str(error))
        return NOTHING_ASKED
    return Asked(wish.arguments, wish.options)


def are_changed(job: Job, wire: Wire, given: Arguments) -> bool:
    """Return whether a run has changed its arguments, and a message can carry them."""
    try:
        came = arguments_of(wire)
        if (list(given[0]), given[1]) == (list(came[0]), came[1]):
            return False
        with_arguments(wire, *given)
    except Exception as error:  # noqa: BLE001 - the arguments are of the user's classes
        logger.warning("job %s: its retry has the arguments as they came: %r", job, error)
        return False
    return True


def limited(task: Task, begun: Run, wish: Wish) -> Run:
    """Return a run under the `max_retries` of a `self.retry(...)`, unless an owner has set a limit."""
    limit = wish.max_attempts
    if limit is None:
        return begun
    if not begun.task.layers.limit_is_native:
        if limit != begun.policy.runs:
            say_once(task, "max_retries", f"its policy has max_attempts={begun.policy.max_attempts}")
        return begun
    return begun._replace(policy=RetryPolicy.merge(begun.policy, {"max_attempts": limit}))


def eager_signature(task: Task, request: Any, asked: Asked, job: Job, header: Header) -> Any:
    """Return the signature by which an eager retry runs at once."""
    args, kwargs = asked.arguments or (None, None)
    headers = {**(request.headers or {}), **(asked.options.get("headers") or {}), HEADER: header.text}
    retries = job.attempt - 1
    options = {**asked.options, "headers": headers, EAGER_RETRIES: retries}
    return task.signature_from_request(request, args, kwargs, retries=retries, **options)


@dataclass
class Wish:
    """A call of `self.retry(...)`; raises TypeError and ValueError for what no message can carry.

    `given` are the arguments of this run, and `cause` is the error that the retry is for. The call raises
    `signal` or, when no attempt is left, `error`: its `exc`, or MaxRetriesExceededError, as Celery does.
    """

    task: Task
    given: Arguments
    exc: Any
    args: Any
    kwargs: Any
    eta: Any
    countdown: Any
    options: Mapping[str, Any]
    cause: BaseException | None = field(init=False)
    signal: Retry = field(init=False)
    error: BaseException = field(init=False)
    max_retries: Any = None
    arguments: Arguments | None = None
    decision: Decision | None = None

    def __post_init__(self) -> None:
        # An error may say of itself that it is false.
        is_given = issubclass(type(self.exc), (BaseException, type)) or bool(self.exc)
        self.exc = _raised(self.exc) if is_given else None
        self.cause = sys.exc_info()[1] if self.exc is None else self.exc
        self.signal = Retry(when=self.eta or self.countdown)
        if self.cause is not None and issubclass(type(self.cause), Exception):
            # Celery's Retry would read it, and it may raise.
            self.signal.exc, self.signal.excs = self.cause, safe_repr(self.cause)
        exceeded = MaxRetriesExceededError("self.retry() was called, and no attempt is left")
        self.error = exceeded if self.exc is None else self.exc
        self.options = _checked(self.task, self.options)
        if self.args is not None or self.kwargs is not None:
            self.arguments = changed(self.task.run, self.given, self.args, self.kwargs)

    @property
    def max_attempts(self) -> int | None:
        """The most attempts that this call allows, if it says so; raises TypeError for no number."""
        return None if self.max_retries is None else attempts(self.max_retries)

    def after(self, now: datetime, zone: Any) -> timedelta | None:
        """Return the hint on the delay, or None; an `eta` without a zone is in the app's zone.

        Raises ValueError for what is not a time.
        """
        return until(self.eta, now, zone) if self.eta else countdown_of(self.countdown)

    @property
    def default_delay(self) -> timedelta:
        """The delay that Celery takes if the call names none."""
        return timedelta(seconds=min(max(self.task.default_retry_delay or 0, 0), LONGEST))

    def answer(self) -> BaseException:
        """Return the exception that the call raises, after the decision."""
        if not self.refused:
            signal: BaseException = self.signal
            return signal
        if self.exc is None:
            self.error = self._exceeded()
        return self.error

    def raised_as(self, exc: BaseException) -> bool:
        """Return whether the call itself has raised an exception."""
        return exc is self.signal or exc is self.error

    @property
    def refused(self) -> bool:
        """Whether the policy allows no retry."""
        return self.decision is not None and not isinstance(self.decision, RetryAt)

    def _exceeded(self) -> BaseException:
        """Return the error that Celery raises, with its text; the task may have another class for it."""
        args, kwargs = self.arguments or self.given
        name, job_id = self.task.name, self.task.request.id
        error: BaseException = self.task.MaxRetriesExceededError(
            f"Can't retry {name}[{job_id}] args:{safe_repr(tuple(args))} kwargs:{safe_repr(dict(kwargs))}",
            task_args=tuple(args),
            task_kwargs=dict(kwargs),
        )
        return error


def until(eta: Any, now: datetime, zone: Any) -> timedelta | None:
    """Return how long it is until an `eta`; raises ValueError for what is not a time."""
    if not eta:
        return None
    try:
        at: datetime = maybe_make_aware(maybe_iso8601(eta), zone)
        return max(at - now, timedelta(0))
    except Exception as error:
        raise ValueError(f"self.retry(eta={eta!r}): must be a datetime or an ISO 8601 time") from error


def countdown_of(countdown: Any) -> timedelta | None:
    """Return a `countdown`, at most a century; raises ValueError for what is not a number of seconds."""
    if countdown is None:
        return None
    try:
        seconds = float(countdown)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise ValueError(f"self.retry(countdown={countdown!r}): must be a number of seconds")
    return timedelta(seconds=min(max(seconds, 0.0), LONGEST))


def _raised(exc: Any) -> BaseException:
    """Return what `raise exc` raises: `exc`, an instance of it, or the error that it cannot be raised."""
    if issubclass(type(exc), BaseException):
        return exc  # type: ignore[no-any-return]
    try:
        raise exc
    except BaseException as raised:  # noqa: BLE001 - it is not raised here
        return BaseException.with_traceback(raised, (found := traceback_of(raised)) and found.tb_next)


def say_once(task: Task, option: str, why: str) -> None:
    """Log once for a task that an option of its `self.retry(...)` does not count."""
    said: set[str] = vars(task).setdefault(_SAID, set())
    if option not in said:
        said.add(option)
        logger.warning("task %s: self.retry(%s=...) does not count: %s", task.name, option, why)


def _checked(task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a message can carry, an `expires` as a time.

    Raises TypeError or ValueError for options with which a parked retry could not be published, or that the
    next worker could not read.
    """
    app, carried = task.app, {}
    for name, value in options.items():
        if name in _ON_PUBLISHING:
            say_once(task, name, "the bridge publishes the retry in its own way")
            continue
        kinds = _KINDS.get(name)
        if kinds and value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            needed = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise TypeError(f"self.retry({name}={value!r}): must be of type {needed}")
        if name in LATER and value:
            _check_later(app, name, value)
        carried[name] = value
    _check_names(app, carried)
    if carried.get("expires") is not None:
        carried["expires"] = _time_of(app, carried["expires"])
    return carried


def _check_later(app: Celery, name: str, value: Any) -> None:
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if not isinstance(each, Mapping):
            raise TypeError(f"self.retry({name}={value!r}): must be a signature, or a list of signatures")
    check_signatures(app, value)


def _check_names(app: Celery, options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for a queue, a serializer or a compression that the app does not have."""
    if "retries" in options:
        raise TypeError("self.retry(retries=...): the bridge counts the retries")
    queue = options.get("queue")
    if isinstance(queue, str) and queue not in app.amqp.queues and not app.amqp.queues.create_missing:
        raise ValueError(f"self.retry(queue={queue!r}): the app has no such queue")
    for name, find in (("serializer", lambda kind: dumps("", serializer=kind)), ("compression", get_encoder)):
        if options.get(name) is None:
            continue
        try:
            find(options[name])
        except Exception as error:
            raise ValueError(f"self.retry({name}={options[name]!r}): kombu has no such {name}") from error


def _time_of(app: Celery, expires: Any) -> str:
    """Return when a job expires, as Celery writes it; a number is in seconds from now."""
    try:
        at = app.now() + timedelta(seconds=expires) if isinstance(expires, (int, float)) else expires
        return str(maybe_make_aware(maybe_iso8601(at), app.timezone).isoformat())
    except Exception as error:
        raise ValueError(f"self.retry(expires={expires!r}): must be seconds, or a time") from error
