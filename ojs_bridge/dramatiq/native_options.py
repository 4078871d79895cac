"""Dramatiq's native options as a retry policy, and the log lines of its stock `Retries`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dramatiq.broker import Broker, MessageProxy
from dramatiq.logging import get_logger
from dramatiq.middleware import Retries
from dramatiq.middleware.retries import DEFAULT_MAX_BACKOFF, DEFAULT_MIN_BACKOFF

from ..engine.layers import NativeJitter
from ..engine.runs import Postpone, Refuse, Run
from ..rules.backoff import Rng
from ..rules.decision import DeadLettered, Discarded, RetryAt
from ..rules.duration import format_duration
from ..rules.policy import LARGEST
from .translate import RETRY_WHEN_SAID_NO, THROWN

#: The logger of the stock `Retries`, so that a search in the logs finds its lines as before.
logger = get_logger(Retries.__module__, Retries)

#: The settings of a broker that has no `Retries`, and what Dramatiq then does with each of its actors.
NO_RETRIES: Mapping[str, Any] = {"max_retries": 0}
ONCE: Mapping[str, Any] = {"max_attempts": 1}

#: The mean of the factor by which Dramatiq's jitter stretches a wait.
_MEAN = 1.5

#: The native options that a message may bring, and the field of a policy that each of them sets.
NATIVE_FIELDS = (
    ("max_retries", "max_attempts"),
    ("min_backoff", "initial_interval"),
    ("max_backoff", "max_interval"),
)
INTERVAL_OPTIONS = frozenset(("min_backoff", "max_backoff"))
#: The options that `Retries` alone reads.
OF_RETRIES = INTERVAL_OPTIONS | {"max_retries", "on_retry_exhausted", "retry_when"}


def options_as_policy(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the native options of an actor or a message as a partial policy; never raises.

    `max_retries` counts retries, and `max_attempts` runs. `retry_when` takes the place of `max_retries`. The
    jitter is Dramatiq's own: it draws a wait between once and twice `min_backoff`, where the specification
    draws between half and one and a half times `initial_interval`. A value that is no number stays as it is:
    the policy's validation names it.
    """
    partial: dict[str, Any] = {}
    if options.get("retry_when") is not None:
        partial["max_attempts"] = LARGEST
    elif "max_retries" in options:
        partial["max_attempts"] = _attempts(options["max_retries"])
    if options.get("min_backoff") is not None or options.get("max_backoff") is not None:
        partial.update(_intervals(options.get("min_backoff"), options.get("max_backoff")))
    return partial


def _attempts(retries: Any) -> Any:
    if retries is None:
        return LARGEST
    return max(retries, 0) + 1 if type(retries) is int else retries


def _intervals(first: Any, longest: Any) -> dict[str, Any]:
    bad = {
        name: value
        for name, value in (("initial_interval", first), ("max_interval", longest))
        if value is not None and not _is_delay(value)
    }
    if bad:
        return bad
    cap = DEFAULT_MAX_BACKOFF if longest is None else min(max(longest, 1), DEFAULT_MAX_BACKOFF)
    if first == 0:
        cap = 1  # Dramatiq doubles a wait of zero, and it stays zero.
    # The cap comes first: JSON has integers that no float can hold.
    least = min(DEFAULT_MIN_BACKOFF if first is None else first, cap)
    start, mean = (min(max(each, 1), cap) for each in (least, _MEAN * least))
    jitter = NativeJitter(_Jitter(cap / 1000), _duration(mean), said=None)
    return {"initial_interval": _duration(start), "max_interval": _duration(cap), "jitter": jitter}


@dataclass(frozen=True, slots=True)
class _Jitter:
    """Draws as Dramatiq does: from once to twice a wait, and between half the cap and the cap beyond it."""

    cap: float

    def __call__(self, _n: int, seconds: float, rng: Rng) -> float:
        drawn = seconds * (1 + rng.random())
        return drawn if drawn <= self.cap else self.cap * (1 + rng.random()) / 2


def _is_delay(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0


def _duration(milliseconds: float) -> str:
    return format_duration(timedelta(milliseconds=milliseconds))


def say_retry(message_id: str, decision: RetryAt) -> None:
    """Log a retry as the stock `Retries` does."""
    logger.info("Retrying message %r in %d milliseconds.", message_id, decision.delay * 1000)


def say_end(message_id: str, decision: Discarded | DeadLettered) -> None:
    """Log the end of a failed job as the stock `Retries` does, if it has a line for it."""
    if decision.failure.final == THROWN:
        logger.info("Aborting message %r.", message_id)
    elif _is_exhausted(decision):
        logger.warning("Retries exceeded for message %r.", message_id)


def _is_exhausted(decision: Discarded | DeadLettered) -> bool:
    """Return whether the stock `Retries` would say that a job's retries are exceeded."""
    return decision.cause == "exhausted" or decision.failure.final == RETRY_WHEN_SAID_NO


def announce_exhaustion(
    broker: Broker, message: MessageProxy, begun: Run | Refuse | Postpone, decision: Discarded | DeadLettered
) -> None:
    """Send the `on_retry_exhausted` of a job whose retries are exceeded, as the stock `Retries` does."""
    if not _is_exhausted(decision) or not isinstance(begun, Run):
        return
    options = broker.get_actor(message.actor_name).options
    target = message.options.get("on_retry_exhausted") or options.get("on_retry_exhausted")
    if not target or (begun.layers.framework is ONCE and begun.layers.limit_is_native):
        return  # A broker without `Retries` announces nothing.
    limit = None if begun.policy.max_attempts >= LARGEST else begun.policy.runs - 1
    counts = {"retries": begun.job.attempt - 1, "max_retries": limit}
    try:
        broker.get_actor(target).send(message.asdict(), counts)
    except Exception:
        logging.getLogger("ojs_bridge").exception(
            "job %s: on_retry_exhausted %r was not sent", begun.job, target
        )
