"""What an expression in a task's code comes to before a retry."""

from __future__ import annotations

import ast
import inspect
import random
from dataclasses import dataclass

from .arithmetic import NotKnown, Value, evaluate
from .bodies import NOTHING, Body, NoSource
from .callees import callee


@dataclass(frozen=True, slots=True)
class Moment:
    """A run with so many retries behind it, in which every draw falls at this part of its range."""

    retries: int
    drawn: float = 0.5


def value_of(body: Body, node: ast.expr, moment: Moment) -> Value:
    """Return what an expression in a body comes to; raises NotKnown."""
    return evaluate(node, lambda inner: _known(body, inner, moment))


def _known(body: Body, node: ast.expr, moment: Moment) -> object:
    path = body.path(node)
    if path == ".request.retries":
        return moment.retries
    if path and path.count(".") == 1:
        return inspect.getattr_static(body.task, path[1:], NOTHING)
    if isinstance(node, ast.Name):
        return _named(body, node, moment)
    if isinstance(node, ast.Call):
        return _called(body, node, moment)
    return body.resolve(node)


def _named(body: Body, node: ast.Name, moment: Moment) -> object:
    if argument := body.arguments.get(node.id):
        return value_of(argument.body, argument.node, moment)
    if node.id not in body.bindings:
        return body.resolve(node)
    bound = body.bindings[node.id]
    if bound is None:
        raise NotKnown(node.id)
    return value_of(body, bound, moment)


def _called(body: Body, node: ast.Call, moment: Moment) -> object:
    """Return what a draw comes to, or a function of the user's that is nothing but one expression."""
    drawing = body.resolve(node.func)
    if any(drawing is known for known in (random.uniform, random.randint, random.random)):
        bounds = [value_of(body, x, moment) for x in node.args]
        return _drawn(bounds, moment.drawn, whole=drawing is random.randint)
    called = callee(body, node)
    try:
        statements = called.node.body if called else []
    except NoSource as error:
        raise NotKnown(str(error)) from None
    match [x for x in statements if not _is_text(x)] if isinstance(statements, list) else []:
        case [ast.Return(value=ast.expr() as result)] if called:
            return value_of(called, result, moment)
    raise NotKnown(ast.unparse(node))


def _drawn(bounds: list[Value], part: float, *, whole: bool) -> object:
    low, high = bounds or (0.0, 1.0)
    if isinstance(low, tuple) or isinstance(high, tuple):
        raise NotKnown("a range of rows")
    return min(int(low + part * (high - low + 1)), high) if whole else low + part * (high - low)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
