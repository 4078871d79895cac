"""What is done with a run whose reservation was taken over while it ran: nothing it says is heard."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dramatiq.broker import Broker
from dramatiq.middleware import Middleware

from ..engine.turns import TakenOver
from .consumer import Settlement, mark

logger = logging.getLogger("ojs_bridge")


def drop(message: Any, late: TakenOver) -> None:
    """Have a delivery acknowledged, and nothing stored of what its run says."""
    logger.warning("job %s: %s", message.message_id, late)
    mark(message, Settlement.DROP)
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
