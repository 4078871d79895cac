"""Other middleware of a broker: what it must not be told of a run that is not heard, or be told twice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dramatiq.broker import Broker
from dramatiq.middleware import GroupCallbacks, Middleware

from ..engine.reservations import TakenOver
from .compat import counting_of
from .delivery import Settlement, mark

logger = logging.getLogger("ojs_bridge")

_COUNTED = "_ojs_counts_once"


def drop(message: Any, late: TakenOver) -> None:
    """Have nothing stored of what a run says, and its delivery given back.

    The worker that took the run over may have died since. If the broker still has the delivery as this
    worker's, the next delivery says what is left to do; else nothing is given back.
    """
    logger.warning("job %s: %s", message.message_id, late)
    mark(message, Settlement.GIVE_BACK)
    # The worker logs what is thrown otherwise as an error.
    message.options.update(throws=TakenOver, store_results=False)


class FirstToHear(Middleware):
    """Hears that a job succeeded before its result is stored and its group is counted, and may stop that.

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
        """Check a job that succeeded; raises TakenOver, which ends the telling."""
        if exception is None:
            self._check(message)


def hear_first(broker: Broker, retries: Middleware, check: Callable[[Any], None]) -> None:
    """Have successes checked before any middleware behind the retries hears of them."""
    behind = broker.middleware[broker.middleware.index(retries) + 1 :]
    hears = [type(m).after_process_message is not Middleware.after_process_message for m in behind]
    if any(hears) and not isinstance(behind[-1], FirstToHear):
        broker.middleware = [*broker.middleware, FirstToHear(check)]


def count_members_once(broker: Broker) -> None:
    """Have the broker's GroupCallbacks, each of them once, count no member of a group a second time."""
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
        limits, ttl = counting_of(callbacks)
        key = f"{group}-{message.message_id}"
        # 0 while the member is being counted and 1 afterwards. Only the second keeps it from being counted.
        if limits.add(key, 0, ttl) or limits.incr(key, 0, 0, ttl):
            count(broker, message, result=result, exception=exception)
            limits.incr(key, 1, 1, ttl)

    return after_process_message
