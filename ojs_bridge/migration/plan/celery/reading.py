"""What a task's code says of its retries: nothing, a few plain calls, or lines that leave it open."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any
from weakref import ReferenceType

from celery import Celery, Task, exceptions, signals
from celery.local import Proxy
from celery.utils.dispatch import Signal
from kombu.utils.imports import symbol_by_name

from ..code import (
    NOTHING,
    Askers,
    Mention,
    Sign,
    functions_around,
    mentions,
    methods,
    path_of,
    place,
    resolve,
    source_of,
    wrapped,
)
from ..planned import Open
from .asking import Ask, Asks, asks_in

#: What `Task.retry` and the automatic retries read of a task.
SETTINGS = frozenset(
    (
        *("max_retries", "default_retry_delay", "autoretry_for", "dont_autoretry_for", "retry_kwargs"),
        *("retry_backoff", "retry_backoff_max", "retry_jitter", "override_max_retries"),
    )
)
#: What a worker calls of a task around each run, and once it has ended.
_AROUND = frozenset(("__call__", "before_start"))
_AFTER = frozenset(("on_success", "on_failure", "on_retry", "after_return"))
#: What Celery calls for each retry.
_RETRYING = frozenset(("retry", "signature_from_request", "subtask_from_request", "apply_async"))
_WORDS = frozenset(("MaxRetriesExceededError", "current_task", "get_current_task", "_get_current_object"))
#: What reaches an attribute by a text.
_REFLECTION = frozenset(("getattr", "setattr", "delattr", "vars", "__dict__", "methodcaller", "attrgetter"))
_SIGNALS = (signals.task_prerun, signals.task_postrun, signals.task_success, signals.task_failure)


@dataclass(slots=True)
class Code:
    """What was read of a task's code: its plain calls of `self.retry`, and what is left open."""

    #: The file of the function that a worker runs.
    path: str = ""
    asks: list[Ask] = field(default_factory=list)
    #: What leaves it open whether the task is retried.
    open: list[Open] = field(default_factory=list)
    #: What leaves it open how often a task is retried that is retried at all.
    of_retries: list[Open] = field(default_factory=list)
    #: What leaves it open how long a retry waits.
    of_waits: list[Open] = field(default_factory=list)
    #: What leaves it open how the task ends when no retry is left.
    of_end: list[Open] = field(default_factory=list)

    def where(self, line: int) -> str:
        """Return where a line of the task's function stands."""
        return f"{self.path}:{line}"


class Fleet:
    """What the modules around an app's tasks say: who asks for retries, and who sets how often."""

    def __init__(self, app: Celery) -> None:
        tasks = [*app.tasks.values()]
        runs = [x for task in tasks for x in (*wrapped(_run(task)), *(f for _, f in _hooks(task)))]
        functions = functions_around("celery", runs, [app, *tasks])
        self.askers = Askers(functions, _asks)
        self.guards = Askers(functions, _guards)
        heard = (x for signal in vars(signals).values() if type(signal) is Signal for x in _receivers(signal))
        every = dict.fromkeys((*(x for found in functions.values() for x in found), *runs, *heard))
        self.setters = [found for function in every for found in _sets(function)]
        self.signals = [
            Open(sign.where, f"a receiver of Celery's signals: {sign.why}")
            for function in dict.fromkeys(x for signal in _SIGNALS for x in _receivers(signal))
            if (sign := self.asks(function))
        ]

    def asks(self, function: FunctionType) -> Sign | None:
        """Return the first line by which a function may ask for a retry."""
        words = [*mentions(function.__code__)]
        return _asks(function, words) or self.askers.called_by(function, words)


def read_code(fleet: Fleet, task: Task) -> Code:
    """Read what a worker runs for a task."""
    found = Code(open=[*fleet.signals], of_retries=[*fleet.setters])
    run, *inner = wrapped(_run(task)) or (None,)
    if run is None:
        found.open.append(Open(task.name, "what it runs is no function of the project's, and is not read"))
    else:
        _read_run(fleet, task, run, found, is_plain=not inner)
    for function in inner:
        _read_around(fleet, function, found)
    for name, function in _hooks(task):
        if name in _AROUND:
            _read_around(fleet, function, found)
            if reason := _may_swallow(function):
                found.of_retries.append(reason)
        elif name in _AFTER:
            found.open += [Open(x.where, x.why) for x in [fleet.asks(function)] if x]
        else:
            where = place(function, function.__code__.co_firstlineno)
            found.of_retries.append(Open(where, f"its own {name} stands in for Celery's at each retry"))
    found.open += _in_its_request(fleet, task)
    found.of_retries += _computed(task)
    return found


def _run(task: Task) -> Any:
    run: Any = vars(task).get("_orig_run", task.run)
    return getattr(run, "__func__", run)


def _read_run(fleet: Fleet, task: Task, run: FunctionType, found: Code, *, is_plain: bool) -> None:
    words, node = [*mentions(run.__code__)], source_of(run)
    bound = inspect.ismethod(vars(task).get("_orig_run", task.run))
    holder = run.__code__.co_varnames[0] if bound and run.__code__.co_argcount else ""
    found.path = path_of(run)
    if node is not None:
        asks = asks_in(node, lambda x: _is_the_task(task, run, x, holder), holder)
        found.open += [Open(place(run, line), why) for line, why in asks.open]
        found.of_waits += [Open(place(run, line), why) for line, why in asks.waits]
        found.asks = asks.plain if is_plain else []
        words = _unexplained(words, asks if is_plain else Asks())
    elif bound:
        found.open.append(Open(place(run, run.__code__.co_firstlineno), "its source cannot be read"))
    why = "the task's code goes on after the last retry"
    found.of_end += [Open(place(run, ask.line), why) for ask in found.asks if ask.goes_on]
    _read_words(fleet, run, words, found)


def _unexplained(words: list[Mention], asks: Asks) -> list[Mention]:
    """Return the mentions that plain calls of `retry`, and what was said of other calls, do not explain."""
    lines = [ask.line for ask in asks.plain] + [line for line, _ in asks.open]
    left = []
    for x in words:
        if x.kind == "attribute" and x.word == "retry" and x.line in lines:
            lines.remove(x.line)
        elif not (x.word == "MaxRetriesExceededError" and any(ask.goes_on for ask in asks.plain)):
            left.append(x)
    return left


def _read_around(fleet: Fleet, function: FunctionType, found: Code) -> None:
    _read_words(fleet, function, [*mentions(function.__code__)], found)


def _read_words(fleet: Fleet, function: FunctionType, words: list[Mention], found: Code) -> None:
    for sign in (_asks(function, words), fleet.askers.called_by(function, words)):
        if sign:
            found.open.append(Open(sign.where, sign.why))
    for sign in (_guards(function, words), fleet.guards.called_by(function, words)):
        if sign:
            found.of_retries.append(Open(sign.where, sign.why))
    first = function.__code__.co_varnames[:1]
    found.of_retries += [x for x in _sets(function, first) if x not in found.of_retries]


def _is_the_task(task: Task, run: FunctionType, node: ast.expr, holder: str) -> bool:
    """Return whether an expression is the parameter that holds the task, or its own name in its module."""
    if not isinstance(node, ast.Name):
        return False
    if node.id == holder:
        return True
    found = resolve(run, node.id)
    if issubclass(type(found), Proxy):  # isinstance would ask somebody's lazy object what it is
        with suppress(LookupError, NameError, RuntimeError):
            found = found._get_current_object()  # type: ignore[attr-defined]
    # By name: a shared task is another object in each app.
    return issubclass(type(found), Task) and found.name == task.name  # type: ignore[attr-defined]


def _asks(function: FunctionType, words: list[Mention]) -> Sign | None:
    """Return the first line of a function that may ask Celery for a retry, or requeue its message."""
    reflects = any(x.word in _REFLECTION for x in words)
    for x in words:
        if x.word == "retry" and (x.kind == "attribute" or (x.kind == "text" and reflects)):
            return Sign(place(function, x.line), f"{x.of or 'something'}.retry is reached there")
        if x.word in ("Retry", "Reject") and x.kind != "text" and _is_celerys(function, words, x):
            return Sign(place(function, x.line), f"{x.word} is raised by hand there")
    return None


def _is_celerys(function: FunctionType, words: list[Mention], mention: Mention) -> bool:
    """Return whether an exception is Celery's, or may be: what is imported in a function is not resolved."""
    found = resolve(function, mention.word if mention.kind == "name" else "exceptions")
    if found is NOTHING:
        return any(x.word.split(".")[0] == "celery" for x in words)
    return any(found is known for known in (exceptions.Retry, exceptions.Reject, exceptions))


def _guards(function: FunctionType, words: list[Mention]) -> Sign | None:
    """Return the first line of a function that looks at how often a job was retried."""
    for x in words:
        if x.kind in ("attribute", "sets") and x.word == "retries":
            return Sign(place(function, x.line), "what it does depends on request.retries")
        if x.kind in ("attribute", "name") and x.word in _WORDS:
            return Sign(place(function, x.line), f"{x.word} is used there")
    return None


def _sets(function: FunctionType, only: tuple[str, ...] | None = None) -> Iterator[Open]:
    """Yield where a function sets what a task is retried by: of any, or of `only` these variables."""
    words = [*mentions(function.__code__)]
    reflects = any(x.word in _REFLECTION - {"getattr", "methodcaller", "attrgetter"} for x in words)
    first = function.__code__.co_varnames[:1]
    for x in words:
        named = x.kind == "sets" or (x.kind == "text" and reflects)
        if named and x.word in SETTINGS and ((x.of in first) if only else x.of not in first):
            yield Open(place(function, x.line), f"{x.word} is set there")


def _hooks(task: Task) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods of the user's classes that Celery calls for a task."""
    seen: set[str] = set()
    for cls in type(task).__mro__:
        if cls.__module__.split(".")[0] in ("celery", "ojs_bridge", "builtins"):
            continue
        for name, function in methods(cls, _AROUND | _AFTER | _RETRYING):
            if name not in seen:
                yield name, function
            if not function.__code__.co_names.count("super"):
                seen.add(name)


def _may_swallow(function: FunctionType) -> Open | None:
    """Return where a method that stands around each run may swallow a retry or run the task again."""
    node = source_of(function)
    if node is None:
        return Open(place(function, function.__code__.co_firstlineno), "its source cannot be read")
    kinds = (ast.Try, ast.With, ast.For, ast.While)
    for x in ast.walk(node):
        if isinstance(x, kinds):
            return Open(place(function, x.lineno), f"{node.name} may swallow a retry, or run the task again")
    return None


def _in_its_request(fleet: Fleet, task: Task) -> Iterator[Open]:
    """Yield what a task's own `Request` class asks for in the worker's main process."""
    try:
        found = symbol_by_name(task.Request)  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - somebody's module: whatever its import raises
        yield Open(task.name, f"Request={task.Request!r} cannot be imported: {type(error).__name__}")
        return
    for cls in found.__mro__:
        for _, function in methods(cls):
            if sign := fleet.asks(function):
                yield Open(sign.where, sign.why)


def _computed(task: Task) -> Iterator[Open]:
    """Yield the options that are code, so that a worker may see other values."""
    for cls in type(task).__mro__:
        for _, function in methods(cls, SETTINGS | {"__getattribute__", "__getattr__"}):
            where = place(function, function.__code__.co_firstlineno)
            yield Open(where, f"{function.__name__} is code, which a worker asks when it runs")


def _receivers(signal: Any) -> Iterator[FunctionType]:
    """Yield the user's functions that hear a signal of Celery's, which keeps them weakly."""
    for _, kept in signal.receivers or ():
        yield from wrapped(kept() if isinstance(kept, ReferenceType) else kept)
