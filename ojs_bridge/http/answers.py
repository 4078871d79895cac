"""Answers in the Open Job Spec's JSON, and refusals (spec http 4 and 16)."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Mount
from starlette.types import Scope

from ..errors import (
    ConfigurationError,
    InvalidRetryPolicy,
    InvalidState,
    NotFound,
    StoreError,
    Unpublishable,
    Unreachable,
    Unroutable,
)

logger = logging.getLogger("ojs_bridge")

MEDIA_TYPE, JSON = "application/openjobspec+json", "application/json"
JSON_TYPES = (MEDIA_TYPE, JSON)
VERSION = "1.0"
#: The key of a request's scope for the path where the app is mounted.
ROOT = "ojs.root"


class Answer(Response):
    """An answer in JSON."""

    media_type = MEDIA_TYPE

    def render(self, content: object) -> bytes:
        """Write the content in ASCII, because texts of a job may be invalid Unicode.

        NaN and infinity, which JSON lacks, become texts.
        """
        try:
            return json.dumps(content, allow_nan=False, default=_to_ojs).encode("ascii")
        except ValueError:
            return json.dumps(_finite(content), default=_to_ojs).encode("ascii")


@dataclass(eq=False)
class Refusal(Exception):
    """The reason why a request is not done, with its status and its code."""

    status: int
    code: str
    message: str
    retryable: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] | None = None

    def to_ojs(self, request_id: str) -> dict[str, Any]:
        """Return the error in the spec's JSON form."""
        fields = {"code": self.code, "message": self.message, "retryable": self.retryable}
        return {"error": {**fields, "details": self.details, "request_id": request_id}}


def invalid(message: str, **details: Any) -> Refusal:
    """Return the refusal of an invalid request."""
    return Refusal(400, "invalid_request", message, details=details)


def forbidden(message: str) -> Refusal:
    """Return the refusal of a request that the client may not make."""
    return Refusal(403, "x_forbidden", message)


def not_found(resource: str, resource_id: str) -> Refusal:
    """Return the refusal for an entry that is not there."""
    details = {"resource_type": resource, "resource_id": resource_id}
    return Refusal(
        404, "not_found", f"there is no {resource.replace('_', ' ')} {resource_id!r:.200}", details=details
    )


def missing(resource: str, entry_id: str, get: Callable[[str], object], error: NotFound) -> Refusal:
    """Return the refusal for an entry that is not there; if `get` finds it, another process has it."""
    try:
        get(entry_id)
    except NotFound:
        return not_found(resource, entry_id)
    return Refusal(409, "x_conflict", str(error), retryable=True)


def too_many(message: str, seconds: int, headers: dict[str, str] | None = None) -> Refusal:
    """Return the refusal of a request that the client may repeat after some seconds."""
    return Refusal(
        429,
        "rate_limited",
        f"{message}; try again in {seconds} s",
        retryable=True,
        details={"retry_after_seconds": seconds},
        headers={**(headers or {}), "Retry-After": str(seconds)},
    )


def refusal_of(error: Exception, request_id: str) -> Refusal:
    """Return the refusal for an error. The details of an unforeseen error go to the log only."""
    match error:
        case Refusal():
            return error
        case StoreError():
            return _unavailable(error, request_id, "the store cannot be reached, or cannot do this")
        case Unreachable():
            return _unavailable(
                error, request_id, "the broker did not take the message; the dead letter stays"
            )
        case Unroutable():
            return _unavailable(error, request_id, "no queue takes the message; the dead letter stays")
        case InvalidRetryPolicy():
            return invalid(str(error), type=error.type, problems=list(error.problems))
        case ConfigurationError() | Unpublishable() | InvalidState():
            return Refusal(422, "x_not_replayable", str(error))
    logger.error("request %s failed", request_id, exc_info=error)
    return Refusal(
        500, "x_internal", "something went wrong here; the server's log has the error under the request's id"
    )


async def raise_refusal(request: Request, error: Exception) -> Response:
    """Raise the refusal for a path or a method that is not served."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    code, headers = "not_found", None
    if status == 405:  # noqa: PLR2004
        scope = {**request.scope, "root_path": request.scope[ROOT]}
        code = "x_method_not_allowed"
        headers = {"Allow": ", ".join(sorted({*_methods_at(request.app.routes, scope)}))}
    raise Refusal(status, code, f"{request.method} is not served at this path", headers=headers)


def _methods_at(routes: Iterable[BaseRoute], scope: Scope) -> Iterator[str]:
    """Yield the methods of all routes that a path has: an id may look like a longer path."""
    for route in routes:
        match, found = route.matches(scope)
        if match is not Match.NONE:
            inner = _methods_at(route.routes, {**scope, **found}) if isinstance(route, Mount) else ()
            yield from inner or getattr(route, "methods", None) or ()


def content_type(headers: Mapping[str, str]) -> str:
    """Return the media type of a request's body, in lower case and without parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _to_ojs(value: Any) -> object:
    return value.to_ojs()


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _unavailable(error: Exception, request_id: str, message: str) -> Refusal:
    logger.warning("request %s: %s: %s", request_id, message, error)
    return Refusal(503, "backend_error", message, retryable=True, headers={"Retry-After": "5"})
