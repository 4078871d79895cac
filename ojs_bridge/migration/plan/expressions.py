"""The values of expressions in a fleet's source, as far as they are known before it runs."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .code import NOTHING, attribute_of

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Pow: lambda base, exponent: base**exponent if exponent <= _LARGEST_EXPONENT else NOTHING,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "int": int,
    "float": float,
    "round": round,
    "abs": abs,
}
_LARGEST_EXPONENT = 1000
#: A variable is followed through so many others.
DEPTH = 5


def combined(node: ast.AST, of: Callable[..., list[Any]]) -> Any:
    """Return the value of an expression that is made of others, whose values `of` returns."""
    match node:
        case ast.BoolOp(op=op, values=values):
            ends = isinstance(op, ast.Or)
            answers = [x if x is NOTHING else bool(x) for x in of(*values)]
            return ends if ends in answers else NOTHING if NOTHING in answers else not ends
        case ast.IfExp(test=test, body=body, orelse=orelse):
            answer, first, second = of(test, body, orelse)
            return NOTHING if answer is NOTHING else first if answer else second
        case ast.UnaryOp(op=one_sided, operand=operand):
            return computed(_OPERATORS.get(type(one_sided)), of(operand))
        case ast.BinOp(left=left, op=between, right=right):
            return computed(_OPERATORS.get(type(between)), of(left, right))
        case ast.Compare(left=left, ops=[comparison], comparators=[right]):
            return computed(_OPERATORS.get(type(comparison)), of(left, right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return computed(_FUNCTIONS.get(name), of(*arguments))
    return NOTHING


def computed(function: Callable[..., Any] | None, values: Sequence[Any]) -> Any:
    """Return what a function makes of values; NOTHING if one is not known, or is none for it."""
    if function is None or NOTHING in values:
        return NOTHING
    try:
        return function(*values)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return NOTHING


def member(base: object, name: str) -> object:
    """Return an attribute of a module, of a class, or of the class of an object; else NOTHING."""
    variables = vars(base) if type(base) is ModuleType else {}
    return variables.get(name, NOTHING if base is NOTHING else attribute_of(base, name))
