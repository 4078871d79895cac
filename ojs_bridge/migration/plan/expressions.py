"""The values of expressions in a fleet's source, as far as they are known before it runs."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from .code import NOTHING, attribute_of, resolve

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


class Scope:
    """The names in a function, and what is known of their values before it runs."""

    #: The types of what a name of the function's surroundings may have as its value.
    kinds: tuple[type, ...] = (int, float)

    def __init__(self, function: FunctionType, node: ast.AST | None) -> None:
        parts = [*ast.walk(node)] if node else []
        given = [x.arg for x in parts if isinstance(x, ast.arg)]
        stored = [x.id for x in parts if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
        self.function = function
        #: The function's own names, and the values of those variables that have only one.
        self.own = {*function.__code__.co_varnames, *given, *stored}
        self.values: dict[str, ast.expr] = {}
        for part in parts:
            match part:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in given:
                    if stored.count(name) == 1:
                        self.values[name] = value

    def static(self, node: ast.AST) -> object:
        """Return the object of a name, or of an attribute of a module or a class; else NOTHING."""
        match node:
            case ast.Name(id=name):
                return NOTHING if name in self.own else resolve(self.function, name)
            case ast.Attribute(value=value, attr=attr):
                base = self.static(value)
                variables = vars(base) if type(base) is ModuleType else {}
                return variables.get(attr, NOTHING if base is NOTHING else attribute_of(base, attr))
        return NOTHING

    def value(self, node: ast.AST, depth: int = 0) -> Any:
        """Return the value of an expression of numbers; NOTHING where it cannot be computed."""
        match node:
            case ast.Constant(value=value):
                return value if value is None or type(value) in (int, float, bool) else NOTHING
            case ast.Name(id=name) if name in self.values:
                return self.value(self.values[name], depth + 1) if depth < DEPTH else NOTHING
            case ast.Name() | ast.Attribute():
                known = self.static(node)
                return known if type(known) in self.kinds and self._is_constant(node) else NOTHING
        return combined(node, lambda *nodes: [self.value(x, depth) for x in nodes])

    def _is_constant(self, node: ast.Name | ast.Attribute) -> bool:
        """Return whether a name is one of a module or a class: an object may have another value."""
        of = isinstance(node, ast.Attribute) and self.static(node.value)
        return not of or issubclass(type(of), (ModuleType, type))
