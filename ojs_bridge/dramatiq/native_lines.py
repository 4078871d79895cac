"""The log lines of the stock `Retries`, for those who search their logs for them."""

from __future__ import annotations

from dramatiq.logging import get_logger
from dramatiq.middleware import Retries

from ..spec.decision import DeadLetter, Decision, Discard, RetryAt
from .translate import RETRY_WHEN_SAID_NO, THROWN

logger = get_logger(Retries.__module__, Retries)


def say_as_retries(message_id: str, decision: Decision) -> None:
    """Log a decision about a failed job as the stock `Retries` does, if it has a line for it."""
    match decision:
        case RetryAt():
            logger.info("Retrying message %r in %d milliseconds.", message_id, decision.delay * 1000)
        case Discard() | DeadLetter() if decision.failure.final == THROWN:
            logger.info("Aborting message %r.", message_id)
        case Discard() | DeadLetter() if is_exhausted(decision):
            logger.warning("Retries exceeded for message %r.", message_id)


def is_exhausted(decision: Discard | DeadLetter) -> bool:
    """Return whether the stock `Retries` would say that a job's retries are exceeded."""
    return decision.cause == "exhausted" or decision.failure.final == RETRY_WHEN_SAID_NO
