"""The declaration of a route: its path, its handler, and its models, by which a request is read.

The server reads a request by it, and the OpenAPI document describes it: the docstring of the handler is the
summary, and the handler's return type is the shape of the answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast, get_type_hints

from anyio import move_on_after
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import InvalidRetryPolicy, NotFound
from ..operations.audit import acting
from ..operations.letters import problem_of
from . import shapes
from .answers import JSON_TYPES, Answer, Refusal, content_type, invalid, missing
from .guarding import ACTOR, ADMITTED_AS, Role, check_role
from .requests import Asked, Change

F = TypeVar("F", bound=Callable[..., Any])
AnyAsked = TypeVar("AnyAsked", bound=Asked)
#: A message may be as long as a broker takes it; RabbitMQ takes 16 MiB by default.
MAX_BODY = 16 * 1024 * 1024
#: The longest query, in bytes, and the seconds in which a body must have come.
MAX_QUERY, BODY_SECONDS = 64 * 1024, 60.0


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path, and the function that answers it.

    The function is given what its parameters name: `job_id` is the id in the path, `query` and `body` are
    models, and `request` is the request. It runs in a thread. A coroutine function, for `many` letters,
    returns its own response. An `empty` answer is the status 204 alone. A function that raises NotFound
    belongs to an object with the name of the `resource`, whose `get` finds an entry that another process has
    in hand. The `role` is the least one that may call it; a function whose body or entry may need more has a
    parameter for the caller's.
    """

    method: str
    path: str
    handler: Callable[..., Any]
    many: bool
    empty: bool
    role: Role

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
        model: type[Asked] = get_type_hints(self.handler).get(part, default)
        return model

    def route(self, served: Any, *middleware: Middleware) -> Route:
        """Return the route to the handler, a method of an object; an id may have slashes."""
        path = self.path.replace("{id}", "{id:path}")
        models = self.model("query"), self.model("body")
        return Route(
            path, partial(self._answer, served, *models), methods=[self.method], middleware=middleware
        )

    async def _answer(self, served: Any, query: type[Asked], body: type[Asked], request: Request) -> Response:
        job_id: Any = request.path_params.get("id")
        actor: Any = request.scope.get(ACTOR)
        role: Role = request.scope.get(ADMITTED_AS, "reader")
        if role != "operator":
            check_role(role, self.role)
        given = {"request": request, "job_id": job_id, "role": role, "query": read_query(request, query)}
        if self.method != "GET":
            given["body"] = asked = await read_body(request, body)
            actor = replace(actor, reason=getattr(asked, "reason", None) or "")
        taken = inspect.signature(self.handler).parameters
        call = partial(self.handler, served, **{name: given[name] for name in given if name in taken})
        with acting(actor):
            if self.many:
                return cast(Response, await call())
            try:
                answer = await run_in_threadpool(call)
            except NotFound as error:
                raise await run_in_threadpool(missing, served.resource, job_id, served.get, error) from None
        return Response(status_code=204) if self.empty else Answer(answer)


def answers(
    operations: list[Operation],
    method: str,
    path: str,
    *,
    many: bool = False,
    empty: bool = False,
    role: Role | None = None,
) -> Callable[[F], F]:
    """Add a method to a list of operations. Longer paths come first: an id may look like one of them.

    Without a `role`, everybody may read, and an operator alone may write.
    """
    needed: Role = role or ("reader" if method == "GET" else "operator")

    def add(handler: F) -> F:
        operations.append(Operation(method, path, handler, many, empty, needed))
        return handler

    return add


def read_query(request: Request, model: type[AnyAsked]) -> AnyAsked:
    """Return a request's query; raises Refusal, also for a name that is given twice."""
    if len(request.scope["query_string"]) > MAX_QUERY:
        raise invalid(f"the query: has more than {MAX_QUERY:,} bytes", max_bytes=MAX_QUERY)
    given: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        given.setdefault(name, []).append(value)
    with _refused("the query"):
        return model.model_validate({name: v if len(v) > 1 else v[0] for name, v in given.items()})


async def read_body(request: Request, model: type[AnyAsked]) -> AnyAsked:
    """Return the object in a request's body, an empty one for none; raises Refusal for any other body.

    A long body is refused before it has all been read, and so is a slow one.
    """
    body = bytearray()
    with move_on_after(BODY_SECONDS) as reading:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                message = f"the body is longer than {MAX_BODY} bytes"
                raise Refusal(413, "x_too_large", message, details={"max_bytes": MAX_BODY})
    if reading.cancelled_caught:
        raise Refusal(408, "x_too_slow", f"the body has not come within {BODY_SECONDS:.0f} s")
    if body and content_type(request.headers) not in JSON_TYPES:
        raise invalid(f"Content-Type: must be {' or '.join(JSON_TYPES)}")
    with _refused("the body"):
        return model.model_validate_json(bytes(body) or b"{}", strict=True)


@contextmanager
def _refused(whole: str) -> Iterator[None]:
    """Refuse what is wrong: its place, its value and the rule; a policy's error is raised as it is."""
    try:
        yield
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        raise cause if isinstance(cause, InvalidRetryPolicy) else invalid(problem_of(error, whole)) from None
