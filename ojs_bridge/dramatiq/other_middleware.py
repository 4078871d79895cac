"""Other middleware of a broker: it hears nothing of a run that was taken over, and nothing twice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dramatiq.broker import Broker
from dramatiq.middleware import GroupCallbacks, Middleware

from ..engine.reservations import TakenOver
from .compat import BARRIER_TTL, barrier_ttl, rate_limiter_backend
from .delivery import Exit, mark

logger = logging.getLogger("ojs_bridge")

_COUNTED = "_ojs_counts_once"


def drop(message: Any, late: TakenOver) -> None:
    """Have nothing stored of the outcome of a run that was taken over, and its delivery given back.

    The worker that took the run over may have died since. If the broker still has the delivery as this
    worker's, the message comes again, and the bridge sees what is left to do.
    """
    logger.warning("job %s: %s", late.job, late)
    mark(message, Exit.GIVE_BACK)
    # Dramatiq logs an exception as an error unless the `throws` option has it.
    message.options.update(throws=TakenOver, store_results=False)


class FirstToHear(Middleware):
    """Checks a job that succeeded before its result is stored and its group is counted.

    Dramatiq tells the last middleware first, and results are mostly added after the retries.
    """

    def __init__(self, check: Callable[[Any], None]) -> None:
        self._check = check

    def after_process_message(
        self,
        broker: Broker,  # noqa: ARG002 - as Dramatiq calls it
        message: Any,
        *,
        result: Any = None,  # noqa: ARG002
        exception: BaseException | None = None,
    ) -> None:
        """Check a job that succeeded; TakenOver keeps the other middleware from hearing of it."""
        if exception is None:
            self._check(message)


def hear_first(broker: Broker, retries: Middleware, check: Callable[[Any], None]) -> None:
    """Have a success checked before any middleware behind the retries hears of it."""
    behind = broker.middleware[broker.middleware.index(retries) + 1 :]
    hears = [type(m).after_process_message is not Middleware.after_process_message for m in behind]
    if any(hears) and not isinstance(behind[-1], FirstToHear):
        broker.middleware = [*broker.middleware, FirstToHear(check)]


def count_members_once(broker: Broker) -> None:
    """Have the broker's GroupCallbacks count no member of a group twice; changes each of them once."""
    for middleware in broker.middleware:
        if isinstance(middleware, GroupCallbacks) and not hasattr(middleware, _COUNTED):
            setattr(middleware, _COUNTED, True)
            middleware.after_process_message = _counting_once(middleware)  # type: ignore[method-assign]


def _counting_once(callbacks: Any) -> Any:
    count = callbacks.after_process_message

    def after_process_message(
        broker: Broker, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        group = None if exception else message.options.get("group_completion_uuid")
        if group is None:
            return
        limits, ttl = rate_limiter_backend(callbacks), barrier_ttl(callbacks, BARRIER_TTL)
        key = f"{group}-{message.message_id}"
        # 0 while the member is being counted, 1 afterwards. Only a 1 keeps it from being counted again.
        if limits.add(key, 0, ttl) or limits.incr(key, 0, 0, ttl):
            count(broker, message, result=result, exception=exception)
            limits.incr(key, 1, 1, ttl)

    return after_process_message
