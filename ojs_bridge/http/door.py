"""The outermost layer: a request's id, the headers that every answer has, and errors turned into answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .answers import Answer, refusal_of

VERSION = "1.0"
#: Where a request's scope keeps its id, and what inner layers add to its answer's headers.
REQUEST_ID = "ojs.request_id"
ADDED = "ojs.added_headers"

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "OJS-Version": VERSION,
}
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class Door:
    """Has every answer carry the headers, and answers every error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; what is none, a server's start or a WebSocket, goes on as it is."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[REQUEST_ID] = _id_of(Headers(scope=scope).get("x-request-id", ""))
        added = scope[ADDED] = dict[str, str]()
        begun = False

        async def headed(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                _add_headers(message, {**HEADERS, **added, "X-Request-Id": request_id})
            await send(message)

        try:
            await self._app(scope, receive, headed)
        except Exception as error:
            refusal = refusal_of(error, request_id)
            if begun:
                raise
            answer = Answer(refusal.to_ojs(request_id), refusal.status, refusal.headers)
            await answer(scope, receive, headed)


def _id_of(told: str) -> str:
    return told if _REQUEST_ID.fullmatch(told) else f"req_{uuid4()}"


def _add_headers(message: Message, added: Mapping[str, str]) -> None:
    headers = MutableHeaders(scope=message)
    headers.update(added)
    headers.setdefault("Cache-Control", "no-store")
