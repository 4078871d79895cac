"""The OpenAPI 3.1 document of the API, made from the declarations of the routes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from . import shapes
from .admin import ADMIN, MANIFEST
from .answers import Answer
from .bulk import LINES
from .fleet import FLEET
from .letters import LETTERS
from .operations import OPERATIONS
from .requests import JSON_TYPES, Asked, read_query
from .retries import RETRIES
from .routes import Operation

Schema: TypeAlias = dict[str, Any]
Mode: TypeAlias = Literal["validation", "serialization"]

BASE = "/ojs/v1"
ERRORS = {
    "400": "The request is wrong; without `confirm` its details have how many are matched",
    "401": "A token is needed",
    "403": "This token, or this page, may not do this",
    "413": "The body is too long",
    "422": "It cannot be replayed from here, or another OJS-Version is asked for",
    "429": "Too many requests",
    "500": "Something went wrong",
    "503": "The store or the broker cannot be reached",
}
NOT_THERE = {"404": "It is not there"}
CONFLICT = {"409": "Another process has it in hand at this moment"}


def route() -> Route:
    """Return the route that serves the document."""
    return Route("/openapi.json", _served, methods=["GET"])


async def _served(request: Request) -> Response:
    read_query(request, Asked)
    return Answer(document(request.scope.get("root_path", "").removesuffix(BASE)))


def document(root: str = "") -> Schema:
    """Return the document of an app that is mounted at a path."""
    paths, schemas = _described()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ojs-bridge",
            "version": "1.0",
            "description": "Dead letters and parked retries by the routes of the Open Job Spec.",
        },
        "servers": [{"url": root or "/"}],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


@cache
def _described() -> tuple[Schema, Schema]:
    """Return the paths, and the schemas that they refer to."""
    operations = [*LETTERS, *RETRIES, *OPERATIONS, *FLEET, *ADMIN, *MANIFEST]
    shapes_of: list[tuple[Any, Mode]] = [(operation.answer, "serialization") for operation in operations]
    shapes_of += [
        (operation.model("body"), "validation") for operation in operations if operation.method == "POST"
    ]
    references, found = TypeAdapter.json_schemas(
        [(shape, mode, TypeAdapter(shape)) for shape, mode in {*shapes_of, (shapes.Error, "serialization")}],
        ref_template="#/components/schemas/{model}",
    )
    shape_of = {shape: schema for (shape, _), schema in references.items()}
    paths: Schema = {}
    for operation in operations:
        base = "" if operation in MANIFEST else BASE
        path = paths.setdefault(f"{base}{operation.path}", {})
        path[operation.method.lower()] = _operation(operation, shape_of)
    return paths, found["$defs"]


def _operation(operation: Operation, shape_of: Mapping[Any, Schema]) -> Schema:
    errors = {**ERRORS, **(NOT_THERE if operation.names_one else {})}
    if operation.names_one and operation.method != "GET":
        errors |= CONFLICT
    answer = _content(shape_of[operation.answer])
    if operation.many:
        # The result comes in the last line.
        answer[LINES] = {"schema": {"type": "string"}}
    error = _content(shape_of[shapes.Error])
    responses = {status: {"description": meaning, "content": error} for status, meaning in errors.items()}
    described: Schema = {
        "summary": operation.summary,
        "parameters": [*_parameters(operation)],
        "responses": {"200": {"description": "Done", "content": answer}, **responses},
    }
    if operation.empty:
        described["responses"] = {"204": {"description": "Done"}, **responses}
    if operation.method == "POST":
        # A DELETE may have a body, too, but to OpenAPI it has no meaning.
        described["requestBody"] = _body(operation.model("body"), shape_of)
    return described


def _parameters(operation: Operation) -> Iterator[Schema]:
    if operation.names_one:
        yield {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    told = operation.model("query").model_json_schema()
    for name, schema in told["properties"].items():
        # A query has no null: a parameter is absent.
        [found] = (one for one in schema.get("anyOf", [schema]) if one != {"type": "null"})
        yield {"name": name, "in": "query", "required": name in told.get("required", ()), "schema": found}


def _body(model: type[Asked], shape_of: Mapping[Any, Schema]) -> Schema:
    required = "required" in model.model_json_schema()
    return {"required": required, "content": _content(shape_of[model])}


def _content(schema: Schema) -> Schema:
    return {name: {"schema": schema} for name in JSON_TYPES}
