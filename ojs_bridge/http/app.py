"""The ASGI app of the page and the API, the OpenAPI document that it serves, and `ojs-bridge serve`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from importlib import resources
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

import uvicorn
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..bridge import Bridge
from ..errors import ConfigurationError, StoreError
from ..instrumentation.metrics import gauges_text
from ..operations.retention import PERIOD
from ..operations.undoing import empty_bin
from . import shapes
from .admin import ADMIN, FLEET, MANIFEST, Admin, Fleet
from .answers import JSON_TYPES, Answer, Refusal, raise_refusal
from .groups import GROUPS, Groups
from .guarding import Access, Door, Guard, UserOf, access_at, tokens_of
from .holds import HOLDS, LIMITS, Holds, RateLimits
from .letters import LETTERS, WAITING, Letters, Waiting
from .now import NOW, Desk
from .operations import OPERATIONS, Operations
from .requests import Asked
from .routes import Operation, read_query

Schema: TypeAlias = dict[str, Any]
Mode: TypeAlias = Literal["validation", "serialization"]

BASE = "/ojs/v1"
#: The methods whose requests have a body. That of a DELETE has no meaning to OpenAPI.
BODIES = ("POST", "PUT")
ERRORS = {
    "400": "The request is wrong; without `confirm` its details have how many are matched",
    "401": "A token is needed",
    "403": "This token, or this page, may not do this",
    "408": "The body came too slowly",
    "413": "The body is too long",
    "422": "It cannot be replayed from here, or another OJS-Version is asked for",
    "429": "Too many requests",
    "500": "Something went wrong",
    "503": "The store or the broker cannot be reached",
}
NOT_THERE = {"404": "It is not there"}
#: Where a bulk operation begins, if its filter has anything.
BULK = "/operations"
CONFLICT = {"409": "Another process has it in hand at this moment"}

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_PAGE = resources.files(__package__) / "page"
_VENDOR = {f"vendor/{file.name}": file for file in (_PAGE / "vendor").iterdir()}
_FILES = {file.name: file for file in _PAGE.iterdir()} | _VENDOR


def app_for(
    bridge: Bridge,
    *,
    operator_token: str | None = None,
    replayer_token: str | None = None,
    reader_token: str | None = None,
    tokens: str | None = None,
    open_to_all: bool = False,
    user: UserOf | None = None,
) -> Starlette:
    """Return an ASGI app to mount: the page at its root, the API under `ojs/v1`.

    The operator's token allows everything, the replayer's allows reads and replays of dead letters as they
    are, and the reader's allows reads. `tokens` have names, which the audit tells:
    `alice:operator:TOKEN,ci:reader:TOKEN`. `open_to_all` is for an app that has its own login, which a
    foreign page cannot use; `user` is given each request, and returns the name that the app's login has
    found. Raises ConfigurationError without a store, and without either a token or `open_to_all`.
    """
    if open_to_all is (operator_token is not None or bool(tokens)):
        raise ConfigurationError(
            "operator_token: give one, or else open_to_all=True where others guard the app; tokens will do"
        )
    known = tokens_of(operator_token, reader_token, tokens, replayer=replayer_token)
    return guarded(bridge, Access(known, user=user))


def serve(
    bridge: Bridge,
    *,
    host: str = "127.0.0.1",
    port: int = 8787,
    operator_token: str | None = None,
    replayer_token: str | None = None,
    reader_token: str | None = None,
    tokens: str | None = None,
    user: UserOf | None = None,
    trusted_proxies: str | None = None,
) -> None:
    """Serve the page and the API until interrupted. Without a token the host must be a loopback address.

    `tokens` and `user` are as for `app_for`. `trusted_proxies` are addresses with commas between them, whose
    X-Forwarded-For names the client; without any, the client is the peer. Raises ConfigurationError.
    """
    access = access_at(host, operator_token, reader_token, tokens, user, replayer=replayer_token)
    app = guarded(bridge, access)
    uvicorn.run(
        app,
        host=host,
        port=port,
        http=Impatient,
        proxy_headers=trusted_proxies is not None,
        forwarded_allow_ips=trusted_proxies,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )


#: The seconds in which the head of a request must have come.
HEAD_SECONDS = 10.0


class Impatient(H11Protocol):
    """A connection that ends when the head of a request does not come in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read what has come, and wait for the rest if a head is not whole."""
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait."""
        super().connection_lost(exc)
        if self._timer:
            self._timer.cancel()

    def _wait(self) -> None:
        is_served = self.cycle is not None and not self.cycle.response_complete
        if self._timer and is_served:
            self._timer.cancel()
            self._timer = None
        elif not (self._timer or is_served):
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)


def guarded(bridge: Bridge, access: Access) -> Starlette:
    """Return the app behind a guard with this access; raises ConfigurationError without a store."""
    bridge.engine.context.store_for("the page and the HTTP API")
    letters, waiting = Letters(bridge), Waiting(bridge)
    operations, admin = Operations(bridge, letters.changed), Admin(bridge, letters)
    api = [
        *(operation.route(Groups(bridge)) for operation in GROUPS),
        *(operation.route(letters) for operation in LETTERS),
        *(operation.route(waiting) for operation in WAITING),
        *(operation.route(Holds(bridge)) for operation in HOLDS),
        *(operation.route(RateLimits(bridge)) for operation in LIMITS),
        *(operation.route(operations) for operation in OPERATIONS),
        *(operation.route(Fleet(bridge)) for operation in FLEET),
        *(operation.route(admin) for operation in ADMIN),
        *(operation.route(Desk(bridge)) for operation in NOW),
        Route("/openapi.json", _served, methods=["GET"]),
    ]
    # The page's files need no token. The page asks the user for the token, and sends it with its requests.
    page = [Route("/", _page, methods=["GET"]), Route("/page/{name:path}", _page, methods=["GET"])]

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        emptying = asyncio.create_task(_keep_emptying(bridge))
        yield
        emptying.cancel()
        await run_in_threadpool(operations.close)

    app = Starlette(
        lifespan=lifespan,
        routes=[
            Mount(BASE, routes=api, middleware=[Middleware(Guard, access=access)]),
            Route("/metrics", partial(_metrics, bridge), middleware=[Middleware(Guard, access=access)]),
            *(operation.route(admin, Middleware(Guard, access=access)) for operation in MANIFEST),
            *page,
        ],
        middleware=[Middleware(Door)],
        exception_handlers={HTTPException: raise_refusal},
    )
    app.router.redirect_slashes = False
    return app


async def _keep_emptying(bridge: Bridge) -> None:
    """Empty the bin of deleted letters in its time: there may be no worker that does.

    What an outage prevents is done the next time.
    """
    while True:
        with suppress(StoreError):
            await run_in_threadpool(empty_bin, bridge.engine.context)
        await asyncio.sleep(PERIOD.total_seconds())


async def _metrics(bridge: Bridge, request: Request) -> Response:
    read_query(request, Asked)
    try:
        text = await run_in_threadpool(gauges_text, bridge)
    except ImportError as missing:
        raise Refusal(501, "unsupported", str(missing)) from None
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _page(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    file, media_type = _FILES.get(name), TYPES.get(PurePath(name).suffix)
    if file is None or media_type is None:
        raise HTTPException(404)
    return Response(file.read_bytes(), media_type=media_type, headers={"Cache-Control": "no-cache"})


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
            "description": "Dead letters, and what waits, by the routes of the Open Job Spec.",
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
    operations = [*GROUPS, *LETTERS, *WAITING, *HOLDS, *LIMITS, *OPERATIONS, *FLEET, *ADMIN, *NOW, *MANIFEST]
    shapes_of: list[tuple[Any, Mode]] = [(operation.answer, "serialization") for operation in operations]
    shapes_of += [
        (operation.model("body"), "validation") for operation in operations if operation.method in BODIES
    ]
    references, definitions = TypeAdapter.json_schemas(
        [(shape, mode, TypeAdapter(shape)) for shape, mode in {*shapes_of, (shapes.Error, "serialization")}],
        ref_template="#/components/schemas/{model}",
    )
    shape_of = {shape: schema for (shape, _), schema in references.items()}
    paths: Schema = {}
    for operation in operations:
        base = "" if operation in MANIFEST else BASE
        path = paths.setdefault(f"{base}{operation.path}", {})
        path[operation.method.lower()] = _operation(operation, shape_of)
    return paths, definitions["$defs"]


def _operation(operation: Operation, shape_of: Mapping[Any, Schema]) -> Schema:
    errors = {**ERRORS, **(NOT_THERE if operation.names_one or operation.path == BULK else {})}
    if operation.names_one and operation.method != "GET":
        errors |= CONFLICT
    answer = _content(shape_of[operation.answer])
    error = _content(shape_of[shapes.Error])
    responses = {status: {"description": meaning, "content": error} for status, meaning in errors.items()}
    described: Schema = {
        "summary": operation.summary,
        "x-ojs-bridge-role": operation.role,
        "parameters": [*_parameters(operation)],
        "responses": {"200": {"description": "Done", "content": answer}, **responses},
    }
    if operation.empty:
        described["responses"] = {"204": {"description": "Done"}, **responses}
    if operation.method in BODIES:
        described["requestBody"] = _body(operation.model("body"), shape_of)
    return described


def _parameters(operation: Operation) -> Iterator[Schema]:
    if operation.names_one:
        yield {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    model = operation.model("query").model_json_schema()
    for name, schema in model["properties"].items():
        # A query has no null: a parameter is absent.
        [shape] = (one for one in schema.get("anyOf", [schema]) if one != {"type": "null"})
        yield {"name": name, "in": "query", "required": name in model.get("required", ()), "schema": shape}


def _body(model: type[Asked], shape_of: Mapping[Any, Schema]) -> Schema:
    required = "required" in model.model_json_schema()
    return {"required": required, "content": _content(shape_of[model])}


def _content(schema: Schema) -> Schema:
    return {name: {"schema": schema} for name in JSON_TYPES}
