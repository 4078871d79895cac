"""Reads the code of Celery tasks: plain calls of `self.retry`, and lines that leave retries open."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any
from weakref import ReferenceType

from celery import Celery, Task, exceptions, signals
from celery.utils.dispatch import Signal

from ....celery import compat
from .. import Open
from ..code import (
    Askers,
    FunctionNode,
    Mention,
    functions_around,
    may_be,
    mentions,
    methods,
    place,
    source_of,
    unwatched,
    wrapped,
)

#: The options that `Task.retry` and the automatic retries read of a task.
SETTINGS = frozenset(
    (
        *("max_retries", "default_retry_delay", "autoretry_for", "dont_autoretry_for", "retry_kwargs"),
        *("retry_backoff", "retry_backoff_max", "retry_jitter", "override_max_retries"),
    )
)
#: The methods of a task that a worker calls before or after a run.
_BESIDE = frozenset(("before_start", "on_success", "on_failure", "on_retry", "after_return"))
#: Methods in place of Celery's own at a run or retry, or in place of an option.
_INSTEAD = SETTINGS | frozenset(
    (
        *("__call__", "retry", "signature_from_request", "subtask_from_request", "apply_async"),
        *("__getattribute__", "__getattr__"),
    )
)
#: Functions that set, or only read, an attribute by its name.
_SETTING = frozenset(("setattr", "delattr", "vars", "__dict__"))
_REFLECTION = _SETTING | frozenset(("getattr", "methodcaller", "attrgetter"))


@dataclass(frozen=True, slots=True)
class Ask:
    """One `self.retry(...)` in a plain place, with plain arguments."""

    line: int
    #: In seconds; None where the call gives none.
    countdown: float | None
    #: None where the call gives none.
    max_retries: int | None
    #: Whether the call gives an error, with which the job ends.
    has_exc: bool
    #: The line, as `path:line`.
    where: str = ""


@dataclass(slots=True)
class Code:
    """A task's plain calls of `self.retry`, and the lines that leave retries open."""

    asks: list[Ask] = field(default_factory=list)
    #: Lines that may ask for a retry.
    open: list[Open] = field(default_factory=list)
    #: Lines that may change the number or the waits of retries.
    of_retries: list[Open] = field(default_factory=list)


class Fleet:
    """The modules around an app's tasks, and their functions that ask for retries or set their options."""

    def __init__(self, app: Celery) -> None:
        tasks = [*app.tasks.values()]
        runs = [x for task in tasks for x in (*wrapped(_run(task)), *(f for _, f in _hooks(task)))]
        functions = functions_around("celery", runs, [app, *tasks])
        heard = [x for signal in vars(signals).values() if type(signal) is Signal for x in _receivers(signal)]
        self.askers = Askers(functions, _asks)
        self.guards = Askers(functions, _guards)
        every = dict.fromkeys((*(x for found in functions.values() for x in found), *runs, *heard))
        self.setters = [found for function in every for found in _sets(function, own=False)]
        self.signals = [found for function in heard for found in self.askers.signs(function)]


def read_code(fleet: Fleet, task: Task) -> Code:
    """Read the functions that a worker runs for a task."""
    found = Code(open=[*fleet.signals], of_retries=[*fleet.setters])
    run, *inner = wrapped(_run(task)) or (None,)
    if run is None:
        found.open.append(Open(task.name, "what it runs is no function of the project, and is not read"))
    else:
        _read_run(fleet, task, run, found, is_plain=not inner)
    for function in inner:
        _read_words(fleet, function, [*mentions(function.__code__)], found)
    for name, function in _hooks(task):
        found.open += fleet.askers.signs(function)
        if name in _INSTEAD:
            found.of_retries.append(Open(place(function), f"its own {name} may change its retries"))
    request = task.Request if isinstance(task.Request, str) else task.Request.__module__
    if request.split(".")[0] not in ("celery", "ojs_bridge"):
        found.open.append(Open(task.name, f"its own Request, of {request}, is not read"))
    return found


def _run(task: Task) -> Any:
    run = _bound(task)
    return run.__func__ if type(run) is MethodType else run


def _bound(task: Task) -> Any:
    """Return what a task runs: a method, if it is given its task."""
    return unwatched(vars(task).get(compat.orig_run.name, task.run))


def _read_run(fleet: Fleet, task: Task, run: FunctionType, found: Code, *, is_plain: bool) -> None:
    words, node = [*mentions(run.__code__)], source_of(run)
    if inspect.ismethod(_bound(task)):
        holder = "".join(run.__code__.co_varnames[:1])
        if node is None:
            found.open.append(Open(place(run), "its source cannot be read"))
        else:
            found.open += [Open(place(run, n), f"{holder} is passed on") for n in _loose(node, holder)]
            found.asks = [*_asks_in(run, node, holder)] if is_plain else []
    lines = [ask.line for ask in found.asks]
    for x in [*words]:
        if x.kind == "attribute" and x.word == "retry" and x.line in lines:
            lines.remove(x.line)
            words.remove(x)
    _read_words(fleet, run, words, found)


def _read_words(fleet: Fleet, function: FunctionType, words: list[Mention], found: Code) -> None:
    found.open += fleet.askers.signs(function, words)
    found.of_retries += [*fleet.guards.signs(function, words), *_sets(function, own=True)]


def _loose(function: FunctionNode, holder: str) -> Iterator[int]:
    """Yield the lines that pass the task itself to other code, or give its name to another object."""
    plain = {x.value for x in ast.walk(function) if isinstance(x, ast.Attribute)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == holder and node not in plain:
            yield node.lineno


def _asks_in(run: FunctionType, function: FunctionNode, holder: str) -> Iterator[Ask]:
    for call, in_handler in _statements(function.body, in_handler=False):
        match call.func:
            case ast.Attribute(value=ast.Name(id=name), attr="retry", end_lineno=int(line)) if name == holder:
                given = {keyword.arg: keyword.value for keyword in call.keywords}
                # Without an error it may ask in order to go on.
                if not call.args and (in_handler or "exc" in given):
                    yield from _ask(line, given, place(run, line))


def _statements(block: Sequence[ast.stmt], *, in_handler: bool) -> Iterator[tuple[ast.Call, bool]]:
    """Yield the calls whose exception leaves the function, and whether they are in an `except` block.

    Such a call is a statement of its own, raised or returned.
    """
    for statement in block:
        match statement:
            case (
                ast.Expr(value=ast.Call() as call)
                | ast.Raise(exc=ast.Call() as call)
                | ast.Return(value=ast.Call() as call)
            ):
                yield call, in_handler
            case ast.If() | ast.For() | ast.While():
                yield from _statements([*statement.body, *statement.orelse], in_handler=in_handler)
            case ast.Try() if not any(map(_may_swallow, statement.finalbody)):
                free = [] if statement.handlers else statement.body
                yield from _statements([*free, *statement.orelse], in_handler=in_handler)
                for handler in statement.handlers:
                    yield from _statements(handler.body, in_handler=True)


def _may_swallow(statement: ast.stmt) -> bool:
    leaving = (ast.Return, ast.Break, ast.Continue)
    return any(isinstance(node, leaving) for node in ast.walk(statement))


def _ask(line: int, given: dict[str | None, ast.expr], where: str) -> Iterator[Ask]:
    """Yield the retry of a call; nothing where an argument is computed."""
    numbers = {name: _number(node) for name, node in given.items() if name != "exc"}
    known = {*numbers} <= {"countdown", "max_retries"} and None not in numbers.values()
    if known and isinstance(numbers.get("max_retries", 0), int):
        yield Ask(line, numbers.get("countdown"), numbers.get("max_retries"), "exc" in given, where)


def _number(node: ast.expr) -> Any:
    """Return a literal number, or a product of numbers such as `60 * 5`; else None."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            numbers = _number(left), _number(right)
            return None if None in numbers else numbers[0] * numbers[1]
    return None


def _asks(function: FunctionType, words: list[Mention]) -> Open | None:
    """Return the first line of a function that may ask Celery for a retry, or requeue its message."""
    reflects = any(x.word in _REFLECTION for x in words)
    known = (exceptions.Retry, exceptions.Reject, exceptions)
    for x in words:
        if x.word == "retry" and (x.kind == "attribute" or (x.kind == "text" and reflects)):
            return Open(place(function, x.line), f"{x.of or 'something'}.retry is used in no plain way")
        if x.word in ("Retry", "Reject") and x.kind in ("name", "attribute"):
            name = x.word if x.kind == "name" else "exceptions"
            if may_be(function, words, name, "celery", known):
                return Open(place(function, x.line), f"{x.word} is raised by hand")
    return None


def _guards(function: FunctionType, words: list[Mention]) -> Open | None:
    """Return the first line of a function that reads a job's number of retries."""
    for x in words:
        if x.word == "retries" and x.kind in ("attribute", "sets"):
            return Open(place(function, x.line), "what it does depends on request.retries")
    return None


def _sets(function: FunctionType, *, own: bool) -> Iterator[Open]:
    """Yield the lines that set an option of retries, of the function's own task or of any other task."""
    words = [*mentions(function.__code__)]
    reflects = any(x.word in _SETTING for x in words)
    first = function.__code__.co_varnames[:1]
    for x in words:
        named = x.kind == "sets" or (x.kind == "text" and reflects)
        if named and x.word in SETTINGS and (x.of in first) is own:
            yield Open(place(function, x.line), f"{x.word} is set")


def _hooks(task: Task) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods of the user's classes that can change a task's retries."""
    for cls in type(task).__mro__:
        yield from methods(cls, _BESIDE | _INSTEAD)


def _receivers(signal: Any) -> Iterator[FunctionType]:
    """Yield the user's receivers of a signal; Celery keeps weak references to them."""
    for _, kept in signal.receivers or ():
        yield from wrapped(kept() if isinstance(kept, ReferenceType) else kept)
