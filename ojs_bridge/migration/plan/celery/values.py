"""The names in a function that is given a Celery task, and the values that are known before it runs."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import celery
from celery import Task
from celery.local import PromiseProxy

from ....celery import compat
from ..code import NOTHING, FunctionNode, attribute_of, mentions, resolve, source_of

#: The options that `Task.retry` and the automatic retries read of a task.
SETTINGS = frozenset(
    (
        *("max_retries", "default_retry_delay", "autoretry_for", "dont_autoretry_for", "retry_kwargs"),
        *("retry_backoff", "retry_backoff_max", "retry_jitter", "override_max_retries"),
    )
)
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
_DEPTH = 5


class Values:
    """The names of a function, and the values that are known in one run, before it begins."""

    def __init__(self, task: Task, function: FunctionType, retries: int, position: int | str | None) -> None:
        """Take a function that is given the task at a position, by a name, or not at all."""
        self.task, self.function, self.retries = task, function, retries
        self.node = source_of(function)
        self._counts = any(x.word == "retries" for x in mentions(function.__code__))
        self.holders: set[str] = set()
        #: The name of `*args` that begin with the task.
        self.packed = ""
        #: The values of variables, and of those that have only one.
        self._assigned: dict[str, list[ast.expr]] = {}
        self.values: dict[str, ast.expr] = {}
        if self.node is not None:
            self._take(self.node, position)

    def _take(self, node: FunctionNode, position: int | str | None) -> None:
        names = [x.arg for x in (*node.args.posonlyargs, *node.args.args)]
        if isinstance(position, str):
            self.holders = {position}
        elif position is not None and position < len(names):
            self.holders = {names[position]}
        elif position == len(names) and node.args.vararg:
            self.packed = node.args.vararg.arg
        code = self.function.__code__
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        stored = [x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
        for one in ast.walk(node):
            match one:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AugAssign(target=ast.Name(id=name), value=value)
                ):
                    self._assigned.setdefault(name, []).append(value)
                    if stored.count(name) == 1 and name not in given and isinstance(one, ast.Assign):
                        self.values[name] = value
        # `task = self` and `task = args[0]` are other names of the task.
        names = [name for name, value in self.values.items() if self.is_task(value)]
        self.holders.update(names)

    def is_task(self, node: ast.AST) -> bool:
        """Return whether an expression is the task itself."""
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=0)):
                return name == self.packed
            case ast.Name(id=name) if name in self.holders:
                return True
            case ast.Name(id=name) if name not in self.function.__code__.co_varnames:
                thing = resolve(self.function, name)
                if issubclass(type(thing), PromiseProxy):
                    return bool(compat.get_current_object(thing)() is self.task)
                return thing is self.task or thing is celery.current_task
        return False

    def is_retries(self, node: ast.AST) -> bool:
        """Return whether an expression is the task's `request.retries`."""
        match node:
            case ast.Attribute(attr="retries", value=ast.Name(id=name)) if name in self.values:
                node = ast.Attribute(self.values[name], "retries", ast.Load())
        match node:
            case ast.Attribute(attr="retries", value=ast.Attribute(attr="request", value=value)):
                return self.is_task(value)
        return False

    def tells(self, node: ast.AST, depth: int = 0) -> bool:
        """Return whether an expression depends on the number of retries."""
        if not self._counts:
            return False
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and depth < _DEPTH:
                if any(self.tells(x, depth + 1) for x in self._assigned.get(one.id, ())):
                    return True
            elif self.is_retries(one):
                return True
        return False

    def value(self, node: ast.AST, depth: int = 0) -> Any:
        """Return the value of an expression of numbers; NOTHING where it cannot be computed."""
        if self.is_retries(node):
            return self.retries
        match node:
            case ast.Constant(value=value):
                return value if value is None or type(value) in (int, float, bool) else NOTHING
            case ast.Attribute(value=value, attr=attr) if self.is_task(value) and attr in SETTINGS:
                setting = vars(self.task).get(attr, attribute_of(self.task, attr))
                return setting if setting is None or type(setting) in (int, float, bool, dict) else NOTHING
            case ast.Name(id=name) if name in self.values:
                return self.value(self.values[name], depth + 1) if depth < _DEPTH else NOTHING
            case ast.Name():
                setting = self.static(node)
                return setting if type(setting) in (int, float) else NOTHING
        return self._combined(node, lambda *nodes: [self.value(x, depth) for x in nodes])

    def _combined(self, node: ast.AST, of: Callable[..., list[Any]]) -> Any:
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
                return _computed(_OPERATORS.get(type(one_sided)), of(operand))
            case ast.BinOp(left=left, op=between, right=right):
                return _computed(_OPERATORS.get(type(between)), of(left, right))
            case ast.Compare(left=left, ops=[comparison], comparators=[right]):
                return _computed(_OPERATORS.get(type(comparison)), of(left, right))
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return _computed(_FUNCTIONS.get(name), of(*arguments))
        return NOTHING

    def static(self, node: ast.AST) -> object:
        """Return the object of a name, or of an attribute of a module or a class; else NOTHING."""
        match node:
            case ast.Name(id=name):
                own = name in self.function.__code__.co_varnames
                return NOTHING if own else resolve(self.function, name)
            case ast.Attribute(value=value, attr=attr):
                base = self.static(value)
                variables = vars(base) if type(base) is ModuleType else {}
                return variables.get(attr, NOTHING if base is NOTHING else attribute_of(base, attr))
        return NOTHING


def _computed(function: Callable[..., Any] | None, values: Sequence[Any]) -> Any:
    if function is None or NOTHING in values:
        return NOTHING
    try:
        return function(*values)
    except (ArithmeticError, TypeError, ValueError):
        return NOTHING


def last_name(node: ast.AST) -> str:
    """Return the name by which an expression is known."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Starred(value=value) | ast.Subscript(value=value) | ast.Call(func=value):
            return last_name(value)
    return ""
