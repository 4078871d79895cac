"""What an expression comes to, as far as it can be said without running anybody's code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

#: A number, or a row of numbers to choose from.
Value: TypeAlias = "float | tuple[float, ...]"

#: The largest power of two that is worked out; a float holds less than its square.
_LARGEST_POWER = 1000
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (abs, float, int, len, max, min, round)}


class NotKnown(Exception):
    """What an expression comes to is known only when the task runs."""


def evaluate(node: ast.expr, known: Callable[[ast.expr], object]) -> Value:
    """Return what an expression of numbers comes to; `known` says what a name or attribute stands for.

    Raises NotKnown for anything but arithmetic, and for arithmetic that goes wrong.
    """
    try:
        return _value(_evaluate(node, known))
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise NotKnown(str(error)) from None


def _evaluate(node: ast.expr, known: Callable[[ast.expr], object]) -> Any:
    def of(inner: ast.expr) -> Any:
        return _value(_evaluate(inner, known))

    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(of(item) for item in items)
        case ast.UnaryOp(op=op, operand=inner) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](of(inner))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _apply(op, of(left), of(right))
        case ast.IfExp(test=ast.Compare(left=left, ops=[compare], comparators=[right])) if (
            type(compare) in _OPERATORS
        ):
            return of(node.body if _OPERATORS[type(compare)](of(left), of(right)) else node.orelse)
        case ast.Subscript(value=row, slice=index):
            return of(row)[of(index)]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if _FUNCTIONS.get(name) is known(
            node.func
        ):
            return _FUNCTIONS[name](*[of(argument) for argument in args])
    return known(node)


def _apply(op: ast.operator, left: Any, right: Any) -> Any:
    """Apply an operator to two numbers; a power that nobody could wait for is not worked out."""
    if isinstance(left, tuple) or isinstance(right, tuple):
        raise NotKnown("arithmetic of rows")
    if isinstance(op, ast.Pow) and abs(left) > 1 and right * math.log2(abs(left)) > _LARGEST_POWER:
        return math.inf
    return _OPERATORS[type(op)](left, right)


def _value(found: Any) -> Value:
    """Return a number, or a row of numbers, without asking somebody's lazy object what it is."""
    kind = type(found)
    if kind in (tuple, list, range):
        return tuple(_number(item) for item in found)
    return _number(found)


def _number(found: Any) -> float:
    if issubclass(type(found), (int, float)) and type(found) is not bool:
        return found  # type: ignore[no-any-return]
    raise NotKnown(f"{type(found).__name__} is no number")
