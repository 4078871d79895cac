"""The shapes of what is answered, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TIME: Schema = {"type": "string", "format": "date-time"}
ANYTHING: Schema = {"type": "object"}
COUNTS: Schema = {"type": "object", "additionalProperties": NUMBER}


def _shape(**fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _kept(state: str, **fields: Schema) -> Schema:
    return _shape(
        id=TEXT,
        type=TEXT,
        queue=TEXT,
        args=_maybe({"type": "array"}),
        kwargs=_maybe(ANYTHING),
        meta=ANYTHING,
        note=TEXT,
        parameters=_list(TEXT),
        state={"const": state},
        attempt=NUMBER,
        max_attempts=NUMBER,
        errors=_list(_ref("ErrorEntry")),
        **fields,
    )


def _page(entry: str) -> Schema:
    return _shape(
        jobs=_list(_ref(entry)),
        pagination=_shape(
            total=_maybe(NUMBER), limit=NUMBER, offset=NUMBER, has_more=FLAG, next_cursor=_maybe(TEXT)
        ),
    )


ALL: Schema = {
    "Error": _shape(error=_shape(code=TEXT, message=TEXT, retryable=FLAG, details=ANYTHING, request_id=TEXT)),
    "ErrorEntry": {
        "type": "object",
        "properties": {
            "attempt": NUMBER,
            "type": TEXT,
            "message": TEXT,
            "code": _maybe(TEXT),
            "details": ANYTHING,
            "backtrace": _maybe(_list(TEXT)),
            "timestamp": _maybe(TIME),
            "occurred_at": _maybe(TIME),
        },
    },
    "Letter": _kept(
        "discarded",
        retry=_maybe(ANYTHING),
        policy=_maybe(ANYTHING),
        metadata={
            **_shape(framework=TEXT, cause=TEXT, reason=TEXT, created_at=_maybe(TIME), discarded_at=TIME),
            "description": "And `ojs.replay_count`, how often it was replayed",
        },
    ),
    "LetterDetail": {"allOf": [_ref("Letter"), _shape(schedule=_list({"type": "number", "minimum": 0}))]},
    "Page": _page("Letter"),
    "Parked": _kept(
        "retryable", next_retry_at=TIME, metadata=_shape(framework=TEXT, reason=TEXT, parked_at=TIME)
    ),
    "ParkedPage": _page("Parked"),
    "Replayed": _shape(
        id=TEXT,
        type=TEXT,
        state={"const": "available"},
        queue=TEXT,
        attempt={"const": 0},
        max_attempts=NUMBER,
        retry=_maybe(ANYTHING),
        metadata=ANYTHING,
        re_enqueued_at=TIME,
    ),
    "Result": _shape(
        action={"enum": ["retry", "purge"]},
        matched=NUMBER,
        succeeded=NUMBER,
        failed=NUMBER,
        errors=_list(_shape(job_id=TEXT, error=TEXT)),
    ),
    "Deleted": _shape(deleted={"const": True}, job_id=TEXT),
    "Timeline": _shape(since=TIME, step_seconds={"type": "number"}, counts=_list(NUMBER)),
    "Stats": _shape(
        total=NUMBER,
        by_queue=COUNTS,
        by_type=COUNTS,
        by_error_type=COUNTS,
        oldest_at=_maybe(TIME),
        newest_at=_maybe(TIME),
        retention=ANYTHING,
    ),
}
