"""Responses: the exceptions by which a handler decides what becomes of its job (spec sections 7.1 and 7.3).

Exception
├── Response              a handler's word on its own failure
│   ├── Retry             try again, after a hint if there is one; still an attempt
│   ├── Discard           drop the job, keep no dead letter
│   ├── DeadLetter        keep the job as a dead letter at once
│   └── Fail              a recognised permanent failure; behaves like Discard
├── OJSError              the base of an application's own errors that say what becomes of their jobs
└── Snooze                not a failure: run again later, no attempt used
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from .notations import read_duration

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
        self.after = None if after is None else read_duration(after, "after")


class Discard(Response):
    """Drop the job: no retry, no dead letter (spec section 7.1, DISCARD)."""

    code: ClassVar[ResponseCode] = "DISCARD"


class DeadLetter(Response):
    """Move the job to the dead letters at once (spec section 7.1, DEAD_LETTER)."""

    code: ClassVar[ResponseCode] = "DEAD_LETTER"


class Fail(Response):
    """Fail for good: like Discard, but a recognised permanent failure (spec section 7.1, FAIL)."""

    code: ClassVar[ResponseCode] = "FAIL"


class OJSError(Exception):
    """An application's own error that says its type and its response code (spec section 7.3).

    A subclass sets what it says as attributes; an instance may set them, too. Without a `type` the type is
    that of any other exception: the error map's, else `module.QualName`. `retry_after`, an ISO 8601 duration
    or a timedelta, is the hint of a RETRY. A subclass with a wrong one raises ValueError or TypeError.
    """

    type: str = ""
    code: ResponseCode = "RETRY"
    retry_after: str | timedelta | None = None
    details: Mapping[str, Any] = MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        code, hint = vars(cls).get("code", "RETRY"), vars(cls).get("retry_after")
        if isinstance(code, str) and code not in get_args(ResponseCode):
            codes = ", ".join(get_args(ResponseCode))
            raise ValueError(f"{cls.__qualname__}.code: {code!r} must be one of {codes}")
        if hint is not None and not hasattr(hint, "__get__"):
            read_duration(hint, f"{cls.__qualname__}.retry_after")


class Snooze(Exception):
    """Run the job again after a while; not a failure, and no attempt is used.

    `after` is an ISO 8601 duration or a timedelta. Raises TypeError or ValueError when it is neither.
    """

    def __init__(self, after: str | timedelta) -> None:
        super().__init__(after)
        self.after = read_duration(after, "after")

    def __str__(self) -> str:
        return f"snoozed for {self.after}"


#: By these a handler says what becomes of its job: it may raise or return them.
ANSWERS = (Response, OJSError, Snooze)
