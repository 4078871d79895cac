"""The ASGI app of the page and the API, and the server of `ojs-bridge serve`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from pathlib import PurePath

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from ..bridge import Bridge
from ..errors import ConfigurationError
from ..instrumentation.metrics import gauges_text
from ..operations.letters import needed
from . import openapi
from .admin import ADMIN, MANIFEST, Admin
from .answers import Door, Refusal, raise_refusal
from .fleet import FLEET, Fleet
from .guarding import Access, Guard, UserOf, access_at, tokens_of
from .letters import LETTERS, Letters
from .operations import OPERATIONS, Operations
from .requests import Asked, read_query
from .retries import RETRIES, Retries

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_FILES = {file.name: file for file in (resources.files(__package__) / "page").iterdir()}


def app_for(
    bridge: Bridge,
    *,
    operator_token: str | None = None,
    reader_token: str | None = None,
    tokens: str | None = None,
    open_to_all: bool = False,
    user: UserOf | None = None,
) -> Starlette:
    """Return an ASGI app to mount: the page at its root, the API under `ojs/v1`.

    The operator's token allows everything, the reader's token allows reads. `tokens` have names, which the
    audit tells: `alice:operator:TOKEN,ci:reader:TOKEN`. `open_to_all` is for an app that has its own login,
    which a foreign page cannot use; `user` is given each request, and returns the name that the app's login
    has found. Raises ConfigurationError without a store, and without either a token or `open_to_all`.
    """
    if open_to_all is (operator_token is not None or bool(tokens)):
        raise ConfigurationError(
            "operator_token: give one, or else open_to_all=True where others guard the app; tokens will do"
        )
    return guarded(bridge, Access(tokens_of(operator_token, reader_token, tokens), user=user))


def serve(
    bridge: Bridge,
    *,
    host: str = "127.0.0.1",
    port: int = 8787,
    operator_token: str | None = None,
    reader_token: str | None = None,
    tokens: str | None = None,
    user: UserOf | None = None,
) -> None:
    """Serve the page and the API until interrupted. Without a token the host must be a loopback address.

    `tokens` and `user` are as for `app_for`. Raises ConfigurationError.
    """
    app = guarded(bridge, access_at(host, operator_token, reader_token, tokens, user))
    uvicorn.run(app, host=host, port=port, access_log=False, server_header=False, timeout_graceful_shutdown=5)


def guarded(bridge: Bridge, access: Access) -> Starlette:
    """Return the app behind a guard with this access; raises ConfigurationError without a store."""
    needed(bridge.store, "the page and the HTTP API")
    letters, retries = Letters(bridge), Retries(bridge)
    operations, admin = Operations(bridge, letters.changed), Admin(bridge, letters)
    api = [
        *(operation.route(letters) for operation in LETTERS),
        *(operation.route(retries) for operation in RETRIES),
        *(operation.route(operations) for operation in OPERATIONS),
        *(operation.route(Fleet(bridge)) for operation in FLEET),
        *(operation.route(admin) for operation in ADMIN),
        openapi.route(),
    ]
    # The page's files need no token. The page asks the user for the token, and sends it with its requests.
    page = [Route("/", _page, methods=["GET"]), Route("/page/{name}", _page, methods=["GET"])]

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(operations.close)

    app = Starlette(
        lifespan=lifespan,
        routes=[
            Mount(openapi.BASE, routes=api, middleware=[Middleware(Guard, access=access)]),
            Route("/metrics", partial(_metrics, bridge), middleware=[Middleware(Guard, access=access)]),
            *(operation.route(admin, Middleware(Guard, access=access)) for operation in MANIFEST),
            *page,
        ],
        middleware=[Middleware(Door)],
        exception_handlers={HTTPException: raise_refusal},
    )
    app.router.redirect_slashes = False
    return app


async def _metrics(bridge: Bridge, request: Request) -> Response:
    read_query(request, Asked)
    try:
        told = await run_in_threadpool(gauges_text, bridge)
    except ImportError as missing:
        raise Refusal(501, "unsupported", str(missing)) from None
    return Response(told, media_type="text/plain; version=0.0.4; charset=utf-8")


def _page(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    found, media_type = _FILES.get(name), TYPES.get(PurePath(name).suffix)
    if found is None or media_type is None:
        raise HTTPException(404)
    return Response(found.read_bytes(), media_type=media_type, headers={"Cache-Control": "no-cache"})
