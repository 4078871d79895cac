"""What one worker of a fleet does for all, once in a while."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TypeVar

from ..store import Grant, Settle, Store, Turn

T = TypeVar("T")


def turn_at(name: str, period: timedelta, now: datetime) -> Turn:
    """Return the turn of the period that a time is in, kept beside those of jobs."""
    return Turn(f"ojs-bridge:{name}", int(now.timestamp() // period.total_seconds()))


def in_turn(
    store: Store, name: str, period: timedelta, clock: Callable[[], datetime], chore: Callable[[], T]
) -> T | None:
    """Do a chore unless another worker has done it in this period, or is at it: then None.

    Who dies at it stands in nobody's way: the next period has a turn of its own. Raises StoreError.
    """
    now, holder = clock(), uuid.uuid4().hex
    turn, until = turn_at(name, period, now), now + 2 * period
    asked = store.reserve(turn, publication="", holder=holder, mark=holder, now=now, until=until)
    if asked.grant not in (Grant.TAKEN, Grant.LOST):
        return None
    done = chore()
    store.settle(Settle(turn, holder, until))
    return done
