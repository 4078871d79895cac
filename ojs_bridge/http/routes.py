"""The declaration of a route: its path, its parameters, its body, and its handler.

The server reads a request by it, and the OpenAPI document describes it: the docstring of the handler is the
summary, and the handler's return type is the shape of the answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, get_type_hints

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from . import shapes
from .answers import Answer
from .fields import Fields, read_body, read_query

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, of which the query and the body have been read."""

    request: Request
    query: Mapping[str, Any]
    body: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The id in the path."""
        return str(self.request.path_params["id"])


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path, and the function that answers it.

    A function answers in a thread; a coroutine function, for `many` letters, returns its own response.
    """

    method: str
    path: str
    handler: Callable[..., Any]
    query: Fields
    body: Fields
    many: bool

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

    def route(self, served: object) -> Route:
        """Return the route that has the handler of an object answer; an id may hold anything, slashes too."""
        path = self.path.replace("{id}", "{id:path}")
        return Route(path, partial(self._answer, served), methods=[self.method])

    async def _answer(self, served: object, request: Request) -> Response:
        query = read_query(request, self.query)
        body = {} if self.method == "GET" else await read_body(request, self.body)
        asked = Asked(request, query, body)
        if self.many:
            response: Response = await self.handler(served, asked)
            return response
        return Answer(await run_in_threadpool(self.handler, served, asked))


def answers(
    operations: list[Operation],
    method: str,
    path: str,
    *,
    query: Fields | None = None,
    body: Fields | None = None,
    many: bool = False,
) -> Callable[[F], F]:
    """Add a method of a class to some operations; the more special paths come first."""

    def add(handler: F) -> F:
        operations.append(Operation(method, path, handler, query or {}, body or {}, many))
        return handler

    return add
