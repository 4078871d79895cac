"""What a request asks for: its query, its JSON body, which letters, which page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request

from ..operations.letters import Kind
from ..spec.job import parse_time
from ..spec.patterns import check_pattern
from ..store import Page, ParkedPage
from .answers import invalid
from .guarding import JSON_TYPES, content_type
from .limits import body_of

AnyPage = TypeVar("AnyPage", Page, ParkedPage)
#: Reads so many entries after a cursor.
Read: TypeAlias = Callable[[int, str | None], AnyPage]

KIND = ("queue", "type", "error_type", "since", "until", "text")
PAGE = ("limit", "offset", "cursor")
PAGE_SIZE = 50
#: The spec's own limit (http 17.1); the page that skips is a walk through all before it.
MAX_PAGE = 100
MAX_OFFSET = 10_000
MAX_WORD = 1000
#: Nothing has died outside of these, and reckoning with times beyond them overflows.
EARLIEST = datetime(1970, 1, 1, tzinfo=timezone.utc)
LATEST = datetime(9000, 1, 1, tzinfo=timezone.utc)


def query_of(request: Request, *known: str) -> dict[str, str]:
    """Return a request's query; raises Refusal for a name that is unknown, repeated, empty or too long.

    A filter that is misspelt must not widen what is replayed or purged.
    """
    asked = request.query_params.multi_items()
    query = dict(asked)
    for name, value in asked:
        if name not in known:
            raise invalid(f"{name}: is not a parameter here; {', '.join(known)} are")
        if not 0 < len(value) <= MAX_WORD:
            raise invalid(f"{name}: must have 1 to {MAX_WORD} characters")
    if len(query) != len(asked):
        raise invalid("a parameter is given twice")
    return query


async def json_of(request: Request, *known: str) -> dict[str, Any]:
    """Return the object in a request's body, {} for none; raises Refusal for a body that is not one."""
    body = await body_of(request)
    if not body:
        return {}
    if content_type(request.headers) not in JSON_TYPES:
        raise invalid(f"Content-Type: must be {' or '.join(JSON_TYPES)}")
    try:
        told = json.loads(body.decode("utf-8"), parse_constant=_no_number, parse_float=_finite)
        json.dumps(told, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        raise invalid("the body is no valid JSON in UTF-8") from None
    return an_object("the body", told, *known)


def _no_number(name: str) -> float:
    raise ValueError(name)


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _no_number(digits)


def an_object(place: str, told: object, *known: str) -> dict[str, Any]:
    """Return an object that has no other names than the known ones, those with null left out."""
    if not isinstance(told, dict):
        raise invalid(f"{place}: must be an object")
    for name in told:
        if name not in known:
            raise invalid(f"{place}: {name!r} is unknown; {', '.join(known)} are known")
    return {name: value for name, value in told.items() if value is not None}


def kind_of(told: Mapping[str, Any]) -> Kind:
    """Return which letters are meant by what a query or a body names; raises Refusal."""
    kind = Kind()
    for name in ("queue", "type", "error_type", "text"):
        if name in told:
            kind[name] = _word(name, told[name])
    try:
        check_pattern("type", kind.get("type"))
        check_pattern("error_type", kind.get("error_type"))
    except ValueError as error:
        raise invalid(str(error)) from None
    for edge in ("since", "until"):
        if edge in told:
            kind[edge] = _time(edge, told[edge])
    return kind


def _word(name: str, told: object) -> str:
    if not (isinstance(told, str) and 0 < len(told) <= MAX_WORD):
        raise invalid(f"{name}: must be a text of 1 to {MAX_WORD} characters")
    return told


def _time(name: str, told: object) -> datetime:
    try:
        return min(max(parse_time(_word(name, told).upper()), EARLIEST), LATEST)
    except ValueError:
        raise invalid(f"{name}: must be a time such as 2026-11-21T10:00:00Z") from None


def number_of(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """Return a whole number of a query; raises Refusal."""
    told = query.get(name, str(default))
    digits = told.isascii() and told.isdecimal() and len(told) <= len(str(most))
    if not (digits and least <= int(told) <= most):
        raise invalid(f"{name}: must be a whole number from {least} to {most}")
    return int(told)


def flag_of(query: Mapping[str, str], name: str) -> bool:
    """Return whether a query says true; raises Refusal for what is neither true nor false."""
    if (told := query.get(name, "false")) not in ("true", "false"):
        raise invalid(f"{name}: must be true or false")
    return told == "true"


def page_of(
    read: Read[AnyPage], query: Mapping[str, str], *, skips: bool = True
) -> tuple[AnyPage, dict[str, Any]]:
    """Return a page and what the spec tells of it, but for how many there are in all; raises Refusal.

    It begins where a cursor says, and after as many more as an offset says; a text has no offset, since
    looking for it might go through everything there is.
    """
    limit = number_of(query, "limit", PAGE_SIZE, 1, MAX_PAGE)
    offset = number_of(query, "offset", 0, 0, MAX_OFFSET)
    if offset and not skips:
        raise invalid("offset: does not go with a text; go on by next_cursor")
    try:
        page = _after(read, offset, limit, query.get("cursor"))
    except ValueError as error:
        raise invalid(str(error)) from None
    more = page.next_cursor
    return page, {"limit": limit, "offset": offset, "has_more": more is not None, "next_cursor": more}


def _after(read: Read[AnyPage], offset: int, limit: int, cursor: str | None) -> AnyPage:
    while offset:
        step = min(offset, 1000)
        skipped = read(step, cursor)
        cursor, offset = skipped.next_cursor, offset - step
        if cursor is None:
            return type(skipped)((), None)
    return read(limit, cursor)
