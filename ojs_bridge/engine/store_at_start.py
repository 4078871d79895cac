"""What a worker says of its store when it starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

from ..errors import StoreError
from ..store import Store

logger = logging.getLogger("ojs_bridge")

#: How many seconds the clocks of a worker and its store may differ before a worker says so.
MAX_SKEW = 2.0


def try_store(
    store: Store | None,
    prove: Callable[[], None],
    now: Callable[[], datetime],
    dead_queue: str,
    *,
    fail_open: bool,
) -> None:
    """Say in the log what goes without a store, or with one that does not work or has another time."""
    if store is None:
        logger.warning(
            "no store: dead letters go to %s, where `Bridge.broker_letters` finds them; "
            "set Bridge(store=...) or OJS_BRIDGE_STORE",
            dead_queue,
        )
        return
    try:
        store.prepare()
        prove()
        apart = abs((store.clock() - now()).total_seconds())
    except StoreError as error:
        then = f"dead letters go to {dead_queue}" if fail_open else "jobs wait"
        logger.error("until the store works, %s: %s", then, error)
        return
    if apart > MAX_SKEW:
        logger.error(
            "this machine's clock and the store's are %.1f s apart: retries run early or late, and live "
            "jobs may be taken for lost; set the clocks",
            apart,
        )
