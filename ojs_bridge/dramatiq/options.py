"""What Dramatiq's own retry options say in the words of a retry policy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from dramatiq.middleware.retries import DEFAULT_MAX_BACKOFF, DEFAULT_MIN_BACKOFF

from ..duration import format_duration

#: `max_retries=None` and a bare `retry_when` mean retries without end.
UNBOUNDED = sys.maxsize


def native_partial(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the partial policy that an actor's or a message's native options amount to.

    `max_retries` counts retries, `max_attempts` runs; `retry_when` takes the place of `max_retries`.
    """
    partial: dict[str, Any] = {}
    if options.get("retry_when") is not None:
        partial["max_attempts"] = UNBOUNDED
    elif "max_retries" in options:
        retries = options["max_retries"]
        partial["max_attempts"] = UNBOUNDED if retries is None else retries + 1
    if options.get("min_backoff") is not None or options.get("max_backoff") is not None:
        longest = min(options.get("max_backoff") or DEFAULT_MAX_BACKOFF, DEFAULT_MAX_BACKOFF)
        first = min(options.get("min_backoff") or DEFAULT_MIN_BACKOFF, longest)
        partial["initial_interval"] = format_duration(timedelta(milliseconds=first))
        partial["max_interval"] = format_duration(timedelta(milliseconds=longest))
    return partial
