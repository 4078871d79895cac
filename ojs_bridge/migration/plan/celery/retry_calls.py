"""What a `self.retry(...)` in a task's code asks for."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ..planned import Wait
from .arithmetic import NotKnown
from .bodies import Body, FunctionNode
from .values import Moment, value_of

#: The parameters of Celery's `Task.retry`, in order.
_PARAMETERS = ("args", "kwargs", "exc", "throw", "eta", "countdown", "max_retries")
#: Seconds that end after the last date there is: Celery could not send such a retry.
_FOREVER = 1e11
#: In how many parts a range that is drawn from is looked at.
_DRAWS = 24
#: What `Task.retry` reads of a task while it runs.
_SETTINGS = {".max_retries", ".default_retry_delay", ".request.retries"}
_CATCHES_RETRY = {"Retry", "TaskPredicate", "CeleryError", "Exception", "BaseException"}


@dataclass(frozen=True, slots=True)
class RetryCall:
    """One `self.retry(...)` in a task's code."""

    #: Such as `line 12`, or `line 12 of helpers.py` for another file than the task's.
    where: str
    #: The wait before retry n; None where none is given. Raises NotKnown.
    countdown: Callable[[int], Wait] | None
    #: None where none are given.
    max_retries: float | None
    #: The arguments that are computed when the task runs.
    unknown: tuple[str, ...]
    #: Whether it gives the error to end with.
    has_exc: bool
    #: Whether it raises.
    throws: bool
    #: Whether an `except` or a `suppress` around it swallows what it raises.
    swallowed: bool


def calls_in(function: FunctionNode) -> Iterator[tuple[ast.Call, bool]]:
    """Yield the calls in a function, each with whether what `retry` raises there is swallowed."""
    for statement in [function.body] if isinstance(function, ast.Lambda) else function.body:
        yield from _calls(statement, swallowed=False)


def _calls(node: ast.AST, *, swallowed: bool) -> Iterator[tuple[ast.Call, bool]]:
    if isinstance(node, ast.Call):
        yield node, swallowed
    for name, value in ast.iter_fields(node):
        inside = swallowed or (name == "body" and _swallows(node))
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _calls(child, swallowed=inside)


def _swallows(node: ast.AST) -> bool:
    """Return whether `Retry`, raised in a statement's body, ends there and is not raised again."""
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return any(_suppresses(item.context_expr) for item in node.items)
    for handler in node.handlers if isinstance(node, ast.Try) else ():
        caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if handler.type is None or _names(caught) & _CATCHES_RETRY:
            return not any(_raises_again(x, handler.name) for x in ast.walk(handler))
    return False


def _suppresses(node: ast.expr) -> bool:
    is_suppress = isinstance(node, ast.Call) and "suppress" in _names([node.func])
    return is_suppress and bool(_names(node.args) & _CATCHES_RETRY)  # type: ignore[attr-defined]


def _names(nodes: Sequence[ast.expr | None]) -> set[str | None]:
    return {x.attr if isinstance(x, ast.Attribute) else getattr(x, "id", None) for x in nodes if x}


def _raises_again(node: ast.AST, name: str | None) -> bool:
    if not isinstance(node, ast.Raise):
        return False
    return node.exc is None or (isinstance(node.exc, ast.Name) and node.exc.id == name)


def settings_in(body: Body, function: FunctionNode) -> Iterator[str]:
    """Yield what a function sets of the task's retries, and where."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            path = body.path(node) or ""
            if path in _SETTINGS:
                yield f"self{path} in {place_of(body, node)}"


def retry_call(body: Body, call: ast.Call, *, swallowed: bool) -> RetryCall:
    """Return what a call of Celery's `Task.retry` asks for."""
    given = _retry_arguments(call)
    unknown = ["eta"] if "eta" in given else []
    if None in given:
        unknown += [name for name in ("countdown", "max_retries") if name not in given]
    countdown, max_retries = given.get("countdown"), given.get("max_retries")
    if countdown is not None and not _is_known(body, countdown):
        unknown.append("countdown")
    if max_retries is not None and not _is_constant(body, max_retries):
        unknown.append("max_retries")
    limited = max_retries is not None and "max_retries" not in unknown
    return RetryCall(
        where=place_of(body, call),
        countdown=None if countdown is None else lambda n: _wait(body, countdown, n - 1),
        max_retries=_number(body, max_retries, Moment(0)) if limited and max_retries else None,
        unknown=tuple(unknown),
        has_exc="exc" in given,
        throws=not _is_false(given.get("throw")),
        swallowed=swallowed,
    )


def _retry_arguments(call: ast.Call) -> dict[str | None, ast.expr]:
    """Return a `retry`'s arguments by name, without those that are None; None stands for `*` or `**`."""
    given: dict[str | None, ast.expr] = {}
    for name, node in zip(_PARAMETERS, call.args, strict=False):
        given[None if isinstance(node, ast.Starred) else name] = node
    given.update({keyword.arg: keyword.value for keyword in call.keywords})
    return {k: x for k, x in given.items() if not (isinstance(x, ast.Constant) and x.value is None)}


def _is_known(body: Body, node: ast.expr) -> bool:
    try:
        _number(body, node, Moment(0))
    except NotKnown:
        return False
    return True


def _is_constant(body: Body, node: ast.expr) -> bool:
    try:
        return len({_number(body, node, Moment(n, part)) for n, part in ((0, 0.0), (1, 1.0))}) == 1
    except NotKnown:
        return False


def _wait(body: Body, node: ast.expr, retries: int) -> Wait:
    """Return the wait after so many retries: the ends of what is drawn, and the mean over its middle."""
    least, most = (_seconds(body, node, Moment(retries, part)) for part in (0.0, 1.0))
    if least == most:
        return Wait.of(least)
    between = [_seconds(body, node, Moment(retries, (k + 0.5) / _DRAWS)) for k in range(_DRAWS)]
    return Wait(min(least, most, *between), math.fsum(between) / _DRAWS, max(least, most, *between))


def _seconds(body: Body, node: ast.expr, moment: Moment) -> float:
    return float(min(max(_number(body, node, moment), 0.0), _FOREVER))


def _number(body: Body, node: ast.expr, moment: Moment) -> float:
    found = value_of(body, node, moment)
    if isinstance(found, tuple) or math.isnan(found):
        raise NotKnown(ast.unparse(node))
    return found


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def place_of(body: Body, call: ast.expr) -> str:
    """Return where a call, or another expression, stands, as RetryCall says it."""
    file = body.function.__code__.co_filename
    own = sys.modules.get(type(body.task).__module__)
    here = file == getattr(own, "__file__", file)
    return f"line {call.lineno}" if here else f"line {call.lineno} of {PurePath(file).name}"
