"""A wish is a call of `self.retry(...)`: a delay, a limit, and the arguments and options of the next run."""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple, cast

from celery import Celery, Task
from celery.app.task import Context
from celery.exceptions import MaxRetriesExceededError, Retry, TaskPredicate
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.compression import get_encoder
from kombu.serialization import dumps, registry
from kombu.utils.encoding import safe_repr as kombu_repr

from ..engine.runs import Run
from ..messages import CREATED, HEADER
from ..rules.decision import Decision, RetryAt
from ..rules.failures import Failure, safe_repr, traceback_of
from ..rules.job import Header, Job
from ..rules.policy import LARGEST, RetryPolicy
from . import compat
from .native import LONGEST, attempts, automatic, autoretry_for, of
from .wire import (
    BROKER_HEADERS,
    DELAY_PREFIX,
    DELAYED,
    EAGER_RETRIES,
    TRACE_CONTEXT,
    Arguments,
    Wire,
    arguments_of,
    queue_of,
    time_in,
)

logger = logging.getLogger("ojs_bridge")

#: What a producer is told of a message and is no property of it; `expiration` is said by its header, too.
_ON_PUBLISHING = frozenset(
    {
        "compression", "confirm_timeout", "content_encoding", "content_type", "declare", "expiration",
        "immediate", "mandatory", "redelivered", "retry", "retry_policy", "serializer", "timeout",
    }
)  # fmt: skip
#: The one attribute of ours that a task's request has. Without it here, Celery would take it for a header,
#: and send it along.
Context.ojs_run = None
#: The mark of the `retry` that the bridge puts in the place of Celery's.
OURS = "ojs_ours"

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
        by_place = [p for p in _parameters(run).values() if p.kind in _BY_PLACE]
        passed = {p.name for p in by_place[: len(args)] if p.kind is p.POSITIONAL_OR_KEYWORD}
        return args, {name: value for name, value in given[1].items() if name not in passed}
    return given if kwargs is None else _by_name(run, given[0], kwargs)


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


def limited(task: Task, run: Run, wish: Wish) -> Run:
    """Return a run under the `max_retries` of a `self.retry(...)`, unless an owner has set a limit."""
    limit = attempts(wish.max_retries)
    if not run.task.layers.limit_is_native:
        if limit != run.policy.runs:
            say_once(task, "max_retries", f"its policy has max_attempts={run.policy.max_attempts}")
        return run
    return run._replace(policy=RetryPolicy.merge(run.policy, {"max_attempts": limit}))


class Running:
    """The run that a request is within, its `ojs_run`; of a job that Celery itself runs nothing is known.

    A message may have a header of that name.
    """

    admitted: Run | None = None
    #: The retry that the task has asked for, or that the bridge has asked the task's own `retry` for.
    wish: Wish | None = None

    @property
    def job(self) -> Job | None:
        """The job of this run; None before it has begun."""
        return self.admitted and self.admitted.job


class Ended:
    """The `ojs_run` of a request whose run has ended: what its task's hooks call directly is no run."""

    __slots__ = ()


ENDED = Ended()


class Failed(NamedTuple):
    """A failure for which the bridge calls a task's own `retry`, with this `countdown`."""

    outcome: Failure
    retry: RetryAt | None
    countdown: Any


def is_automatic(task: Task, run: Run, raised: BaseException) -> bool:
    """Return whether Celery itself calls `retry` for an error: its task's `autoretry_for` names it."""
    kind = type(raised)
    if not issubclass(kind, autoretry_for(task)) or run.task.layers.retries.rules_out(raised):
        return False
    return not issubclass(kind, (TaskPredicate, *automatic(task, "dont_autoretry_for", default=())))


def options_of(task: Task, run: Run, retry: RetryAt | None, *, automatically: bool) -> dict[str, Any]:
    """Return the options with which a task's own `retry` is called for an error.

    They are Celery's, as far as no owner has said how often the job runs, and when.
    """
    layers = run.task.layers
    options = dict(automatic(task, "retry_kwargs", default=None) or {}) if automatically else {}
    if not layers.limit_is_native:
        options.pop("max_retries", None)
    backs_off = automatically and automatic(task, "retry_backoff", default=False)
    if retry is not None and (backs_off or not automatically or not layers.waits_are_native):
        options.pop("eta", None)
        options["countdown"] = whole(retry.delay)
    return options


def without_limit(run: Run) -> Run:
    """Return a run that may be retried as often as it fails."""
    return run._replace(policy=RetryPolicy.merge(run.policy, {"max_attempts": LARGEST}))


def answered(task: Task, raised: BaseException, options: Mapping[str, Any]) -> BaseException:
    """Call a task's own `retry` while its error is handled, as Celery does; return what it raises."""
    trace = traceback_of(raised)
    reason = vars(raised).get("exc") if issubclass(type(raised), Retry) else raised
    answer: Any
    try:
        raise raised
    except BaseException:  # noqa: BLE001 - the task's code may ask which error is handled
        try:
            answer = task.retry(exc=reason, **options)
        except BaseException as error:  # noqa: BLE001 - it is judged
            answer = error
    BaseException.with_traceback(raised, trace)
    if issubclass(type(answer), BaseException):
        return cast("BaseException", answer)
    return TypeError(f"{task.name}.retry() returned {safe_repr(answer)}")


def eager_signature(task: Task, request: Any, signature: Any, job: Job, header: Header) -> Any:
    """Return the signature by which an eager retry, or an eager snooze, runs at once."""
    signature = signature or task.signature_from_request(request)
    options = signature.options
    options["headers"] = {**(options.get("headers") or {}), HEADER: header.text}
    options[EAGER_RETRIES] = options["retries"] = job.attempt - 1
    return signature


@dataclass
class Caught:
    """Stands for a producer at the bottom of a retry's way, and keeps its message, as it is encoded.

    What comes after the message, such as Celery's event of it, is published.
    """

    _app: Celery
    _producer: Any
    connection: Any
    wire: Wire | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(
        self, body: Any, *, exchange: Any = "", routing_key: str = "", headers: Any = None, **options: Any
    ) -> Any:
        """Keep the first message; raises the error of a serializer or a compression."""
        if self.wire is not None:
            place = {"exchange": exchange, "routing_key": routing_key}
            return self._producer.publish(body, **place, headers=headers, **options)
        content_type, encoding, data = dumps(body, serializer=options.get("serializer"))
        headers = {name: value for name, value in (headers or {}).items() if name not in BROKER_HEADERS}
        if options.get("compression"):
            _, headers["compression"] = get_encoder(options["compression"])
        properties = {name: value for name, value in options.items() if name not in _ON_PUBLISHING}
        exchange = getattr(exchange, "name", exchange) or ""
        place = {"exchange": exchange, "routing_key": routing_key}
        queue = queue_of(self._app, place) if exchange else routing_key
        if exchange.startswith(DELAYED) and (known := self._app.amqp.queues.get(queue)):
            exchange, routing_key = known.exchange.name, DELAY_PREFIX.sub("", routing_key)
        if exchange and queue not in self._app.amqp.queues:
            queue = ""
        self.wire = Wire(data, content_type, encoding, headers, properties, exchange, routing_key, queue)
        return None


@dataclass
class Wish:
    """A call of `self.retry(...)`; raises TypeError and ValueError for what no message can carry.

    `cause` is the error that the retry is for. The call raises `signal` or, when no attempt is left, `error`:
    its `exc`, or MaxRetriesExceededError, as Celery does.
    """

    task: Task
    exc: Any
    args: Any = None
    kwargs: Any = None
    eta: Any = None
    countdown: Any = None
    max_retries: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    cause: BaseException | None = field(init=False)
    error: BaseException = field(init=False)
    decision: Decision | None = None
    #: Whether the policy allows the retry, and what tells Celery of it.
    accepted: bool = False
    signal: Any = None
    #: What the call raises.
    raised: BaseException | None = None
    #: The id of the next run while the retry is on its way down, and the message that has come down.
    sending: Any = None
    wire: Wire | None = None
    _first: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not issubclass(type(self.exc), BaseException):
            # An error may say of itself that it is false.
            self.exc = _raised(self.exc) if isinstance(self.exc, type) or self.exc else None
        self.cause = sys.exc_info()[1] if self.exc is None else self.exc
        exceeded = MaxRetriesExceededError("self.retry() was called, and no attempt is left")
        self.error = exceeded if self.exc is None else self.exc

    def after(self, now: datetime, zone: Any) -> timedelta | None:
        """Return the hint on the delay, or None; an `eta` without a zone is in the app's zone.

        Raises ValueError for what is not a time.
        """
        return until(self.eta, now, zone) if self.eta else countdown_of(self.countdown)

    @property
    def default_delay(self) -> timedelta:
        """The delay that Celery takes if the call names none."""
        return timedelta(seconds=min(max(self.task.default_retry_delay or 0, 0), LONGEST))

    @property
    def expires(self) -> datetime | None:
        """When the next run expires, by the call's own option; None for what Celery cannot read."""
        expires, app = self.options["expires"], self.task.app
        if isinstance(expires, (int, float)):
            expires = app.now() + timedelta(seconds=expires)
        return time_in(app, expires.isoformat() if isinstance(expires, datetime) else expires)

    def decide(self, run: Run, decision: Decision, wire: Wire) -> BaseException:
        """Take the decision, and make the signature of the next run; return what the call raises.

        `wire` is the message of this run.
        """
        task, request, layers = self.task, self.task.request, run.task.layers
        self.decision, self._first = decision, wire.headers
        args, kwargs = self.args, self.kwargs
        if args is None and kwargs is None:
            if not (layers.is_native or request.is_eager):
                # Under a policy a run cannot change the arguments of the next.
                args, kwargs = arguments_of(wire)
        elif args is None or kwargs is None:
            args, kwargs = changed(task.run, (request.args or (), request.kwargs or {}), args, kwargs)
        eta, countdown = self.eta or None, self.countdown
        if isinstance(decision, RetryAt) and not (eta and layers.waits_are_native):
            countdown = decision.delay
            eta, countdown = None, int(countdown) if countdown == int(countdown) else countdown
        when = eta or countdown
        if isinstance(decision, RetryAt) and 0 < decision.delay < 1:
            # Celery has RabbitMQ delay whole seconds, and loses a job that is due within the next one.
            eta, countdown = None, 1
        conf, headers, mode = task.app.conf, wire.headers, wire.properties.get("delivery_mode")
        # Celery would lose how the message is written, and where it was when RabbitMQ delayed it.
        kept = {
            "serializer": compat.type_to_name_of(registry).get(wire.content_type),
            "compression": headers.get("compression"),
            "delivery_mode": mode if mode == 1 else None,
            "ignore_result": headers.get("ignore_result"),
            "queue": wire.queue if wire.exchange.startswith(DELAYED) else None,
        }
        usual = {"serializer": task.serializer or conf.task_serializer, "ignore_result": task.ignore_result}
        options = {name: value for name, value in kept.items() if value not in (None, usual.get(name))}
        options = {**({} if request.is_eager else options), **self.options}
        signature = task.signature_from_request(
            request, args, kwargs, countdown=countdown, eta=eta, retries=run.job.attempt, **options
        )
        if not isinstance(decision, RetryAt):
            if self.exc is None:
                self.error = self._exceeded(signature)
            self.raised = self.error
            return self.error
        self.signal = signal = Retry(when=when, is_eager=request.is_eager, sig=signature)
        if issubclass(type(self.exc), Exception):
            # Celery's Retry would read it, and it may raise.
            signal.exc, signal.excs = self.exc, kombu_repr(self.exc)
        self.accepted, self.raised = True, signal
        raised: BaseException = signal
        return raised

    def catch(self, send_task: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
        """Keep the message of the retry, as its way down has made it, in the place of a producer.

        It has the headers that its job was first sent with.
        """
        own, first, app = {CREATED}, self._first, self.task.app
        if "traceparent" in first:
            own |= TRACE_CONTEXT
        if self.args is None and self.kwargs is None:
            # A user's text may hide what the arguments are.
            own |= {"argsrepr", "kwargsrepr"} - self.options.keys()
        with app.producer_or_acquire() as producer:
            caught = Caught(app, producer, producer.connection)
            ours = {"producer": caught, "publisher": None, "connection": None}
            try:
                return send_task(name, *args, **{**options, **ours})
            finally:
                if (wire := caught.wire) is not None:
                    others = {name: value for name, value in wire.headers.items() if name not in own}
                    headers = {**others, **{name: first[name] for name in own if name in first}}
                    asked = {name: self.options[name] for name in ("expiration",) if name in self.options}
                    self.wire = replace(wire, headers=headers, properties={**wire.properties, **asked})

    def _exceeded(self, signature: Any) -> BaseException:
        """Return the error that Celery raises, with its text; the task may have another class for it."""
        args, kwargs = signature.args, signature.kwargs
        name, job_id = self.task.name, self.task.request.id
        error: BaseException = self.task.MaxRetriesExceededError(
            f"Can't retry {name}[{job_id}] args:{safe_repr(tuple(args))} kwargs:{safe_repr(dict(kwargs))}",
            task_args=tuple(args),
            task_kwargs=dict(kwargs),
        )
        return error


def reason_of(signal: Any) -> BaseException:
    """Return the error for which a Retry of Celery's was raised, or itself."""
    reason: BaseException = signal.exc if issubclass(type(signal.exc), BaseException) else signal
    return reason


def whole(seconds: float) -> float:
    """Return a number of seconds as it is read best: without a fraction of zero."""
    return int(seconds) if seconds == int(seconds) else seconds


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
        return cast("BaseException", exc)
    try:
        raise exc
    except BaseException as raised:  # noqa: BLE001 - it is not raised here
        return BaseException.with_traceback(raised, (found := traceback_of(raised)) and found.tb_next)


def say_once(task: Task, option: str, why: str) -> None:
    """Log once for a task that an option of its `self.retry(...)` does not count."""
    said = of(task).said
    if option not in said:
        said.add(option)
        logger.warning("task %s: self.retry(%s=...) does not count: %s", task.name, option, why)
