"""The source of a task's functions, and what the names in it stand for; none of it is run."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import FunctionType, ModuleType
from typing import TypeAlias

from celery import Task, current_task
from celery.local import Proxy

FunctionNode: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda"
#: What stands for no object at all, or for one that exists only while the task runs.
NOTHING = object()


class NoSource(Exception):
    """A function's source is not there, or is not what was loaded."""


@dataclass(frozen=True, eq=False)
class Body:
    """One function, mostly one that has the task in its hands.

    `holders` are the parameters that hold the task, `packed` is a `*args` that begins with it, and
    `arguments` is what a caller gave for other parameters.
    """

    task: Task
    function: FunctionType
    holders: frozenset[str] = frozenset()
    packed: str = ""
    arguments: Mapping[str, Argument] = field(default_factory=dict)

    @property
    def has_task(self) -> bool:
        """Whether the task is in its hands."""
        return bool(self.holders or self.packed)

    @property
    def asks_for_the_task(self) -> bool:
        """Whether it names Celery's `current_task`."""
        names = self.function.__code__.co_names
        return any(self.function.__globals__.get(name) is current_task for name in names)

    @cached_property
    def node(self) -> FunctionNode:
        """The function's source; raises NoSource."""
        code = self.function.__code__
        text = "".join(linecache.getlines(code.co_filename, self.function.__globals__))
        found = _functions(text).get((code.co_firstlineno, code.co_name), [])
        if len(found) != 1:
            raise NoSource(f"{self.function.__qualname__} of {self.function.__module__}")
        return found[0]

    def super_of(self, node: ast.expr) -> type | None:
        """Return the class after whose own methods `super()`, or `super(cls, self)`, looks for others."""
        match node:
            case ast.Call(func=ast.Name(id="super"), args=[]):
                found = self._closure.get("__class__")
            case ast.Call(func=ast.Name(id="super"), args=[cls, _]):
                found = self.resolve(cls)
            case _:
                return None
        return found if isinstance(found, type) else None

    def path(self, node: ast.expr) -> str | None:
        """Return how an expression is reached from the task, such as `.request.retries`; `` is the task."""
        with suppress(RecursionError):
            return self._path(node)
        return None

    def _path(self, node: ast.expr) -> str | None:
        match node:
            case ast.Name(id=name) if name in self.holders:
                return ""
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=0)) if name == self.packed:
                return ""
            case ast.Call() if self.super_of(node):
                return ""
            case ast.Name(id=name) if bound := self.bindings.get(name):
                return self._path(bound)
            case ast.Call(func=ast.Attribute(value=proxy, attr="_get_current_object"), args=[]):
                return self._path(proxy)
            case ast.Call(func=ast.Name() as named, args=[owner, ast.Constant(value=str(attr)), *_]) if (
                self.resolve(named) is getattr
            ):
                above = self._path(owner)
                return None if above is None else f"{above}.{attr}"
        if self._is_the_task(self.resolve(node)):
            return ""
        above = self._path(node.value) if isinstance(node, ast.Attribute) else None
        return None if above is None else f"{above}.{node.attr}"  # type: ignore[attr-defined]

    def _is_the_task(self, found: object) -> bool:
        if found is current_task:
            return True
        if issubclass(type(found), Proxy):  # isinstance would ask somebody's lazy object what it is
            with suppress(LookupError, NameError, RuntimeError):
                found = found._get_current_object()  # type: ignore[attr-defined]
        # By name: a shared task is another object in each app.
        return issubclass(type(found), Task) and found.name == self.task.name  # type: ignore[attr-defined]

    def resolve(self, node: ast.expr) -> object:
        """Return the object outside the function that an expression names; if it names none, no object's."""
        match node:
            case ast.Name(id=name) if name not in self.bindings:
                return self._outside(name)
            case ast.Attribute(value=inner, attr=name):
                owner = self.resolve(inner)
                if issubclass(type(owner), (ModuleType, type)):
                    return inspect.getattr_static(owner, name, NOTHING)
        return NOTHING

    def _outside(self, name: str) -> object:
        places = (self._closure, self.function.__globals__, vars(builtins))
        return next((names[name] for names in places if name in names), NOTHING)

    @cached_property
    def _closure(self) -> Mapping[str, object]:
        found = {}
        for name, cell in zip(
            self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True
        ):
            with suppress(ValueError):  # an empty cell
                found[name] = cell.cell_contents
        return found

    @cached_property
    def bindings(self) -> Mapping[str, ast.expr | None]:
        """What each local name stands for: None unless it is bound once, by `name = value`."""
        found: dict[str, ast.expr | None] = {}
        for name, value in _bound_in(self.node):
            found[name] = None if name in found else value
        return found


@dataclass(frozen=True, slots=True)
class Argument:
    """An expression that a caller gave, and the caller's body, in which its names stand."""

    body: Body
    node: ast.expr


@lru_cache(maxsize=32)
def _functions(text: str) -> Mapping[tuple[int, str], list[FunctionNode]]:
    """Return the functions in a file by their first line, decorators included, and their name."""
    found: dict[tuple[int, str], list[FunctionNode]] = {}
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min(x.lineno for x in (node, *node.decorator_list))
                found.setdefault((first, node.name), []).append(node)
            elif isinstance(node, ast.Lambda):
                found.setdefault((node.lineno, "<lambda>"), []).append(node)
    return found


def _bound_in(function: FunctionNode) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield each binding of a local name, with its value where it is a plain `name = value`."""
    plain: dict[ast.AST, ast.expr] = {}
    for node in ast.walk(function):
        match node:
            case (
                ast.Assign(targets=[ast.Name() as name], value=value)
                | ast.AnnAssign(target=ast.Name() as name, value=ast.expr() as value)
                | ast.NamedExpr(target=name, value=value)
            ):
                plain[name] = value
            case ast.Name(id=bound, ctx=ast.Store() | ast.Del()):
                yield bound, plain.get(node)
            case ast.arg(arg=bound) | ast.ExceptHandler(name=str(bound)) | ast.MatchAs(name=str(bound)):
                yield bound, None
            case ast.alias(name=module, asname=bound):
                yield bound or module.split(".")[0], None
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                yield from ((bound, None) for bound in names)
            case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) | ast.ClassDef(name=bound):
                if node is not function:
                    yield bound, None
