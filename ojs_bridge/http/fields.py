"""The fields of a request: each has a schema, for the OpenAPI document, and a reader, for the server."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeAlias

from starlette.requests import Request

from ..spec.job import parse_time
from .answers import MEDIA_TYPE, Refusal, invalid

Schema: TypeAlias = dict[str, Any]
#: Reads the value of a field of this name; raises Refusal.
Reader: TypeAlias = Callable[[str, Any], Any]

JSON_TYPES = (MEDIA_TYPE, "application/json")
MAX_BODY = 64 * 1024
MAX_WORD = 1000
#: Nothing has died outside of these, and arithmetic with times beyond them overflows.
EARLIEST = datetime(1970, 1, 1, tzinfo=timezone.utc)
LATEST = datetime(9000, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter of a query, or a field of a JSON object, in which null stands for its absence.

    `required` is for the document alone: a handler says what happens without the field.
    """

    schema: Schema
    read: Reader
    required: bool = False


Fields: TypeAlias = Mapping[str, Field]


def whole(default: int, least: int, most: int, description: str) -> Field:
    """Return the field of a whole number in a query."""
    schema = {"type": "integer", "minimum": least, "maximum": most, "default": default}
    return Field({**schema, "description": description}, partial(_whole, least, most))


def number(least: float, most: float, description: str) -> Field:
    """Return the field of a number in a JSON object."""
    schema = {"type": "number", "minimum": least, "maximum": most}
    return Field(schema, partial(_number, least, most, description))


def nested(fields: Fields, read: Reader | None = None) -> Field:
    """Return the field of a JSON object within another."""
    return Field(object_schema(fields), read or (lambda name, told: read_object(name, told, fields)))


def object_schema(fields: Fields) -> Schema:
    """Return the schema of a JSON object that has these fields and no others."""
    found = {
        name: field.schema if field.required else {"anyOf": [field.schema, {"type": "null"}]}
        for name, field in fields.items()
    }
    required = [name for name, field in fields.items() if field.required]
    return {"type": "object", "properties": found, "additionalProperties": False, "required": required}


def read_query(request: Request, fields: Fields) -> dict[str, Any]:
    """Return a request's query; raises Refusal for a name that is unknown, repeated, empty or too long.

    A filter that is misspelt must not widen a replay or a purge.
    """
    asked = request.query_params.multi_items()
    for name, told in asked:
        if name not in fields:
            raise invalid(f"{name}: is not a parameter here; {', '.join(fields)} are")
        if not 0 < len(told) <= MAX_WORD:
            raise invalid(f"{name}: must have 1 to {MAX_WORD} characters")
    if len(dict(asked)) != len(asked):
        raise invalid("a parameter is given twice")
    return {name: fields[name].read(name, told) for name, told in asked}


async def read_body(request: Request, fields: Fields) -> dict[str, Any]:
    """Return the object in a request's body, {} for none; raises Refusal for any other body."""
    body = await _bytes_of(request)
    if not body:
        return {}
    if content_type(request.headers) not in JSON_TYPES:
        raise invalid(f"Content-Type: must be {' or '.join(JSON_TYPES)}")
    try:
        told = json.loads(body.decode("utf-8"), parse_constant=_no_number, parse_float=_finite)
        json.dumps(told, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        raise invalid("the body is no valid JSON in UTF-8") from None
    return read_object("the body", told, fields)


def read_object(place: str, told: object, fields: Fields) -> dict[str, Any]:
    """Return the fields of an object; a field with null is left out. Raises Refusal."""
    if not isinstance(told, dict):
        raise invalid(f"{place}: must be an object")
    for name in told:
        if name not in fields:
            raise invalid(f"{place}: {name!r} is unknown; {', '.join(fields)} are known")
    return {name: fields[name].read(name, value) for name, value in told.items() if value is not None}


async def _bytes_of(request: Request) -> bytes:
    """Return a request's body; raises Refusal for a long body, before it has all been read."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            message = f"the body is longer than {MAX_BODY} bytes"
            raise Refusal(413, "x_too_large", message, details={"max_bytes": MAX_BODY})
    return bytes(body)


def content_type(headers: Mapping[str, str]) -> str:
    """Return the media type of a request's body, in lower case and without parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _no_number(name: str) -> float:
    raise ValueError(name)


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _no_number(digits)


def _word(name: str, told: object) -> str:
    if not (isinstance(told, str) and 0 < len(told) <= MAX_WORD):
        raise invalid(f"{name}: must be a text of 1 to {MAX_WORD} characters")
    return told


def _time(name: str, told: object) -> datetime:
    try:
        return min(max(parse_time(_word(name, told).upper()), EARLIEST), LATEST)
    except ValueError:
        raise invalid(f"{name}: must be a time such as 2026-11-21T10:00:00Z") from None


def _whole(least: int, most: int, name: str, told: str) -> int:
    digits = told.isascii() and told.isdecimal() and len(told) <= len(str(most))
    if not (digits and least <= int(told) <= most):
        raise invalid(f"{name}: must be a whole number from {least} to {most}")
    return int(told)


def _number(least: float, most: float, description: str, name: str, told: object) -> float:
    if isinstance(told, bool) or not (isinstance(told, int | float) and least <= told <= most):
        raise invalid(f"{name}: must be {description} from {least} to {most}")
    return told


def _flag(name: str, told: object) -> bool:
    if not isinstance(told, bool):
        raise invalid(f"{name}: must be true or false")
    return told


def _flag_word(name: str, told: str) -> bool:
    return _flag(name, {"true": True, "false": False}.get(told))


_WORD: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_WORD}
WORD = Field(_WORD, _word)
PATTERN = Field({**_WORD, "description": "A name, or a pattern such as billing.*"}, _word)
TIME = Field({"type": "string", "format": "date-time"}, _time)
CURSOR = Field(
    {**_WORD, "pattern": "^[0-9]{1,15}:", "description": "The next_cursor of the page before"}, _word
)
#: The consent to a change of many letters: in a query, and in a JSON object.
CONFIRM_WORD = Field({"type": "boolean", "enum": [True]}, _flag_word, required=True)
CONFIRM = Field({"const": True}, _flag, required=True)
