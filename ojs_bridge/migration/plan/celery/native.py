"""A Celery task under Celery alone, as its options and its code say, and the lines that leave it open."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import getfullargspec
from types import FunctionType, MethodType
from typing import Any
from weakref import ReferenceType

from celery import Celery, Task, exceptions, signals
from celery.local import PromiseProxy, Proxy
from celery.utils.dispatch import Signal
from celery.worker.request import Request

from ....celery import compat
from ....celery.native import automatic
from .. import ENDLESS, MOST, NOT_KNOWN, NativeRetries, Open, Runs, WaitRange, celery_wait, once
from ..code import (
    NOTHING,
    Askers,
    Calls,
    Mention,
    functions_around,
    is_the_users,
    lines_with,
    may_be,
    mentions,
    methods,
    place,
    resolve,
    spelled,
    unwatched,
    wrapped,
)
from .flow import UNPLAIN, Ask, Way, only_calls, way_of
from .values import SETTINGS, Overriding

#: The methods of a task that a worker calls before or after a run.
_BESIDE = frozenset(("before_start", "on_success", "on_failure", "on_retry", "after_return"))
#: Methods in place of Celery's own at a run or retry, or in place of an option.
_INSTEAD = SETTINGS | frozenset(
    (
        *("__call__", "retry", "signature_from_request", "subtask_from_request", "apply_async"),
        *("__getattribute__", "__getattr__"),
    )
)
#: Of these, the methods that may hand a retry on to Celery's, and the arguments that they must not change.
_HANDING = frozenset(("retry", "signature_from_request", "subtask_from_request", "apply_async"))
_KEPT = frozenset(("countdown", "eta", "retries", "max_retries", "throw", "expires", "exc"))
#: Methods of a task that have run when its fleet is read.
_BEFORE = frozenset(("__init__", "__new__", "__init_subclass__", "bind", "on_bound"))
#: Functions that set, or only read, an attribute by its name.
_SETTING = frozenset(("setattr", "delattr", "vars", "__dict__"))
_REFLECTION = _SETTING | frozenset(("getattr", "methodcaller", "attrgetter"))


class Fleet:
    """The modules around an app's tasks, and their functions that ask for retries or set their options."""

    def __init__(self, app: Celery) -> None:
        self.tasks = [*app.tasks.values()]
        runs = [x for task in self.tasks for x in functions_of(task)]
        heard = [*_heard(app)]
        calls = Calls(functions_around("celery", [*runs, *heard], [app, *self.tasks]))
        self._owners = calls.functions
        self._classes = {cls for task in self.tasks for cls in type(task).__mro__}
        self.askers = Askers(calls, self._asks, "may ask for a retry")
        self.guards = Askers(calls, _guards, "may depend on request.retries")
        self._setters = Askers(calls, self._sets_any, "may set options of retries")
        self.signals = [line for function in heard for line in self.askers.signs(function)]
        self.ways = {task.name: _way(task, 0) for task in self.tasks}
        #: The lines that set options of any task, and those that set options of one task, by its name.
        self.setters = [line for function in heard for line in self._setters.signs(function)]
        for task in self.tasks:
            read = self.ways[task.name].read
            for function in (*functions_of(task), *read):
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
                return Open(place(function, x.line), f"{spelled(function, x.word, x.line)} {UNPLAIN}")
            if x.word in ("Retry", "Reject") and x.kind in ("name", "attribute"):
                name = x.word if x.kind == "name" else "exceptions"
                lines = lines_with(function, x.word, (None, False) if x.word == "Reject" else ())
                if (lines is None or x.line in lines) and may_be(function, words, name, "celery", known):
                    return Open(place(function, x.line), f"{x.word} is raised by hand")
        return None

    def _sets_any(self, function: FunctionType, words: Collection[Mention]) -> Open | None:
        """Return the first line of a function that sets an option of a task that is not known."""
        lines = {place(function, x.line) for x in words if x.kind in ("sets", "text")}
        sets = self._sets(function, self._owners.get(function))
        return next((line for line, of in sets if of is None and line.where in lines), None)

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
                value = NOTHING if x.of in own else resolve(function, x.of)
                is_lazy = issubclass(type(value), PromiseProxy)
                task = compat.get_current_object(value)() if is_lazy else value
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
        value = resolve(function, name)
        cls: Any = value if issubclass(type(value), type) else type(value)
        return value is NOTHING or issubclass(cls, (Task, Proxy))


def _heard(app: Celery) -> Iterator[FunctionType]:
    """Yield the user's functions that a worker calls beside its tasks: receivers of signals, and steps."""
    for signal in (*vars(signals).values(), *vars(app).values()):
        if type(signal) is Signal:
            for _, kept in compat.receivers(signal) or ():  # Celery keeps weak references to them
                yield from wrapped(kept() if isinstance(kept, ReferenceType) else kept)
    for step in (step for steps in app.steps.values() for step in steps if issubclass(type(step), type)):
        yield from (function for cls in step.__mro__ for _, function in methods(cls))


def _open_lines(fleet: Fleet, task: Task) -> tuple[list[Open], list[Open]]:
    """Return the lines that may ask for a retry of a task, and those that may change its retries."""
    way, functions = fleet.ways[task.name], wrapped(_run(task))
    opened, of_retries = [*way.open, *fleet.signals], list[Open]()
    if not functions:
        opened.append(Open(task.name, "what it runs is no function of the project, and is not read"))
    for function in dict.fromkeys((*way.read, *functions)):
        understood = way.read.get(function)
        opened += fleet.askers.signs(function, understood or ())
        guards = fleet.guards.signs(function, understood or ())
        # Of a function that was followed, the questions are known.
        words = mentions(function.__code__)
        is_own = [place(function, x.line) for x in words if x.word == "retries" and x.kind != "text"]
        of_retries += guards if understood is None else [x for x in guards if x.where not in is_own]
    for name, function in _hooks(task):
        hands_on = name in _INSTEAD and _hands_on(task, name, function)
        own = {(x.word, x.line) for x in mentions(function.__code__) if hands_on and x.word == name}
        opened += fleet.askers.signs(function, own)
        if name in _INSTEAD and not hands_on:
            of_retries.append(Open(place(function), f"its own {name} may change its retries"))
    of_retries += fleet.setters_of(task)
    opened += _in_request(fleet, task)
    return opened, of_retries


def _hands_on(task: Task, name: str, function: FunctionType) -> bool:
    """Return whether a method in place of Celery's own leaves a task's runs and waits as they are."""
    if name == "__call__":
        return only_calls(task, function)
    owner = next(cls for cls in type(task).__mro__ if function in (x for _, x in methods(cls, {name})))
    return name in _HANDING and Overriding(function, owner, getattr(Task, name), _KEPT, "retries").hands_on()


def _in_request(fleet: Fleet, task: Task) -> Iterator[Open]:
    """Yield the lines of a task's own `Request` that may change what becomes of its messages."""
    request: Any = task.Request
    if isinstance(request, str):
        if not is_the_users(request.partition(":")[0]):
            return
        module, _, name = request.rpartition(":" if ":" in request else ".")
        request = vars(sys.modules.get(module, object)).get(name, request)
    if not (isinstance(request, type) and issubclass(request, Request)):
        yield Open(task.name, f"its own Request, {request}, is not read")
        return
    for cls in request.__mro__:
        for name, function in methods(cls):
            yield from fleet.askers.signs(function)
            original = getattr(Request, name, None)
            kept = getfullargspec(original).args[1:] if type(original) is FunctionType else ()
            if original is not None and not Overriding(function, cls, original, kept).hands_on():
                yield Open(place(function), f"the {name} of its own Request may change its retries")


def _way(task: Task, retries: int) -> Way:
    run, *_ = wrapped(_run(task)) or (None,)
    if run is None:
        return Way()
    return way_of(task, run, bound=type(_bound(task)) is MethodType, retries=retries)


def _run(task: Task) -> Any:
    """Return the function that a task runs."""
    run = _bound(task)
    return run.__func__ if type(run) is MethodType else run


def functions_of(task: Task) -> list[FunctionType]:
    """Return the functions of a task that a worker runs: its own, and its hooks."""
    return [*wrapped(_run(task)), *(function for _, function in _hooks(task))]


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


#: A task that counts its retries is followed through so many runs.
_RUNS = 200


@dataclass(frozen=True, slots=True)
class Reading:
    """A task, and Celery's retries of it."""

    task: Task
    native: NativeRetries
    #: The wait before retry n; None where nothing retries, or where the code says the waits when it runs.
    wait: Callable[[int], WaitRange] | None = None
    #: The lines that leave the retries open.
    open: tuple[Open, ...] = ()
    #: Whether anything asks for retries.
    is_retried: bool = False


def read(fleet: Fleet, task: Task) -> Reading:
    """Read a task's options and its code; nothing is run."""
    asks = [*fleet.ways[task.name].asks.values()]
    runs = [*_limits(task, asks)]
    opened, of_retries = _open_lines(fleet, task)
    opened += of_retries if runs else ()
    if autoretries(task) and retry_kwargs(task).get("eta"):
        opened.append(
            Open(task.name, "retry_kwargs has an eta: the wait depends on when a retry is asked for")
        )
    if len({*runs}) > 1:
        opened.append(Open(asks[-1].where, "its limit is not that of other retries"))
    if not opened and runs:
        ways = fleet.ways_of(task)
        limit, opened = _limit(task, runs[0], ways)
        if not opened:
            return _retried_task(task, asks, limit, ways)
    if opened:
        return Reading(task, NativeRetries.unknown(), open=once(opened))
    return Reading(task, _native(task, (), 1, _constant(task, 0)))


def _limits(task: Task, asks: Iterable[Ask]) -> Iterator[Runs]:
    """Yield the number of runs by `autoretry_for`, and by each call of `self.retry`."""
    if autoretries(task):
        yield _runs(task, retry_kwargs(task).get("max_retries"))
    for ask in asks:
        yield _runs(task, ask.max_retries)


def _limit(task: Task, runs: Runs, way: Callable[[int], Way]) -> tuple[Runs, list[Open]]:
    """Return the number of a task's runs, and the lines that leave it open: its code may count retries."""
    counted = [*way(0).answers]
    if not counted or runs == 1:
        return runs, []
    depends = Open(counted[0][0], "what it does depends on request.retries")
    if not isinstance(runs, int) or runs > _RUNS:
        return runs, [depends]
    ways = [way(n) for n in range(runs - 1)]
    if opened := [line for one in ways for line in one.open]:
        return runs, opened
    if all(one.answers == ways[0].answers for one in ways):
        return runs, []
    asking = [bool(one.asks) for one in ways]
    last = asking.index(False) if False in asking else len(asking)
    same = {_runs(task, ask.max_retries) for one in ways for ask in one.asks.values()} <= {runs}
    is_known = same and not any(asking[last:]) and not autoretries(task)
    return last + 1, [] if is_known else [depends]


def _retried_task(task: Task, asks: Sequence[Ask], runs: Runs, way: Callable[[int], Way]) -> Reading:
    """Return the reading of a task that asks for retries until it has run `runs` times."""
    # The waits after these are no others.
    longest = MOST if way(0) is way(1) or not isinstance(runs, int) else _RUNS
    listed = min(runs - 1, longest) if isinstance(runs, int) else longest
    if all(len(_waits_at(task, way, n)) == 1 for n in range(1, listed + 1)):

        def wait(n: int) -> WaitRange:
            (only,) = _waits_at(task, way, n)
            return only

        return Reading(task, _native(task, asks, runs, wait), wait, is_retried=True)
    native = _native(task, asks, runs, _constant(task, 0))
    return Reading(task, replace(native, waits=NOT_KNOWN, span=NOT_KNOWN), is_retried=True)


def _waits_at(task: Task, way: Callable[[int], Way], n: int) -> set[WaitRange]:
    """Return the waits that retry n may have; none if the code computes one in a way that is not read."""
    waits = set()
    if autoretries(task):
        waits.add((_backoff(task) or _constant(task, retry_kwargs(task).get("countdown")))(n))
    asks = [*way(n - 1).asks.values()]
    is_known = all(ask.countdown is None or type(ask.countdown) in (int, float) for ask in asks)
    return waits | {_constant(task, ask.countdown)(n) for ask in asks} if is_known else set()


def autoretries(task: Task) -> bool:
    """Return whether Celery has put its automatic retries around a task."""
    return bool(getattr(task, "autoretry_for", ())) and compat.orig_run.name in vars(task)


def retry_kwargs(task: Task) -> dict[str, Any]:
    """Return the arguments that `autoretry_for` gives to `retry`."""
    return dict(automatic(task, "retry_kwargs", default=None) or {})


def _runs(task: Task, limit: float | None) -> Runs:
    """Return the number of runs. Celery compares numbers, so that a limit below 0 is 0, and 2.5 is 2."""
    limit = task.max_retries if limit is None else limit
    return ENDLESS if limit is None or limit == math.inf else max(math.floor(limit), 0) + 1


def _constant(task: Task, countdown: float | None) -> Callable[[int], WaitRange]:
    seconds = task.default_retry_delay if countdown is None else countdown
    wait = WaitRange.of(max(float(seconds or 0), 0.0))
    return lambda _: wait


def _backoff(task: Task) -> Callable[[int], WaitRange] | None:
    """Return the waits of `retry_backoff`, if it is set."""
    factor = float(automatic(task, "retry_backoff", default=False))
    if not factor:
        return None
    longest = int(automatic(task, "retry_backoff_max", default=600))
    jitter = bool(automatic(task, "retry_jitter", default=True))
    return lambda n: celery_wait(n, int(max(1.0, factor)), longest, jitter=jitter)


def _native(task: Task, asks: Iterable[Ask], runs: Runs, wait: Callable[[int], WaitRange]) -> NativeRetries:
    once = runs == 1
    return NativeRetries.computed(
        runs,
        wait,
        retries="nothing" if once else "; ".join(_retried(task, asks)),
        final="every error" if once else _final(task),
        at_the_end=", ".join(_end(task, asks)),
    )


def _retried(task: Task, asks: Iterable[Ask]) -> Iterator[str]:
    if autoretries(task):
        excluded = _names(getattr(task, "dont_autoretry_for", ()))
        but = f", but not {excluded} (dont_autoretry_for)" if excluded else ""
        yield f"{_names(task.autoretry_for)} (autoretry_for){but}"
    if places := [ask.where for ask in asks]:
        yield f"the errors for which its code calls self.retry, in {', '.join(places)}"


def _final(task: Task) -> str:
    if not autoretries(task):
        return "every error that reaches Celery without self.retry"
    excluded = _names(getattr(task, "dont_autoretry_for", ()))
    rest = () if Exception in tuple(task.autoretry_for) else ("every other error",)
    return ", ".join([*filter(None, [excluded]), *rest]) or "nothing"


def _end(task: Task, asks: Iterable[Ask]) -> Iterator[str]:
    error = " with MaxRetriesExceededError" if any(not ask.has_exc for ask in asks) else ""
    if task.ignore_result and not task.store_errors_even_if_ignored:
        yield "its result is ignored"
    elif not task.app.conf.result_backend:
        yield "no result backend keeps its result"
    else:
        yield f"its result says FAILURE{error}"
    if any(ask.goes_on for ask in asks):
        yield "unless its code catches the error of its last retry"
    yield "an errback of its signature is called"
    # Celery 5.7 has two options in the place of one.
    newer = getattr(task, "acks_on_failure", None)
    if task.acks_late and not (task.acks_on_failure_or_timeout if newer is None else newer):
        yield "its message is rejected, so that only a queue's own dead letter exchange keeps it"
    else:
        yield "its message is gone"


def _names(classes: Iterable[type]) -> str:
    return ", ".join(cls.__qualname__ for cls in classes)
