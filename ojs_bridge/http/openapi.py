"""The API's own description, an OpenAPI 3.1 document."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..messages import OWN_META
from ..spec.policy import RetryPolicy
from . import schemas
from .answers import MEDIA_TYPE, Answer
from .asking import MAX_OFFSET, MAX_PAGE, MAX_WORD, PAGE_SIZE, query_of
from .bulk import LINES
from .letters import FASTEST, SLOWEST

Doc = dict[str, Any]

BASE = "/ojs/v1"
WORD: Doc = {"type": "string", "minLength": 1, "maxLength": MAX_WORD}
CURSOR = "^[0-9]{1,15}:"
TIME: Doc = {"type": "string", "format": "date-time"}


def route() -> Route:
    """Return the route that serves the document."""
    return Route("/openapi.json", _served, methods=["GET"])


async def _served(request: Request) -> Response:
    query_of(request)
    return Answer(document(request.scope.get("root_path", "").removesuffix(BASE)))


def document(root: str = "") -> Doc:
    """Return the document of an app that is mounted at a path."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ojs-bridge",
            "version": "1.0",
            "description": "Dead letters and parked retries by the routes of the Open Job Spec.",
        },
        "servers": [{"url": root or "/"}],
        "security": [{}, {"token": []}],
        "paths": {f"{BASE}{path}": methods for path, methods in _paths().items()},
        "components": {
            "schemas": schemas.ALL,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths() -> Doc:
    return {
        "/dead-letter": {
            "get": _operation("List dead letters, the newest first", _ref("Page"), [*_kind(), *_page()]),
            "delete": _bulk(_operation("Purge dead letters", _ref("Result"), [*_kind(), _confirm()])),
        },
        "/dead-letter/stats": {"get": _operation("Count dead letters", _ref("Stats"))},
        "/dead-letter/timeline": {
            "get": _operation("Count deaths in steps of time", _ref("Timeline"), _kind())
        },
        "/dead-letter/retry": {
            "post": _bulk(_operation("Replay dead letters", _ref("Result"), body=_bulk_body(), needed=True)),
        },
        "/dead-letter/{id}": _one("dead letter", "LetterDetail"),
        "/dead-letter/{id}/retry": {
            "post": _operation(
                "Replay a dead letter",
                _job("Replayed"),
                [_id()],
                _override_body(),
                extra=("404", "409"),
            )
        },
        "/retries": {
            "get": _operation(
                "List parked retries, the next one due first",
                _ref("ParkedPage"),
                [_query("queue", WORD), _query("type", WORD), *_page()],
            )
        },
        "/retries/{id}": _one("parked retry", "Parked"),
        "/retries/{id}/run": {
            "post": _operation(
                "Make a parked retry due now", _job("Parked"), [_id()], _object({}), extra=("404", "409")
            )
        },
    }


def _one(what: str, schema: str) -> Doc:
    return {
        "get": _operation(f"Get a {what}", _ref(schema), [_id()], extra=("404",)),
        "delete": _operation(f"Delete a {what}", _ref("Deleted"), [_id()], extra=("404", "409")),
    }


def _operation(
    summary: str,
    answer: Doc,
    parameters: list[Doc] | None = None,
    body: Doc | None = None,
    *,
    needed: bool = False,
    extra: tuple[str, ...] = (),
) -> Doc:
    statuses = ("400", "401", "403", "413", "422", "429", "500", "503", *extra)
    operation: Doc = {
        "summary": summary,
        "parameters": parameters or [],
        "responses": {
            "200": {"description": "Done", "content": {MEDIA_TYPE: {"schema": answer}}},
            **{status: _error(status) for status in statuses},
        },
    }
    if body is not None:
        types = (MEDIA_TYPE, "application/json")
        operation["requestBody"] = {"required": needed, "content": {name: {"schema": body} for name in types}}
    return operation


_MEANINGS = {
    "400": "The request is wrong; without `confirm` its details have how many are matched",
    "401": "A token is needed",
    "403": "This token, or this page, may not do this",
    "404": "It is not there",
    "409": "Somebody else has it in hand at this moment",
    "413": "The body is too long",
    "422": "It cannot be replayed from here, or another OJS-Version is asked for",
    "429": "Too many requests",
    "500": "Something went wrong",
    "503": "The store or the broker cannot be reached",
}


def _error(status: str) -> Doc:
    return {"description": _MEANINGS[status], "content": {MEDIA_TYPE: {"schema": _ref("Error")}}}


def _bulk(operation: Doc) -> Doc:
    """Return the operation with its other answer, lines of progress, the result last."""
    operation["responses"]["200"]["content"][LINES] = {"schema": {"type": "string"}}
    return operation


def _kind() -> list[Doc]:
    words = [_query(name, WORD) for name in ("queue", "type", "error_type", "text")]
    return [*words, _query("since", TIME), _query("until", TIME)]


def _page() -> list[Doc]:
    return [
        _query("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": PAGE_SIZE}),
        {
            **_query("offset", {"type": "integer", "minimum": 0, "maximum": MAX_OFFSET, "default": 0}),
            "description": "How many to skip; not with a text",
        },
        _query("cursor", {**WORD, "pattern": CURSOR, "description": "The next_cursor of the page before"}),
    ]


def _confirm() -> Doc:
    return {**_query("confirm", {"type": "boolean", "enum": [True]}), "required": True}


def _query(name: str, schema: Doc) -> Doc:
    return {"name": name, "in": "query", "schema": schema}


def _id() -> Doc:
    return {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


def _bulk_body() -> Doc:
    words = {name: _or_null(WORD) for name in ("queue", "type", "error_type", "text")}
    times = {name: _or_null(TIME) for name in ("since", "until")}
    rate = {"type": "number", "minimum": SLOWEST, "maximum": FASTEST}
    filters = _or_null(_object({**words, **times}))
    body = _object({"filter": filters, "confirm": {"const": True}, "rate": _or_null(rate)})
    return {**body, "required": ["confirm"]}


def _override_body() -> Doc:
    override: dict[str, Doc] = {
        "queue": {"type": "string", "minLength": 1},
        "args": {"type": "array"},
        "kwargs": {"type": "object"},
        "meta": {
            "type": "object",
            "propertyNames": {"not": {"enum": sorted(OWN_META)}},
            "description": "Merged over the job's own headers or options",
        },
        "retry": _policy(),
    }
    fields = {name: _or_null(schema) for name, schema in override.items()}
    return _object({"override": _or_null(_object(fields))})


def _policy() -> Doc:
    return _object(RetryPolicy.json_schema()["properties"])


def _object(properties: Doc) -> Doc:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _or_null(schema: Doc) -> Doc:
    return {"anyOf": [schema, {"type": "null"}]}


def _job(schema: str) -> Doc:
    return {"type": "object", "properties": {"job": _ref(schema)}, "required": ["job"]}


def _ref(schema: str) -> Doc:
    return {"$ref": f"#/components/schemas/{schema}"}
