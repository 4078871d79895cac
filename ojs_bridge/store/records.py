"""The written form of a store's contents: JSON records, times in milliseconds, and texts for an index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

from ..rules import notations
from ..rules.job import format_time, parse_time
from .documents import Document
from .jobs import Parked
from .protocol import Letter

MAX_ID = 191
MAX_TEXT = 255

_EPOCH = datetime.fromtimestamp(0, timezone.utc)
_MILLISECOND = timedelta(milliseconds=1)
_TIMES: Mapping[type, Sequence[str]] = {
    Letter: ("discarded_at", "created_at"),
    Parked: ("next_retry_at", "parked_at"),
    Document: ("at",),
}
Kept = TypeVar("Kept", Letter, Parked, Document)


def to_ms(at: datetime) -> int:
    """Return a time in whole milliseconds since 1970, rounded down."""
    return (at - _EPOCH) // _MILLISECOND


def from_ms(ms: int) -> datetime:
    """Return the time, in UTC, of milliseconds since 1970."""
    return _EPOCH + ms * _MILLISECOND


def to_json(kept: Letter | Parked | Document) -> str:
    """Write what a store keeps."""
    return json.dumps({name: getattr(kept, name) for name in type(kept).__slots__}, default=_plain)


def from_json(kind: type[Kept], text: str, **beside: Any) -> Kept:
    """Read what a store keeps; `beside` has fields that are kept beside the text, and may have changed."""
    # A newer version may have written more fields, an earlier one fewer.
    record = {name: value for name, value in json.loads(text).items() if name in kind.__slots__}
    for name in _TIMES[kind]:
        record[name] = None if record[name] is None else parse_time(record[name])
    if kind is Letter:
        record["errors"] = tuple(record["errors"])
    return kind(**{**record, **beside})


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def group_number(group: str) -> int:
    """Return the number of 64 bits, with a sign, that a fingerprint stands for."""
    return int.from_bytes(bytes.fromhex(group), "big", signed=True)


def group_of_number(number: int) -> str:
    """Return the fingerprint that a number stands for."""
    return number.to_bytes(8, "big", signed=True).hex()


def index_id(text: str) -> str:
    """Return an id as every index can hold it: the hash of an id that is too long, or no plain text."""
    if len(text) <= MAX_ID and ((text.isascii() and "\0" not in text) or text == index_text(text)):
        return text
    return f"sha256-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def index_text(text: str) -> str:
    """Return text as every database can hold it: valid Unicode, no NUL, no more than MAX_TEXT characters."""
    sound = text.encode("utf-8", "replace").decode()
    return sound.replace("\0", "\N{REPLACEMENT CHARACTER}")[:MAX_TEXT]


def matches(text: str, pattern: str | None) -> bool:
    """Return whether an indexed text matches a filter's pattern; without a pattern all do."""
    return pattern is None or notations.matches(text, index_text(pattern))
