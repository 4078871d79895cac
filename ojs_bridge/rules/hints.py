"""Hints: what an answer says about when to ask again (RFC 9110, gRPC's RetryInfo, X-RateLimit-Reset).

No library is imported. An error is asked for attributes that its library gives it, and any of them may raise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any, cast

RETRY_AFTER, RETRY_INFO = "Retry-After", "RetryInfo"
RESET, REMAINING = "X-RateLimit-Reset", "X-RateLimit-Remaining"
FORBIDDEN, TOO_MANY, UNAVAILABLE = 403, 429, 503

_STATUS = (
    ("response", "status_code"),  # requests, httpx
    ("status_code",),
    ("status",),  # aiohttp
    ("code",),  # urllib
    ("response", "ResponseMetadata", "HTTPStatusCode"),  # botocore
)
_HEADERS = (("response", "headers"), ("headers",), ("response", "ResponseMetadata", "HTTPHeaders"))
#: Trailing metadata of gRPC: a RetryInfo, and a Status with details, of which one may be a RetryInfo.
_INFO, _DETAILS, _INFO_TYPE = "google.rpc.retryinfo-bin", "grpc-status-details-bin", b"/google.rpc.RetryInfo"
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
#: A reset from here on is no number of seconds from now, but a time since 1970: in seconds, in milliseconds.
_SECONDS, _MILLISECONDS = 1e9, 1e12
_LONGEST = timedelta(days=36_500)


@dataclass(frozen=True, slots=True)
class Heard:
    """A hint that an answer gave, in a header or a message named `by`; `max_interval` always caps it."""

    when: timedelta | datetime
    by: str

    def seconds(self, now: datetime) -> float:
        """Return the seconds that are left; less than zero for a time that has passed."""
        left = self.when - now if isinstance(self.when, datetime) else self.when
        return left.total_seconds()


def read(value: Any, *path: str) -> Any:
    """Return what stands at the end of a path of attributes and of keys of dictionaries, or None."""
    try:
        for name in path:
            value = value[name] if isinstance(value, dict) else getattr(value, name)
    except BaseException:  # noqa: BLE001 - nothing that a handler raises may lose its job
        return None
    return value


def status_of(error: object) -> int | None:
    """Return the HTTP status of the answer in an error, or None."""
    statuses = (read(error, *path) for path in _STATUS)
    return next((status for status in statuses if isinstance(status, int) and 100 <= status < 600), None)  # noqa: PLR2004


def header_of(error: object, name: str) -> str | None:
    """Return a header of the answer in an error, or None."""
    for path in _HEADERS:
        get: Any = getattr(read(error, *path), "get", None)
        for spelt in (name, name.lower()) if get else ():
            if isinstance(value := get(spelt), str):
                return value.strip()
    return None


def has_spent(error: object) -> bool:
    """Return whether an answer says that nothing of a rate limit remains, as GitHub does with a 403."""
    return header_of(error, REMAINING) == "0"


def heard_in(error: object) -> tuple[Heard | None, str]:
    """Return the hint in an error, if there is one, and what is ignored since it makes no sense.

    Never raises. A hint of no seconds is none.
    """
    ignored = []
    try:
        for name, said in _said_in(error):
            try:
                when = _WAYS[name](said)
            except (ValueError, IndexError, OverflowError):
                ignored.append(f"{name}: {said!r:.100}")
                continue
            if isinstance(when, datetime) or when > timedelta(0):
                return Heard(when, name), ", ".join(ignored)
    except BaseException as broken:  # noqa: BLE001 - nothing that a handler raises may lose its job
        ignored.append(f"an answer that raises {type(broken).__name__}")
    return None, ", ".join(ignored)


def _said_in(error: object) -> Iterator[tuple[str, Any]]:
    """Yield what an answer says about when to ask again, the best first, each with its name."""
    status = status_of(error)
    if status is not None:
        if (after := header_of(error, RETRY_AFTER)) is not None:
            yield RETRY_AFTER, after
        is_limit = status in (TOO_MANY, UNAVAILABLE) or (status == FORBIDDEN and has_spent(error))
        if is_limit and (reset := header_of(error, RESET)) is not None:
            yield RESET, reset
    elif metadata := read(error, "trailing_metadata"):
        for key, value in metadata() or ():
            if key == _INFO:
                yield RETRY_INFO, value
            if key == _DETAILS:
                yield from ((RETRY_INFO, info) for info in _infos_in(value))


def _seconds(number: float) -> timedelta:
    return timedelta(seconds=number) if number < _LONGEST.total_seconds() else _LONGEST


def _after(text: str) -> timedelta | datetime:
    """Read Retry-After in both of its forms (RFC 9110, section 10.2.3); raises ValueError."""
    if _NUMBER.fullmatch(text):
        return _seconds(float(text))
    date = parsedate_to_datetime(text)
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)


def _reset(text: str) -> timedelta | datetime:
    """Read X-RateLimit-Reset: seconds from now, or a time since 1970; raises ValueError, OverflowError."""
    if not _NUMBER.fullmatch(text):
        raise ValueError(text)
    number = float(text)
    if number < _SECONDS:
        return _seconds(number)
    return datetime.fromtimestamp(number if number < _MILLISECONDS else number / 1000, timezone.utc)


def _info(data: bytes) -> timedelta:
    """Read a `google.rpc.RetryInfo`: its field 1 is a Duration of seconds and nanoseconds."""
    duration = dict(_fields(dict(_fields(data)).get(1, b"")))
    seconds, nanoseconds = duration.get(1, 0), duration.get(2, 0)
    if seconds >> 63:  # less than zero
        return timedelta(0)
    return _seconds(seconds + nanoseconds / 1e9)


def _infos_in(status: bytes) -> Iterator[bytes]:
    """Yield each RetryInfo among the details of a `google.rpc.Status`: field 3 has a type and a value."""
    for number, detail in _fields(status):
        any_ = dict(_fields(detail)) if number == 3 else {}  # noqa: PLR2004
        if any_.get(1, b"").endswith(_INFO_TYPE):
            yield any_.get(2, b"")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the numbers and values of a protobuf message's fields; raises ValueError and IndexError."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind, value = tag & 7, cast("int | bytes", 0)
        if kind == 0:
            value, at = _varint(data, at)
        else:
            size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, len(data)), at)  # noqa: PLR2004
            value, at = data[at : at + size], at + size
        if at > len(data):
            raise ValueError("the message ends within a field")
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:  # noqa: PLR2004
            return number, at


_WAYS: dict[str, Callable[[Any], timedelta | datetime]] = {
    RETRY_AFTER: _after,
    RESET: _reset,
    RETRY_INFO: _info,
}
