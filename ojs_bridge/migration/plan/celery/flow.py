"""Follows a Celery task through its code, run by run: where it asks for a retry, where it is passed on."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, TypeGuard

from celery import Task
from celery.exceptions import Retry

from .. import Open
from ..code import NOTHING, attribute_of, place, source_of, wrapped
from .values import SETTINGS, SWALLOWING, Values, last_name

#: The arguments of `self.retry`, by their places, and those that change its runs or waits.
_PLACES = ("args", "kwargs", "exc", "throw", "eta", "countdown", "max_retries")
_NUMBERS = frozenset(("eta", "countdown", "max_retries"))
#: Arguments that make of a retry another job, or none.
_ODD = frozenset(("throw", "task_id", "retries"))
#: Functions and methods that only look at what they are given.
_LOOKING = frozenset(("print", "str", "repr", "len", "type", "isinstance", "id", "bool", "super"))
_LOGGING = frozenset(("debug", "info", "warning", "warn", "error", "exception", "critical", "log"))
#: The names of classes as which a handler catches `Retry`.
_CATCHING = frozenset(cls.__name__ for cls in Retry.__mro__)


@dataclass(frozen=True, slots=True)
class Ask:
    """One `self.retry(...)` that leaves the task's function."""

    #: The line, as `path:line`.
    where: str
    #: In seconds; None where the call gives none, NOTHING where it cannot be computed.
    countdown: Any
    #: None where the call gives none.
    max_retries: float | None
    #: Whether the call gives an error, with which the job ends.
    has_exc: bool
    #: Whether the task's code may catch that error, and go on after the last retry.
    goes_on: bool


@dataclass(slots=True)
class Way:
    """What one run of a task does about its own retries."""

    asks: dict[str, Ask] = field(default_factory=dict)
    #: The lines that may retry, or set options, in no plain way.
    open: list[Open] = field(default_factory=list)
    #: The answers to questions about the number of retries, by their places.
    answers: dict[tuple[str, int], Any] = field(default_factory=dict)
    #: The functions that were followed, with the words and lines that are understood.
    read: dict[FunctionType, set[tuple[str, int]]] = field(default_factory=dict)
    #: For each call of Celery's own `__call__`, whether it is made once, and what it raises goes on.
    bodies: list[bool] = field(default_factory=list)
    #: The functions that were followed, and whether an exception leaves the place of the call.
    seen: set[tuple[FunctionType, bool]] = field(default_factory=set)


def way_of(task: Task, run: FunctionType, *, bound: bool, retries: int) -> Way:
    """Follow a task through its function in the run after so many retries; nothing is run.

    With `bound` the first argument of the function is the task.
    """
    way = Way()
    _Function(task, run, retries, way, 0 if bound else None).follow(_Place())
    return way


def only_calls(task: Task, function: FunctionType) -> bool:
    """Return whether a task's `__call__` calls Celery's own once, and lets out what that raises."""
    way = way_of(task, function, bound=True, retries=0)
    return bool(way.bodies) and all(way.bodies) and not way.open and not way.asks and not way.answers


@dataclass(frozen=True, slots=True)
class _Place:
    """What is true at a place in the code."""

    #: Whether an exception that is raised here leaves the task's function.
    leaves: bool = True
    #: Whether an error other than `Retry` may be caught.
    goes_on: bool = False
    #: Whether the number of retries is only shown here, or is part of a delay.
    shows: bool = False
    in_loop: bool = False


class _Function(Values):
    """A function that a task goes through."""

    def __init__(
        self, task: Task, function: FunctionType, retries: int, way: Way, position: int | str | None
    ) -> None:
        super().__init__(task, function, retries, position)
        self._way = way
        self._read = way.read.setdefault(function, set())

    def follow(self, at: _Place) -> None:
        """Read the function, which is called at a place of another."""
        if self.node is None:
            self._note(self.function.__code__.co_firstlineno, "its source cannot be read")
        else:
            self._block(self.node.body, at)

    def _note(self, line: int, why: str) -> None:
        self._way.open.append(Open(place(self.function, line), why))

    def _block(self, block: Iterable[ast.stmt], at: _Place) -> bool:
        """Read statements up to one that ends the block; return whether none does."""
        return all(self._goes_on(statement, at) for statement in block)

    def _goes_on(self, statement: ast.stmt, at: _Place) -> bool:
        """Read a statement; return whether the one after it may be reached."""
        match statement:
            case ast.If(test=test, body=body, orelse=orelse):
                answer = self._answer(test, at)
                reached = [block for block, other in ((body, False), (orelse, True)) if answer is not other]
                going_on = [self._block(block, at) for block in reached]
                return any(going_on)
            case ast.While(test=test, body=body, orelse=orelse):
                self._answer(test, at)
                self._blocks((body, orelse), replace(at, in_loop=True))
            case ast.For(target=target, iter=over, body=body, orelse=orelse):
                self._expressions((target, over), at)
                self._blocks((body, orelse), replace(at, in_loop=True))
            case ast.Try():
                return self._tries(statement, at)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                self._expressions(items, at)
                swallows = any(self._swallows(item.context_expr) for item in items)
                return self._block(body, replace(at, leaves=at.leaves and not swallows)) or swallows
            case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body) | ast.ClassDef(body=body):
                self._expressions(statement.decorator_list, at)
                self._block(body, replace(at, leaves=False))
            case (
                ast.Assign(targets=[ast.Name()], value=value) | ast.AugAssign(target=ast.Name(), value=value)
            ):
                if not self.is_task(value):
                    self._expression(value, replace(at, shows=True))
            case _:
                self._expressions(ast.iter_child_nodes(statement), at)
        return not isinstance(statement, (ast.Return, ast.Raise, ast.Break, ast.Continue))

    def _blocks(self, blocks: Iterable[Sequence[ast.stmt]], at: _Place) -> None:
        for block in blocks:
            self._block(block, at)

    def _tries(self, node: ast.Try, at: _Place) -> bool:
        leaving = (ast.Return, ast.Break, ast.Continue)
        if any(isinstance(x, leaving) for one in node.finalbody for x in ast.walk(one)):
            at = replace(at, leaves=False)
        within = replace(at, goes_on=at.goes_on or bool(node.handlers))
        for handler in node.handlers:
            if handler.type is None or self._catches_retry(handler.type):
                again = _raises_again(handler) or _is_raised_later(handler, node.finalbody)
                within = replace(within, leaves=within.leaves and again)
                break
        goes_on = self._block(node.body, within) and self._block(node.orelse, at)
        for handler in node.handlers:
            for kind in ast.walk(handler.type) if handler.type else ():
                if isinstance(kind, (ast.Name, ast.Attribute)):
                    self._understood(kind)
            goes_on = self._block(handler.body, at) or goes_on
        return self._block(node.finalbody, at) and goes_on

    def _catches_retry(self, kind: ast.expr) -> bool:
        """Return whether a handler for an exception class, or for several, may catch Celery's Retry."""
        if isinstance(kind, ast.Tuple):
            return any(map(self._catches_retry, kind.elts))
        caught = self.static(kind)
        if isinstance(kind, ast.Attribute) and self.is_task(kind.value):
            caught = attribute_of(self.task, kind.attr)  # `self.MaxRetriesExceededError`
        classes = caught if isinstance(caught, tuple) else (caught,)
        if all(issubclass(type(one), type) for one in classes):
            return any(issubclass(Retry, one) for one in classes)
        # A class that the function imports itself has a name that tells it.
        is_plain = isinstance(kind, (ast.Name, ast.Attribute)) and not self._is_computed(kind)
        return not is_plain or last_name(kind) in _CATCHING

    def _is_computed(self, kind: ast.expr) -> bool:
        match kind:
            case ast.Name(id=name):
                code = self.function.__code__
                arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                return name in self.values or name in arguments
            case ast.Attribute(value=value):
                return self.is_task(value)
        return True

    def _swallows(self, manager: ast.expr) -> bool:
        """Return whether a context manager may swallow what is raised in it; a library's has a name."""
        made = manager.func if isinstance(manager, ast.Call) else manager
        callee = self.static(made)
        if type(callee) is FunctionType:
            return any(map(_catches_at_yield, wrapped(callee))) or callee.__name__ in SWALLOWING
        leaving = NOTHING if callee is NOTHING else attribute_of(callee, "__exit__")
        return last_name(made) in SWALLOWING or any(map(_returns_a_value, wrapped(leaving)))

    def _answer(self, test: ast.expr, at: _Place) -> Any:
        """Read a question; return its answer, or NOTHING where it is not known before the run."""
        self._question(test, at)
        answer = self.value(test)
        return answer if answer is NOTHING else bool(answer)

    def _question(self, test: ast.expr, at: _Place) -> None:
        match test:
            case _ if not self.tells(test):
                self._expression(test, at)
            case ast.BoolOp(values=parts):
                for one in parts:
                    self._question(one, at)
            case ast.UnaryOp(op=ast.Not(), operand=part):
                self._question(part, at)
            case _:
                answer = self.value(test)
                self._way.answers[place(self.function, test.lineno), test.col_offset] = answer
                if answer is NOTHING:
                    self._note(test.lineno, _DEPENDS)

    def _expressions(self, nodes: Iterable[ast.AST], at: _Place) -> None:
        for node in nodes:
            self._expression(node, at)

    def _expression(self, node: ast.AST, at: _Place) -> None:
        children = ast.iter_child_nodes(node)
        match node:
            case ast.stmt():
                self._goes_on(node, at)
            case ast.Call():
                self._call(node, at)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._question(test, at)
                self._expressions((body, orelse), at)
            case ast.Compare() if self.tells(node) and not at.shows:
                self._question(node, at)
            case ast.Compare() | ast.FormattedValue():
                shown = replace(at, shows=at.shows or isinstance(node, ast.FormattedValue))
                self._expressions([x for x in children if not self.is_task(x)], shown)
            case ast.Lambda() | ast.GeneratorExp():
                self._expressions(children, replace(at, leaves=False))
            case ast.Attribute() | ast.Subscript() | ast.Name():
                self._mention(node, at)
            case _:
                self._expressions(children, at)

    def _mention(self, node: ast.Attribute | ast.Subscript | ast.Name, at: _Place) -> None:
        """Read a variable, or a part of one."""
        match node:
            case ast.Attribute(value=value, attr=attr) if self.is_task(value):
                if attr == "retry":
                    self._note(node.lineno, f"{ast.unparse(node)} {UNPLAIN}")
                elif attr in SETTINGS and not isinstance(node.ctx, ast.Load):
                    self._set(node.lineno, node, attr)
            case ast.Attribute(ctx=ctx) if self.is_retries(node):
                if not at.shows or not isinstance(ctx, ast.Load):
                    self._note(node.lineno, _DEPENDS)
            case ast.Subscript(value=ast.Name(id=name)) if name == self.packed and not self.is_task(node):
                pass
            case ast.Subscript() | ast.Name() if self._is_given(node):
                self._note(node.lineno, f"{last_name(node)} is passed on")
            case ast.Name() if not at.shows and self.tells(node):
                self._note(node.lineno, _DEPENDS)
            case _:
                self._expressions(ast.iter_child_nodes(node), at)

    def _is_given(self, node: ast.AST) -> bool:
        """Return whether an expression is the task that the function was given, or begins with it."""
        match node:
            case ast.Starred(value=ast.Name(id=name)) | ast.Name(id=name):
                return name in self.holders or name == self.packed != ""
        return self.is_task(node)

    def _call(self, call: ast.Call, at: _Place) -> None:
        name, called = last_name(call.func), call.func
        is_own = isinstance(called, ast.Attribute) and self.is_task(called.value)
        if isinstance(called, ast.Attribute) and is_own and name == "retry":
            self._ask(call, called, at)
            return
        if name == "__call__":
            self._way.bodies.append(at.leaves and not at.in_loop)
        method = attribute_of(self.task, name) if is_own else NOTHING
        if _is_the_users(method):
            self._follow(call, method, 0, at)
        self._expression(called, at)
        looks = name in (_LOOKING if isinstance(called, ast.Name) else _LOGGING)
        for position, value in (*enumerate(call.args), *((x.arg, x.value) for x in call.keywords)):
            function = self.static(called)
            if not self._is_given(value):
                self._expression(value, replace(at, shows=at.shows or looks))
            elif (
                looks
                or name == "__call__"
                or (name == "getattr" and _second(call) not in ("retry", *SETTINGS))
            ):
                pass
            elif name == "setattr" and _second(call) in SETTINGS:
                self._set(call.lineno, call.args[1], str(_second(call)))
            elif _is_the_users(function) and position is not None:
                self._follow(call, function, position, at)
            else:
                self._note(call.lineno, f"{last_name(value)} is passed on")

    def _follow(self, call: ast.Call, function: FunctionType, position: int | str, at: _Place) -> None:
        """Read a function that is called with the task."""
        self._understood(call.func)
        if (function, at.leaves) not in self._way.seen:
            self._way.seen.add((function, at.leaves))
            _Function(self.task, function, self.retries, self._way, position).follow(at)

    def _understood(self, node: ast.expr, word: str = "") -> None:
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        self._read.update((word or last_name(node), line) for line in lines)

    def _set(self, line: int, node: ast.expr, option: str) -> None:
        """Note that an option is set. It is an option of this task, and of no other."""
        self._understood(node, option)
        self._note(line, f"{option} is set")

    def _ask(self, call: ast.Call, called: ast.Attribute, at: _Place) -> None:
        self._understood(called)
        given: dict[str | None, ast.expr] = {**dict(zip(_PLACES, call.args, strict=False))}
        given |= {x.arg: x.value for x in call.keywords}
        options = self.value(given.pop(None)) if None in given else {}
        numbers = {name: self.value(value) for name, value in given.items() if name in _NUMBERS}
        spread = dict(options) if isinstance(options, Mapping) else {"throw": options}
        numbers |= {name: value for name, value in spread.items() if name in _NUMBERS}
        if numbers.get("eta") is not None:
            numbers["countdown"] = NOTHING
        countdown, limit = numbers.get("countdown"), numbers.get("max_retries")
        where = place(self.function, called.end_lineno or called.lineno)
        is_plain = limit is None or type(limit) in (int, float)
        starred = any(isinstance(x, ast.Starred) for x in call.args)
        if not at.leaves or not is_plain or starred or _ODD & (given.keys() | spread.keys()):
            self._way.open.append(Open(where, f"{ast.unparse(called)} {UNPLAIN}"))
        else:
            has_exc = "exc" in given or "exc" in spread
            self._way.asks[where] = Ask(where, countdown, limit, has_exc, at.goes_on)
        for name, value in given.items():
            self._expression(value, at if name in ("args", "kwargs") else replace(at, shows=True))


_DEPENDS = "what it does depends on request.retries"
#: After a call such as `self.retry`.
UNPLAIN = "is used in no plain way"


def _raises_again(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler raises what it has caught, whatever else it does."""
    leaving = (ast.Return, ast.Break, ast.Continue)
    match handler.body[-1]:
        case ast.Raise(exc=None) | ast.Raise(exc=ast.Name(id=handler.name)):
            return not any(isinstance(x, leaving) for one in handler.body for x in ast.walk(one))
    return False


def _is_raised_later(handler: ast.ExceptHandler, finalbody: Sequence[ast.stmt]) -> bool:
    """Return whether a handler keeps what it has caught in a variable, which `finally` raises."""
    leaving = (ast.Return, ast.Break, ast.Continue, ast.Raise)
    if any(isinstance(x, leaving) for one in handler.body for x in ast.walk(one)):
        return False
    nodes = [x for one in (*handler.body, *finalbody) for x in ast.walk(one)]
    stored = [x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
    for one in handler.body:
        match one:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=handler.name)):
                return stored.count(name) == 1 and any(_raises(last, name) for last in finalbody)
    return False


def _raises(statement: ast.stmt, kept: str) -> bool:
    """Return whether a statement raises what is in a variable, if something is in it."""
    match statement:
        case ast.Raise(exc=ast.Name(id=name)):
            return name == kept
        case ast.If(test=ast.Name(id=name), body=[raising]):
            return name == kept and _raises(raising, kept)
        case ast.If(test=ast.Compare(left=ast.Name(id=name), ops=[ast.IsNot()]), body=[raising]):
            return name == kept and _raises(raising, kept)
    return False


def _second(call: ast.Call) -> object:
    """Return the second argument of a call; "retry" if it is computed."""
    match call.args:
        case [_, ast.Constant(value=value), *_]:
            return value
    return "retry"


def _is_the_users(value: object) -> TypeGuard[FunctionType]:
    """Return whether a value is a function that can be followed."""
    return type(value) is FunctionType and wrapped(value)[:1] == [value]


def _catches_at_yield(function: FunctionType) -> bool:
    """Return whether a generator of a context manager may catch what is raised where it yields."""
    node = source_of(function)
    tried = [x for x in ast.walk(node) if isinstance(x, ast.Try) and x.handlers] if node else []
    return node is None or any(
        isinstance(y, ast.Yield) for x in tried for one in x.body for y in ast.walk(one)
    )


def _returns_a_value(function: FunctionType) -> bool:
    """Return whether a function returns something other than nothing."""
    node = source_of(function)
    returned = [x.value for x in ast.walk(node) if isinstance(x, ast.Return)] if node else []
    nothing = (None, False)
    return node is None or any(
        x is not None and not (isinstance(x, ast.Constant) and x.value in nothing) for x in returned
    )
