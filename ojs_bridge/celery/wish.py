"""What `self.retry(...)` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from celery.exceptions import MaxRetriesExceededError, Retry
from celery.utils.time import maybe_iso8601, maybe_make_aware

from ..decision import Decision, RetryAt


@dataclass
class Wish:
    """What `self.retry(...)` asked for.

    `cause` is the error it was asked for; `signal` what it raises, and `error` what it raises when no attempt
    is left, as Celery's own does: the `exc` it was given, or MaxRetriesExceededError.
    """

    exc: BaseException | None
    cause: BaseException | None
    args: Any
    kwargs: Any
    eta: Any
    countdown: float | None
    options: Mapping[str, Any]
    signal: Retry = field(init=False)
    error: BaseException = field(init=False)
    decision: Decision | None = None

    def __post_init__(self) -> None:
        shown = self.cause if isinstance(self.cause, Exception) else None
        self.signal = Retry(exc=shown, when=self.eta or self.countdown)
        self.error = self.exc or MaxRetriesExceededError("self.retry() was called, and no attempt is left")

    def after(self, now: datetime, zone: Any) -> timedelta | None:
        """Return the hint on the delay, if there is one; an `eta` without a zone is in the app's."""
        if self.eta:
            at: datetime = maybe_make_aware(maybe_iso8601(self.eta), zone)
            return max(at - now, timedelta(0))
        return None if self.countdown is None else timedelta(seconds=max(float(self.countdown), 0))

    def raised_as(self, exc: BaseException) -> bool:
        """Return whether an exception is this wish's own word."""
        return exc is self.signal or exc is self.error

    @property
    def refused(self) -> bool:
        """Whether the policy allows no retry."""
        return self.decision is not None and not isinstance(self.decision, RetryAt)
