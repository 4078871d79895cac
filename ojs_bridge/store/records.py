"""How every store writes what it keeps: the record as JSON, and what an index can hold of ids and texts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from datetime import datetime, timedelta, timezone
from typing import Any

from ..job import format_time, parse_time
from .parked import Parked
from .protocol import Letter

#: What fits an index of every store; longer ids are hashed.
MAX_ID = 191
MAX_TEXT = 255

_EPOCH = datetime.fromtimestamp(0, timezone.utc)
_MILLISECOND = timedelta(milliseconds=1)


def index_id(text: str) -> str:
    """Return an id as every index can hold it; the whole one is in the record."""
    if len(text) <= MAX_ID and ((text.isascii() and "\0" not in text) or text == index_text(text)):
        return text
    return f"sha256-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def index_text(text: str) -> str:
    """Return text as every index can hold it: valid Unicode, no NUL, 255 characters."""
    return text.encode("utf-8", "replace").decode().replace("\0", "�")[:MAX_TEXT]


def matches(text: str, pattern: str | None) -> bool:
    """Return whether an indexed text is what a filter asks for: all, exactly this, or `prefix.*`."""
    if pattern is None:
        return True
    wanted = index_text(pattern)
    return text.startswith(wanted[:-1]) if wanted.endswith(".*") else text == wanted


def to_ms(at: datetime) -> int:
    """Return a time in whole milliseconds since 1970, rounded down."""
    return (at - _EPOCH) // _MILLISECOND


def from_ms(ms: int) -> datetime:
    """Return the time of so many milliseconds since 1970."""
    return _EPOCH + ms * _MILLISECOND


def letter_record(letter: Letter) -> str:
    """Return a dead letter as JSON in ASCII."""
    return json.dumps(_record(letter))


def read_letter(record: str | bytes) -> Letter:
    """Return the dead letter of a record; an earlier version's lacks the fields that came later."""
    known = _times(json.loads(record), "discarded_at", "created_at")
    return Letter(**{**known, "errors": tuple(known["errors"])})


def parked_record(parked: Parked) -> str:
    """Return a parked retry as JSON in ASCII."""
    return json.dumps(_record(parked))


def read_parked(record: str | bytes) -> Parked:
    """Return the parked retry of a record."""
    return Parked(**_times(json.loads(record), "next_retry_at", "parked_at"))


def _record(kept: Letter | Parked) -> dict[str, Any]:
    record = {field.name: getattr(kept, field.name) for field in fields(kept)}
    return {
        name: format_time(value) if isinstance(value, datetime) else value for name, value in record.items()
    }


def _times(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**record, **{name: parse_time(record[name]) for name in names if record[name] is not None}}
