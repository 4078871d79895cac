"""The exceptions by which a handler decides about its job (spec section 7).

Exception
├── Response              a handler's word on its own failure
│   ├── Retry             try again, after a hint if there is one; still an attempt
│   ├── Discard           drop the job, keep no dead letter
│   ├── DeadLetter        keep the job as a dead letter at once
│   └── Fail              a recognised permanent failure; behaves like Discard
└── Snooze                not a failure: run again later, no attempt used
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

from .duration import read_duration

ResponseCode: TypeAlias = Literal["RETRY", "DISCARD", "DEAD_LETTER", "FAIL"]


class Response(Exception):
    """A handler's structured failure: dot-namespaced type, message, details (spec section 7.3).

    Raise one of the subclasses. Raises TypeError when the type is not a string, ValueError when it is empty.
    """

    code: ClassVar[ResponseCode] = "RETRY"
    message: str = ""
    details: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, type: str, message: str = "", *, details: Mapping[str, Any] | None = None) -> None:  # noqa: A002
        if not isinstance(type, str):
            raise TypeError(f"the error type must be a string such as 'payment.card_stolen', not {type!r}")
        if not type:
            raise ValueError("the error type must not be empty")
        super().__init__(type, message)
        self.type = type
        self.message = message
        self.details = dict(details or {})

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class Retry(Response):
    """Retry under the job's policy (spec section 7.1, RETRY).

    `after`, an ISO 8601 duration or a timedelta, replaces the computed delay; `max_interval` still caps it.
    Raises TypeError or ValueError when `after` is not a duration.
    """

    code: ClassVar[ResponseCode] = "RETRY"
    after: timedelta | None = None

    def __init__(
        self,
        type: str,  # noqa: A002
        message: str = "",
        *,
        after: str | timedelta | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(type, message, details=details)
        self.after = None if after is None else read_duration(after)


class Discard(Response):
    """Drop the job: no retry, no dead letter (spec section 7.1, DISCARD)."""

    code: ClassVar[ResponseCode] = "DISCARD"


class DeadLetter(Response):
    """Move the job to the dead letters at once (spec section 7.1, DEAD_LETTER)."""

    code: ClassVar[ResponseCode] = "DEAD_LETTER"


class Fail(Response):
    """Fail for good: like Discard, but a recognised permanent failure (spec section 7.1, FAIL)."""

    code: ClassVar[ResponseCode] = "FAIL"


class Snooze(Exception):
    """Run the job again after a while; not a failure, and no attempt is used.

    `after` is an ISO 8601 duration or a timedelta. Raises TypeError or ValueError when it is neither.
    """

    def __init__(self, after: str | timedelta) -> None:
        super().__init__(after)
        self.after = read_duration(after)

    def __str__(self) -> str:
        return f"snoozed for {self.after}"
