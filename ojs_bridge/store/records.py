"""What a store keeps as it is written: dead letters and parked retries in JSON, times in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from ..spec.job import format_time, parse_time
from .parked import Parked
from .protocol import Letter

_EPOCH = datetime.fromtimestamp(0, timezone.utc)
_MILLISECOND = timedelta(milliseconds=1)


def to_ms(at: datetime) -> int:
    """Return a time in whole milliseconds since 1970, rounded down."""
    return (at - _EPOCH) // _MILLISECOND


def from_ms(ms: int) -> datetime:
    """Return the time, in UTC, of milliseconds since 1970."""
    return _EPOCH + ms * _MILLISECOND


def letter_to_json(letter: Letter) -> str:
    """Write a dead letter."""
    return _write(letter, ("discarded_at", "created_at"))


def letter_from_json(text: str) -> Letter:
    """Read a dead letter, one of an earlier version too."""
    record = _read(text, ("discarded_at", "created_at"))
    return Letter(**{**record, "errors": tuple(record["errors"])})


def parked_to_json(parked: Parked) -> str:
    """Write a parked retry."""
    return _write(parked, ("next_retry_at", "parked_at"))


def parked_from_json(text: str, *, due_ms: int) -> Parked:
    """Read a parked retry; when it is due is kept beside the record, where it may have changed."""
    record = _read(text, ("next_retry_at", "parked_at"))
    return Parked(**{**record, "next_retry_at": from_ms(due_ms)})


def _write(written: Letter | Parked, times: tuple[str, ...]) -> str:
    record: dict[str, Any] = {name: getattr(written, name) for name in type(written).__slots__}
    for name in times:
        record[name] = None if record[name] is None else format_time(record[name])
    return json.dumps(record, default=_plain_object)


def _plain_object(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _read(text: str, times: tuple[str, ...]) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(text)
    for name in times:
        record[name] = None if record[name] is None else parse_time(record[name])
    return record
