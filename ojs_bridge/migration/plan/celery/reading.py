"""Reads the code of Celery tasks: where they ask for retries, and the lines that leave retries open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ReferenceType

from celery import Celery, Task, exceptions, signals
from celery.local import PromiseProxy, Proxy
from celery.utils.dispatch import Signal

from ....celery import compat
from .. import Open
from ..code import (
    NOTHING,
    Askers,
    Calls,
    Mention,
    functions_around,
    may_be,
    mentions,
    methods,
    place,
    resolve,
    unwatched,
    wrapped,
)
from .flow import Ask, Way, only_calls, way_of
from .values import SETTINGS

#: The methods of a task that a worker calls before or after a run.
_BESIDE = frozenset(("before_start", "on_success", "on_failure", "on_retry", "after_return"))
#: Methods in place of Celery's own at a run or retry, or in place of an option.
_INSTEAD = SETTINGS | frozenset(
    (
        *("__call__", "retry", "signature_from_request", "subtask_from_request", "apply_async"),
        *("__getattribute__", "__getattr__"),
    )
)
#: Methods of a task that have run when its fleet is read.
_BEFORE = frozenset(("__init__", "__new__", "__init_subclass__", "bind", "on_bound"))
#: Functions that set, or only read, an attribute by its name.
_SETTING = frozenset(("setattr", "delattr", "vars", "__dict__"))
_REFLECTION = _SETTING | frozenset(("getattr", "methodcaller", "attrgetter"))


@dataclass(slots=True)
class Code:
    """A task's calls of `self.retry`, and the lines that leave retries open."""

    #: Lines that may ask for a retry.
    open: list[Open] = field(default_factory=list)
    #: Lines that may change the number or the waits of retries.
    of_retries: list[Open] = field(default_factory=list)
    #: The first run.
    way: Way = field(default_factory=Way)

    @property
    def asks(self) -> list[Ask]:
        """The calls of `self.retry` in the first run."""
        return [*self.way.asks.values()]


class Fleet:
    """The modules around an app's tasks, and their functions that ask for retries or set their options."""

    def __init__(self, app: Celery) -> None:
        self.tasks = [*app.tasks.values()]
        runs = [x for task in self.tasks for x in (*wrapped(_run(task)), *(f for _, f in _hooks(task)))]
        heard = [*_heard(app)]
        calls = Calls(functions_around("celery", [*runs, *heard], [app, *self.tasks]))
        self._owners = calls.functions
        self._classes = {cls for task in self.tasks for cls in type(task).__mro__}
        self.askers = Askers(calls, self._asks, "may ask for a retry")
        self.guards = Askers(calls, _guards, "may depend on request.retries")
        self._setters = Askers(calls, self._sets_any, "may set options of retries")
        self.signals = [found for function in heard for found in self.askers.signs(function)]
        self.ways = {task.name: _way(task, 0) for task in self.tasks}
        #: The lines that set options of any task, and those that set options of one task, by its name.
        self.setters = [found for function in heard for found in self._setters.signs(function)]
        for task in self.tasks:
            read = self.ways[task.name].read
            for function in (*wrapped(_run(task)), *read, *(f for _, f in _hooks(task))):
                self.setters += self._setters.signs(function, read.get(function, ()))
        self.setters = [*dict.fromkeys(self.setters)]
        every = dict.fromkeys((*self._owners, *runs, *heard))
        self._named = [x for function in every for x in self._sets(function, self._owners.get(function))]

    def ways_of(self, task: Task) -> Callable[[int], Way]:
        """Return a function that follows a task through its function in the run after so many retries."""
        first = self.ways[task.name]
        counts = any(x.word == "retries" for function in first.read for x in mentions(function.__code__))
        return cache(partial(_way, task)) if counts else lambda _retries: first

    def setters_of(self, task: Task) -> Iterator[Open]:
        """Yield the lines that set an option of a task: of any task, in its own methods, and by its name."""
        yield from self.setters
        for cls in type(task).__mro__:
            for name, function in methods(cls):
                if name not in _BEFORE:
                    yield from (line for line, of in self._sets(function, cls) if of is cls)
        yield from (line for line, of in self._named if of is task)

    def _asks(self, function: FunctionType, words: Collection[Mention]) -> Open | None:
        """Return the first line of a function that may ask Celery for a retry, or requeue its message."""
        reflects = any(x.word in _REFLECTION for x in words)
        known = (exceptions.Retry, exceptions.Reject, exceptions)
        for x in words:
            by_name = x.kind == "text" and reflects
            if x.word == "retry" and (
                by_name or (x.kind == "attribute" and self._may_be_a_task(function, x.of))
            ):
                return Open(place(function, x.line), f"{x.of or 'something'}.retry is used in no plain way")
            if x.word in ("Retry", "Reject") and x.kind in ("name", "attribute"):
                name = x.word if x.kind == "name" else "exceptions"
                if may_be(function, words, name, "celery", known):
                    return Open(place(function, x.line), f"{x.word} is raised by hand")
        return None

    def _sets_any(self, function: FunctionType, words: Collection[Mention]) -> Open | None:
        """Return the first line of a function that sets an option of a task that is not known."""
        lines = {place(function, x.line) for x in words if x.kind in ("sets", "text")}
        found = self._sets(function, self._owners.get(function))
        return next((line for line, of in found if of is None and line.where in lines), None)

    def _sets(self, function: FunctionType, owner: type | None) -> Iterator[tuple[Open, object]]:
        """Yield the lines that set an option of retries, each with its task, or the class of it, if known."""
        words = mentions(function.__code__)
        reflects = any(x.word in _SETTING for x in words)
        own = function.__code__.co_varnames
        for x in (x for x in words if x.word in SETTINGS):
            line = Open(place(function, x.line), f"{x.word} is set")
            if x.kind == "text" and reflects:
                yield line, None
            elif x.kind == "sets" and owner is not None and x.of in own[:1]:
                yield line, owner
            elif x.kind == "sets" and self._may_be_a_task(function, x.of):
                found = NOTHING if x.of in own else resolve(function, x.of)
                is_lazy = issubclass(type(found), PromiseProxy)
                task = compat.get_current_object(found)() if is_lazy else found
                yield line, task if isinstance(task, Task) else None

    def _may_be_a_task(self, function: FunctionType, name: str) -> bool:
        """Return whether a variable of a function may be a task."""
        own, owner = function.__code__.co_varnames, self._owners.get(function)
        if owner is not None and name in own[:1]:
            return owner in self._classes
        if name in ("", *own):
            said = function.__annotations__.get(name, "")
            kind = resolve(function, said) if isinstance(said, str) else said
            is_class = issubclass(type(kind), type)
            return not is_class or issubclass(kind, Task) or kind in self._classes  # type: ignore[arg-type]
        found = resolve(function, name)
        cls: Any = found if issubclass(type(found), type) else type(found)
        return found is NOTHING or issubclass(cls, (Task, Proxy))


def _heard(app: Celery) -> Iterator[FunctionType]:
    """Yield the user's functions that a worker calls beside its tasks: receivers of signals, and steps."""
    for signal in (*vars(signals).values(), *vars(app).values()):
        if type(signal) is Signal:
            yield from _receivers(signal)
    for step in (step for steps in app.steps.values() for step in steps if issubclass(type(step), type)):
        yield from (function for cls in step.__mro__ for _, function in methods(cls))


def read_code(fleet: Fleet, task: Task) -> Code:
    """Read the functions that a worker runs for a task."""
    found = Code(open=[*fleet.signals], way=fleet.ways[task.name])
    functions = wrapped(_run(task))
    if not functions:
        found.open.append(Open(task.name, "what it runs is no function of the project, and is not read"))
    found.open[:0] = found.way.open
    for function in dict.fromkeys((*found.way.read, *functions)):
        understood = found.way.read.get(function)
        found.open += fleet.askers.signs(function, understood or ())
        guards = fleet.guards.signs(function, understood or ())
        # Of a function that was followed, the questions are known.
        words = mentions(function.__code__)
        is_own = [place(function, x.line) for x in words if x.word == "retries" and x.kind != "text"]
        found.of_retries += guards if understood is None else [x for x in guards if x.where not in is_own]
    for name, function in _hooks(task):
        found.open += fleet.askers.signs(function)
        if name in _INSTEAD and not (name == "__call__" and only_calls(task, function)):
            found.of_retries.append(Open(place(function), f"its own {name} may change its retries"))
    found.of_retries += fleet.setters_of(task)
    request = task.Request if isinstance(task.Request, str) else task.Request.__module__
    if request.split(".")[0] not in ("celery", "ojs_bridge"):
        found.open.append(Open(task.name, f"its own Request, of {request}, is not read"))
    return found


def _way(task: Task, retries: int) -> Way:
    run, *_ = wrapped(_run(task)) or (None,)
    return (
        Way() if run is None else way_of(task, run, bound=type(_bound(task)) is MethodType, retries=retries)
    )


def _run(task: Task) -> Any:
    run = _bound(task)
    return run.__func__ if type(run) is MethodType else run


def _bound(task: Task) -> Any:
    """Return what a task runs: a method, if it is given its task."""
    return unwatched(vars(task).get(compat.orig_run.name, task.run))


def _guards(function: FunctionType, words: Collection[Mention]) -> Open | None:
    """Return the first line of a function that reads a job's number of retries."""
    has_request = any("request" in (x.word, x.of) for x in words)
    for x in words:
        if x.word == "retries" and x.kind != "name" and has_request:
            return Open(place(function, x.line), "what it does depends on request.retries")
    return None


def _hooks(task: Task) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods of the user's classes that can change a task's retries."""
    for cls in type(task).__mro__:
        yield from methods(cls, _BESIDE | _INSTEAD)


def _receivers(signal: Any) -> Iterator[FunctionType]:
    """Yield the user's receivers of a signal; Celery keeps weak references to them."""
    for _, kept in signal.receivers or ():
        yield from wrapped(kept() if isinstance(kept, ReferenceType) else kept)
