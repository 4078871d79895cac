"""The declaration of a route: its path, its models of the query and the body, and its handler.

The server reads a request by it, and the OpenAPI document describes it: the docstring of the handler is the
summary, and the handler's return type is the shape of the answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, get_type_hints

from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..operations.audit import give_reason
from . import shapes
from .answers import Answer
from .requests import Asked, Change, read_body, read_query

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path, and the function that answers it.

    The function is given what its parameters name: `job_id` is the id in the path, `query` and `body` are
    models, and `request` is the request. It runs in a thread. A coroutine function, for `many` letters,
    returns its own response. Of an `empty` answer only the status 204 is sent.
    """

    method: str
    path: str
    handler: Callable[..., Any]
    many: bool
    empty: bool

    @property
    def names_one(self) -> bool:
        """Whether the path names a single entry."""
        return "{id}" in self.path

    @property
    def summary(self) -> str:
        """The first line of the handler's docstring."""
        return (inspect.getdoc(self.handler) or "").partition("\n")[0].rstrip(".")

    @property
    def answer(self) -> Any:
        """The type of the answer."""
        return shapes.Result if self.many else get_type_hints(self.handler)["return"]

    def model(self, part: str) -> type[Asked]:
        """Return the model of the `query` or the `body`; the default has no filters and no changes."""
        default = Change if part == "body" else Asked
        found: type[Asked] = get_type_hints(self.handler).get(part, default)
        return found

    def route(self, served: object, *middleware: Middleware) -> Route:
        """Return the route to the handler, a method of an object; an id may have slashes."""
        path = self.path.replace("{id}", "{id:path}")
        models = self.model("query"), self.model("body")
        return Route(
            path, partial(self._answer, served, *models), methods=[self.method], middleware=middleware
        )

    async def _answer(
        self, served: object, query: type[Asked], body: type[Asked], request: Request
    ) -> Response:
        given = {"request": request, "job_id": request.path_params.get("id")}
        given["query"] = read_query(request, query)
        if self.method != "GET":
            given["body"] = asked = await read_body(request, body)
            # The actor of this request has it until the request ends.
            give_reason(getattr(asked, "reason", None))
        taken = inspect.signature(self.handler).parameters
        call = partial(self.handler, served, **{name: given[name] for name in given if name in taken})
        if self.many:
            response: Response = await call()
            return response
        told = await run_in_threadpool(call)
        return Response(status_code=204) if self.empty else Answer(told)


def answers(
    operations: list[Operation], method: str, path: str, *, many: bool = False, empty: bool = False
) -> Callable[[F], F]:
    """Add a method to a list of operations. Longer paths come first: an id may look like one of them."""

    def add(handler: F) -> F:
        operations.append(Operation(method, path, handler, many, empty))
        return handler

    return add
