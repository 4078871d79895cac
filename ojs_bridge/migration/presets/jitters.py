"""Jitters of other systems that are no factor of the delay: the seconds to wait in place of so many."""

from __future__ import annotations

from datetime import timedelta

from ...spec.backoff import Rng

#: Dramatiq's longest delay, in seconds.
WEEK = timedelta(days=7).total_seconds()


def celery(_n: int, seconds: float, rng: Rng) -> float:
    """Draw whole seconds from 0 to the delay, both included: Celery's full jitter."""
    return int(rng.random() * (seconds + 1))


def dramatiq(_n: int, seconds: float, rng: Rng) -> float:
    """Draw from once to twice the delay; what is beyond a week becomes half a week to a week."""
    drawn = seconds * (1 + rng.random())
    return drawn if drawn < WEEK else WEEK * (1 + rng.random()) / 2


def sidekiq(n: int, seconds: float, rng: Rng) -> float:
    """Add whole seconds, fewer than ten times n."""
    return seconds + int(rng.random() * 10 * n)


def faktory(n: int, seconds: float, rng: Rng) -> float:
    """Add n times whole seconds, fewer than thirty."""
    return seconds + int(rng.random() * 30) * n


def oban(_n: int, seconds: float, rng: Rng) -> float:
    """Add whole seconds, up to a tenth of the delay."""
    return seconds + int(rng.random() * 0.1 * seconds)
