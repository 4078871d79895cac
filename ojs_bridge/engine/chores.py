"""Chores that one worker of a fleet does for all, once in a period."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TypeVar

from ..store import Grant, Reservation, Settle, Store

T = TypeVar("T")


def reservation_at(name: str, period: timedelta, now: datetime) -> Reservation:
    """Return the reservation of the period that a time is in, kept beside those of jobs."""
    return Reservation(f"ojs-bridge:{name}", int(now.timestamp() // period.total_seconds()))


def once_a_period(
    store: Store, name: str, period: timedelta, clock: Callable[[], datetime], chore: Callable[[], T]
) -> T | None:
    """Do a chore unless another worker has done it in this period, or is at it: then None.

    A worker that dies at it stands in nobody's way: the next period has a reservation of its own. Raises
    StoreError.
    """
    now, holder = clock(), uuid.uuid4().hex
    reservation, until = reservation_at(name, period, now), now + 2 * period
    asked = store.reserve(reservation, publication="", holder=holder, mark=holder, now=now, until=until)
    if asked.grant not in (Grant.TAKEN, Grant.LOST):
        return None
    done = chore()
    store.settle(Settle(reservation, holder, until))
    return done
