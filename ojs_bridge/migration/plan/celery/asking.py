"""The plain ways of calling `self.retry`, read from a task's source; any other way is left open."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..code import FunctionNode
from ..planned import NOT_KNOWN, NotKnown

_LIMIT_REACHED = "MaxRetriesExceededError"


@dataclass(frozen=True, slots=True)
class Ask:
    """One `self.retry(...)` that stands in a plain place and has plain arguments."""

    line: int
    #: In seconds; None where it gives none.
    countdown: float | NotKnown | None
    #: None where it gives none.
    max_retries: int | None
    #: Whether it gives the error to end with.
    has_exc: bool
    #: Whether the task's code goes on after the last retry, by an `except MaxRetriesExceededError`.
    goes_on: bool


@dataclass(slots=True)
class Asks:
    """What was found in one function: plain calls, and lines that leave something open."""

    plain: list[Ask] = field(default_factory=list)
    #: What leaves it open whether and how often a call retries, with its line.
    open: list[tuple[int, str]] = field(default_factory=list)
    #: What leaves it open how long a plain call waits.
    waits: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Place:
    """What stands around a statement."""

    in_handler: bool = False
    goes_on: bool = False
    #: Why nobody can say what becomes of an error that is raised here.
    barrier: str = ""


def asks_in(function: FunctionNode, is_task: Callable[[ast.expr], bool], holder: str) -> Asks:
    """Return how a function calls `retry`; `holder` is the parameter that holds the task, or empty."""
    found = Asks()
    for call, place in _statements(function.body, _Place()):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "retry" and is_task(call.func.value):
            _judge(call, place, found)
    found.open += _handed_on(function, holder)
    return found


def _statements(block: Sequence[ast.stmt], place: _Place) -> Iterator[tuple[ast.Call, _Place]]:
    """Yield the calls that are statements of their own, raised or returned, with what is around them."""
    for statement in block:
        match statement:
            case (
                ast.Expr(value=ast.Call() as call)
                | ast.Raise(exc=ast.Call() as call)
                | ast.Return(value=ast.Call() as call)
            ):
                yield call, place
            case ast.If() | ast.For() | ast.While():
                yield from _statements([*statement.body, *statement.orelse], place)
            case ast.With():
                why = "a context manager around it may swallow it or run it again"
                yield from _statements(statement.body, replace(place, barrier=why))
            case ast.Try():
                yield from _tried(statement, place)


def _tried(statement: ast.Try, place: _Place) -> Iterator[tuple[ast.Call, _Place]]:
    if any(
        isinstance(x, (ast.Return, ast.Break, ast.Continue)) for y in statement.finalbody for x in ast.walk(y)
    ):
        place = replace(place, barrier="a finally around it swallows it")
    inside = place
    if statement.handlers:
        if all(_names(handler.type) == {_LIMIT_REACHED} for handler in statement.handlers):
            inside = replace(place, goes_on=True)
        else:
            inside = replace(place, barrier="an except around it may catch what it raises")
    yield from _statements(statement.body, inside)
    for handler in statement.handlers:
        yield from _statements(handler.body, replace(place, in_handler=True))
    yield from _statements([*statement.orelse, *statement.finalbody], place)


def _names(node: ast.expr | None) -> set[str]:
    nodes = node.elts if isinstance(node, ast.Tuple) else [node]
    return {x.attr if isinstance(x, ast.Attribute) else getattr(x, "id", "") for x in nodes}


def _judge(call: ast.Call, place: _Place, found: Asks) -> None:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if why := place.barrier or _unreadable(call, given, in_handler=place.in_handler):
        found.open.append((_line(call), f"{ast.unparse(call.func)}: {why}"))
        return
    countdown = given.get("countdown")
    seconds = None if countdown is None else _number(countdown)
    if seconds == NOT_KNOWN:
        found.waits.append(
            (_line(call), f"countdown={ast.unparse(given['countdown'])} is computed when it runs")
        )
    limit = getattr(given.get("max_retries"), "value", None)
    found.plain.append(Ask(_line(call), seconds, limit, has_exc="exc" in given, goes_on=place.goes_on))


def _line(call: ast.Call) -> int:
    """Return the line in which a call's function is named, as its code has it."""
    return call.func.end_lineno or call.lineno


def _unreadable(call: ast.Call, given: dict[str | None, ast.expr], *, in_handler: bool) -> str:
    """Return why a call leaves open how often it retries, and of what."""
    if call.args or None in given:
        return "not all of its arguments have names"
    if rest := [str(name) for name in given if name not in ("exc", "countdown", "max_retries")]:
        return f"it is given {', '.join(rest)}"
    limit = given.get("max_retries")
    if limit is not None and not (isinstance(limit, ast.Constant) and type(limit.value) in (int, type(None))):
        return f"max_retries={ast.unparse(limit)} is computed when it runs"
    return "" if in_handler or "exc" in given else "it asks without an error, perhaps to go on"


def _number(node: ast.expr) -> float | NotKnown | None:
    """Return what a literal comes to, or a product of literals such as `60 * 5`."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _number(left), _number(right)
            if isinstance(first, (int, float)) and isinstance(second, (int, float)):
                return first * second
    return NOT_KNOWN


def _handed_on(function: FunctionNode, holder: str) -> Iterator[tuple[int, str]]:
    """Yield where the task itself is given to somebody else, or its name to something else."""
    plain = {x.value for x in ast.walk(function) if isinstance(x, ast.Attribute)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == holder and node not in plain:
            yield node.lineno, f"{holder} is handed on, and what is done with it is not read"
