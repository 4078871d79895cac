"""Backoffs in the words of a policy."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ...spec.duration import format_duration

#: No wait of a plan is longer: more than a year is said by nobody who means it.
_LONGEST = 365 * 86_400.0
_SHORTEST = 0.001


def steady(seconds: float) -> dict[str, Any]:
    """Return the backoff that always waits the same: more than nothing, and a year at most."""
    interval = format_duration(timedelta(seconds=min(max(seconds, _SHORTEST), _LONGEST)))
    return {
        "backoff_strategy": "none",
        "initial_interval": interval,
        "max_interval": interval,
        "jitter": False,
    }
