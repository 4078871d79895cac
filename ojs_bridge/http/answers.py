"""Answers in the Open Job Spec's JSON, and refusals in its shape of an error (spec http 4 and 16)."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..errors import (
    ConfigurationError,
    InvalidRetryPolicy,
    InvalidState,
    StoreError,
    Unpublishable,
    Unreachable,
)

logger = logging.getLogger("ojs_bridge")

MEDIA_TYPE = "application/openjobspec+json"


class Answer(Response):
    """An answer in JSON."""

    media_type = MEDIA_TYPE

    def render(self, content: object) -> bytes:
        """Write the content, in ASCII: what a job says of itself may be no valid Unicode."""
        return written(content).encode("ascii")


class Refusal(Exception):
    """Why a request is not done, with the status and the code that say so."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retryable: bool = False,
        details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retryable = retryable
        self.details = dict(details or {})
        self.headers = dict(headers or {})

    def to_ojs(self, request_id: str) -> dict[str, Any]:
        """Return the error in the spec's JSON form."""
        return {
            "error": {
                "code": self.code,
                "message": self.message,
                "retryable": self.retryable,
                "details": self.details,
                "request_id": request_id,
            }
        }


def invalid(message: str, **details: Any) -> Refusal:
    """Return the refusal of a request that is wrong in itself."""
    return Refusal(400, "invalid_request", message, details=details)


def forbidden(message: str) -> Refusal:
    """Return the refusal of a request that whoever sends it may not make."""
    return Refusal(403, "x_forbidden", message)


def not_found(resource: str, resource_id: str) -> Refusal:
    """Return the refusal for what is not there."""
    details = {"resource_type": resource, "resource_id": resource_id}
    return Refusal(
        404, "not_found", f"there is no {resource.replace('_', ' ')} {resource_id!r}", details=details
    )


def held(error: Exception) -> Refusal:
    """Return the refusal for what somebody else has in hand at this moment."""
    return Refusal(409, "x_conflict", str(error), retryable=True)


def refusal_of(error: Exception, request_id: str) -> Refusal:
    """Return what is said of an error; of one that nobody foresaw only the log is told more."""
    match error:
        case Refusal():
            return error
        case StoreError():
            return _unavailable(error, request_id, "the store cannot be reached, or cannot do this")
        case Unreachable():
            return _unavailable(
                error, request_id, "the broker did not take the message; the dead letter stays"
            )
        case InvalidRetryPolicy():
            return invalid(str(error), type=error.type, problems=list(error.problems))
        case ConfigurationError() | Unpublishable() | InvalidState():
            return Refusal(422, "x_not_replayable", str(error))
    logger.error("request %s failed", request_id, exc_info=error)
    return Refusal(500, "x_internal", "something went wrong here; the log has it under the request's id")


async def raise_refusal(request: Request, error: Exception) -> Response:
    """Raise what is said of a path or a method that is not served."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    code = "not_found" if status == 404 else "x_method_not_allowed"  # noqa: PLR2004
    headers = getattr(error, "headers", None)
    raise Refusal(status, code, f"{request.method} is not served at this path", headers=headers)


def written(content: object) -> str:
    """Return content as JSON, which has no words for NaN and infinity, though Python's writer does."""
    try:
        return json.dumps(content, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(content))


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _unavailable(error: Exception, request_id: str, message: str) -> Refusal:
    logger.warning("request %s: %s: %s", request_id, message, error)
    return Refusal(503, "backend_error", message, retryable=True, headers={"Retry-After": "5"})
