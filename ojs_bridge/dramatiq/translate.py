"""The translation of Dramatiq's messages and exceptions into jobs and outcomes, and back."""

from __future__ import annotations

import base64
import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

import dramatiq
from dramatiq.broker import Broker, MessageProxy
from dramatiq.errors import ConnectionClosed, ConnectionFailed
from dramatiq.errors import Retry as NativeRetry
from dramatiq.middleware import AgeLimit, Interrupt, Shutdown, TimeLimitExceeded
from dramatiq.middleware.middleware import MiddlewareError

from ..adapters import argument_of
from ..engine.layers import RetryOn
from ..engine.storage_retry import is_of_process
from ..errors import InvalidRetryPolicy, InvalidState, Unpublishable
from ..messages import HEADER, RETRY_OPTION
from ..rules.failures import (
    TIMEOUT,
    ErrorMap,
    Failure,
    Interrupted,
    Outcome,
    Snoozed,
    cause_of,
    cut,
    outcome_of,
    safe_repr,
)
from ..rules.job import Header, Job, count_of, decoded
from ..rules.responses import Snooze
from .compat import message_in

logger = logging.getLogger("ojs_bridge")

#: RabbitMQ's answers to a declaration that is not allowed, or whose arguments are not.
_REFUSALS = (403, 405, 406, 540)

#: The framework's name, in a letter, and where an engine knows its publishers.
NAME = "dramatiq"

#: The error types that the spec reserves for the runtime.
WORKER_ERRORS: dict[type[BaseException], str] = {TimeLimitExceeded: TIMEOUT, Shutdown: "shutdown"}

THROWN = "which the actor's throws option rules out"
RETRY_WHEN_SAID_NO = "and the actor's retry_when said no"
_RETRY_WHEN_FAILED = "and the actor's retry_when failed with"
_MOST = 200


class NotRun(MiddlewareError, NativeRetry):
    """An attempt that this worker does not run; its outcome has a line in the log.

    Dramatiq logs all other errors but its `Retry` with their tracebacks, as if this worker's code had failed.
    """


class Refused(NotRun):
    """The retry state or the policy of the message cannot be read, so that its actor is not run."""


class LostAttempt(NotRun):
    """The worker that ran this attempt has died: the attempt has failed, and the actor is not run."""


class InvalidOptions(InvalidRetryPolicy, MiddlewareError):
    """InvalidRetryPolicy as a MiddlewareError, the only error that Dramatiq lets out of its hooks."""


def parts_of(message: MessageProxy) -> tuple[object, ...]:
    """Return what a message says."""
    inside = message_in(message)
    return inside.args, inside.kwargs, inside.options


def argument_in(broker: Broker, message: dramatiq.Message[Any], name: str) -> object:
    """Return an argument of a message's job by its name; None if it has none."""
    return argument_of(broker.get_actor(message.actor_name).fn, message.args, message.kwargs, name)


def bare_job(message: dramatiq.Message[Any] | MessageProxy, age: float | None = None) -> Job:
    """Return the job of a message by Dramatiq's own options and native counter; never raises.

    `age` is the number of milliseconds after which AgeLimit drops the message.
    """
    wish, retries = message.options.get(RETRY_OPTION), count_of(message.options.get("retries")) or 0
    created_at = time_of(message.message_timestamp)
    return Job(
        # A producer may have given it another type, which stores, events and replays do not know.
        id=str(message.message_id),
        type=message.actor_name,
        queue=message.queue_name,
        attempt=1 + retries,
        fence=retries,
        # The producer did not turn it into a header.
        retry=dict(wish) if wish and isinstance(wish, Mapping) else None,
        created_at=created_at,
        expires=time_of(message.message_timestamp + age) if age and created_at else None,
    )


def max_age(broker: Broker, message: dramatiq.Message[Any]) -> float | None:
    """Return the number of milliseconds after which the broker's AgeLimit drops a message, if it does."""
    limits = [m.max_age for m in broker.middleware if isinstance(m, AgeLimit)]
    limit = limits[0] if limits else None
    actor = broker.actors.get(message.actor_name)
    age = message.options.get("max_age") or (actor.options.get("max_age", limit) if actor else limit)
    return age if isinstance(age, (int, float)) else None


def time_of(milliseconds: Any) -> datetime | None:
    """Return the time of milliseconds since 1970, or None if it is no time."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, timezone.utc)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def job_of(message: dramatiq.Message[Any], bare: Job) -> Job | InvalidState:
    """Return the job of a delivered message, or the error in its retry state."""
    return decoded(message.options.get(HEADER), bare, message.options.get("retries"))


def outcome(
    message: MessageProxy | dramatiq.Message[Any],
    options: Mapping[str, Any],
    exc: BaseException,
    errors: ErrorMap,
    retry_on: RetryOn,
) -> Outcome:
    """Translate an exception of an actor by the bridge's rules, and by Dramatiq's own."""
    cause = cause_of(exc)
    if cause is not None and issubclass(type(cause), Interrupt):
        # An async actor that does not end in time raises a RuntimeError from its interrupt.
        exc = cause
    # `isinstance` would ask the error for its class, which may raise.
    kind = type(exc)
    if issubclass(kind, Shutdown):
        return Interrupted()
    result = outcome_of(exc, errors, None if issubclass(kind, NativeRetry) else retry_on.rules_out(exc))
    if isinstance(result, Snoozed) and issubclass(kind, Snooze):
        return result
    final = result.final if isinstance(result, Failure) else None
    throws, retry_when = message.options.get("throws") or options.get("throws"), options.get("retry_when")
    if throws and issubclass(kind, throws):
        final = THROWN
    elif retry_when is not None:
        final = _refused(retry_when, message, exc)
    if isinstance(result, Snoozed):
        # The map said so, and the actor's own options may forbid it.
        return outcome_of(exc, errors, final) if final else result
    if issubclass(kind, NativeRetry):
        result = dataclasses.replace(result, retry_after=_hint(getattr(exc, "delay", None)))
    return dataclasses.replace(result, final=final)


def _hint(milliseconds: Any) -> timedelta | None:
    if milliseconds is None:
        return None
    try:
        return max(timedelta(milliseconds=milliseconds), timedelta(0))
    except OverflowError:
        return timedelta.max
    except (TypeError, ValueError):
        logger.warning("dramatiq.errors.Retry: the delay %r is no number of milliseconds", milliseconds)
        return None


def _refused(
    retry_when: Callable[[int, BaseException], bool],
    message: MessageProxy | dramatiq.Message[Any],
    exc: BaseException,
) -> str | None:
    """Return why `retry_when` refuses a retry, or None; the job ends if it raises, as without the bridge."""
    try:
        return None if retry_when(message.options.get("retries", 0), exc) else RETRY_WHEN_SAID_NO
    except Interrupt:
        raise
    except BaseException as error:  # even SystemExit: the job would be retried without end
        logger.exception("job %s: retry_when %r failed, and the job ends", bare_job(message), retry_when)
        return f"{_RETRY_WHEN_FAILED} {cut(safe_repr(error), _MOST)}"


def next_options(job: Job, header: Header | None, failure: Failure | None) -> dict[str, Any]:
    """Return the options of a job's next message: the native counter in step, and what dashboards show."""
    options: dict[str, Any] = {"retries": job.attempt - 1}
    if header is not None:
        options[HEADER] = header.state
    if failure is not None:
        # No source files are read for it.
        lines = ["Traceback (most recent call last):", *[f"  {frame}" for frame in failure.backtrace]]
        options["traceback"] = "\n".join([*lines, f"{failure.type}: {failure.message}"])
        options["requeue_timestamp"] = int(time.time() * 1000)
    return options


def encodable(message: MessageProxy | dramatiq.Message[Any]) -> dramatiq.Message[Any]:
    """Return a message without the options that cannot be encoded, which only this process can have added.

    Raises the encoder's error if its arguments cannot be encoded either.
    """
    plain = message_in(message) if isinstance(message, MessageProxy) else message
    try:
        plain.encode()
    except Exception:  # noqa: BLE001 - the application's own encoder may raise anything
        kept = {name: value for name, value in plain.options.items() if _travels(name, value)}
        lost = ", ".join(sorted(plain.options.keys() - kept.keys()))
        plain = dataclasses.replace(plain, options=kept)
        plain.encode()
        logger.warning("job %s: its options %s cannot be encoded and stay behind", bare_job(plain), lost)
    return plain


def _travels(name: str, value: Any) -> bool:
    try:
        dramatiq.get_encoder().encode({name: value})
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


def original(message: MessageProxy | dramatiq.Message[Any]) -> dict[str, Any]:
    """Return a message as the store keeps it: the bytes of the application's own encoder."""
    try:
        encoded = message.encode()
    except Exception:  # noqa: BLE001 - the application's own encoder may raise anything
        encoded = encodable(message).encode()
    try:
        return {"encoded": encoded.decode("utf-8"), "encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"encoded": base64.b64encode(encoded).decode("ascii"), "encoding": "base64"}


def restored(message: Mapping[str, Any]) -> dramatiq.Message[Any]:
    """Return the message that the store kept as `original` made it; raises Unpublishable if it is damaged."""
    try:
        text: str = message["encoded"]
        raw = base64.b64decode(text) if message["encoding"] == "base64" else text.encode("utf-8")
        return dramatiq.Message.decode(raw)
    except Exception as error:
        if is_of_process(error, str(message.get("encoded")).encode()):
            raise
        raise Unpublishable(f"its message is damaged: {type(error).__name__}: {error}") from error


def outages() -> tuple[type[Exception], ...]:
    """Return the errors of a broker that cannot be reached, or takes no more."""
    errors = (ConnectionClosed, ConnectionFailed, OSError, *redis_outages())
    if "dramatiq.brokers.rabbitmq" not in sys.modules:
        return errors
    from pika.exceptions import AMQPError

    return (*errors, AMQPError)


def error_in_words(error: Exception) -> str:
    """Return the class and the text of an error, which the newest redis-py leaves out of its `repr`."""
    return f"{type(error).__name__}: {error}"


def redis_errors() -> tuple[type[Exception], ...]:
    """Return the errors of Redis, such as a refusal to write without replicas."""
    if "dramatiq.brokers.redis" not in sys.modules:
        return ()
    from redis import RedisError

    return (RedisError,)


def redis_outages() -> tuple[type[Exception], ...]:
    """Return the errors of a Redis outage; Dramatiq does not take all of them for an outage."""
    if "dramatiq.brokers.redis" not in sys.modules:
        return ()
    from redis import exceptions as e

    return (e.ConnectionError, e.TimeoutError, e.OutOfMemoryError, e.ReadOnlyError, e.ClusterDownError)


def is_refusal(error: Exception) -> bool:
    """Return whether RabbitMQ has refused to declare a queue, which is no outage."""
    cause = error.args[0] if isinstance(error, ConnectionClosed) and error.args else error
    return getattr(cause, "reply_code", None) in _REFUSALS
