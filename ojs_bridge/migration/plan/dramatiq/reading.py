"""Reads the retries of an actor: its options, its broker's options, and the lines that leave them open."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from dramatiq import Actor, errors
from dramatiq.broker import Broker
from dramatiq.middleware import Middleware, Retries

from ....dramatiq import OJSRetries
from ....dramatiq.compat import settings_of
from ....dramatiq.translate import names_exceptions
from ....engine.runs import TaskPolicy
from .. import ENDLESS, NOT_KNOWN, Open, Runs
from ..code import Askers, Mention, functions_around, may_be, mentions, methods, place, wrapped
from ..waits import Wait, dramatiq_wait

#: The options of a message's retries, and the methods that change a message's options.
_OPTIONS = frozenset(
    ("max_retries", "min_backoff", "max_backoff", "retry_when", "throws", "retries", "on_retry_exhausted")
)
_CHANGES = _OPTIONS | frozenset(("setdefault", "update", "pop", "popitem", "clear", "__setitem__"))
_SENDS = frozenset(("enqueue", "send", "send_with_options", "fail"))
#: The hooks of a middleware that are called once for a process, not for a message.
_OF_A_PROCESS = ("process_boot", "worker_boot", "worker_shutdown", "declare", "process_stopped", "fork")


@dataclass(frozen=True, slots=True)
class Settings:
    """An actor's options, laid over those of its broker's middleware; times are in milliseconds."""

    actor: Actor[..., Any]
    #: The middleware that retries; without it nothing is retried.
    retries: Retries | None
    max_retries: Any
    min_backoff: Any
    max_backoff: Any
    retry_when: Any
    throws: Any

    @classmethod
    def of(cls, actor: Actor[..., Any], broker: Broker) -> Settings:
        """Return the settings of an actor of a broker."""
        retries = retries_of(broker)
        over = settings_of(retries or Retries())
        own = {name: actor.options[name] for name in over if name in actor.options}
        return cls(actor, retries, throws=actor.options.get("throws"), **(over | own))

    @property
    def broken(self) -> str | None:
        """The first option for which Dramatiq itself raises an error when a job fails, and loses the job."""
        if not names_exceptions(self.throws):
            return "throws"
        if self.max_retries is not None and not _is_number(self.max_retries):
            return "max_retries"
        if self.runs == 1:
            return None
        if not (_is_number(self.min_backoff) and math.isfinite(self.min_backoff)):
            return "min_backoff"
        return None if _is_number(self.max_backoff) else "max_backoff"

    @property
    def runs(self) -> Runs:
        """The largest number of a job's runs; `retry_when` leaves it open."""
        if self.retries is None:
            return 1
        if self.retry_when is not None:
            return NOT_KNOWN
        if self.max_retries is None or not self.max_retries < math.inf:
            return ENDLESS
        return max(math.ceil(float(self.max_retries)), 0) + 1

    @property
    def is_asked(self) -> bool:
        """Whether the bridge asks `retry_when`: it asks that of an actor, not that of the middleware."""
        return "retry_when" in self.actor.options

    def wait(self, n: int) -> Wait:
        """Return the wait before retry n."""
        return dramatiq_wait(n, self.min_backoff, self.max_backoff)

    @property
    def thrown(self) -> tuple[type[BaseException], ...]:
        """The exception classes that are not retried."""
        classes = self.throws if isinstance(self.throws, tuple) else (self.throws,)
        return classes if self.throws else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def retries_of(broker: Broker) -> Retries | None:
    """Return the middleware that retries: the stock one, else the bridge's, which has its settings."""
    found = [m for m in broker.middleware if isinstance(m, Retries)]
    return next((m for m in found if not isinstance(m, OJSRetries)), next(iter(found), None))


def task_policy(broker: Broker, actor: Actor[..., Any]) -> TaskPolicy | None:
    """Return the policy of an actor under the bridge, else None."""
    own = next((m for m in broker.middleware if isinstance(m, OJSRetries)), None)
    return own.actors.tasks.get(actor.actor_name) if own else None


def askers_of(broker: Broker) -> Askers:
    """Return the functions around a broker's actors that raise `Retry`, or read a message's options."""
    actors = [*broker.actors.values()]
    runs = [x for actor in actors for x in wrapped(actor.fn)]
    return Askers(functions_around("dramatiq", runs, [broker, *actors]), _asks)


def open_lines(askers: Askers, broker: Broker, settings: Settings) -> Iterator[Open]:
    """Yield the lines and options that leave the number or the waits of an actor's retries open."""
    for middleware in broker.middleware:
        if not isinstance(middleware, Retries):
            yield from _in_middleware(middleware)
        elif type(middleware) not in (Retries, OJSRetries):
            name = f"{type(middleware).__module__}.{type(middleware).__qualname__}"
            yield Open(name, "it is another Retries: no worker starts with both it and the bridge")
    if settings.retry_when is not None and not settings.is_asked:
        why = "the broker's retry_when decides about retries, and the bridge asks only that of an actor"
        yield Open(place_of(settings.retry_when), why)
    run = settings.actor.fn
    functions = wrapped(run) or [x for cls in type(run).__mro__ for _, x in methods(cls)]
    if not functions:
        why = "what it runs is no function of the project, and is not read"
        yield Open(settings.actor.actor_name, why)
    for function in functions:
        yield from askers.signs(function)


def place_of(function: Any) -> str:
    """Return where a function is defined, as `path:line`."""
    return next(map(place, wrapped(function)), repr(function))


def _asks(function: FunctionType, words: list[Mention]) -> Open | None:
    """Return the first line of a function that may itself decide about a message's retry."""
    for x in words:
        if x.kind == "text":
            continue
        if x.word == "Retry" and may_be(function, words, x.word, "dramatiq", (errors.Retry,)):
            return Open(place(function, x.line), "it raises Retry, which has a delay of its own")
        if x.word == "CurrentMessage" and any(y.word == "options" for y in words):
            return Open(place(function, x.line), "it reads the options of its own message")
    return None


def _in_middleware(middleware: Middleware) -> Iterator[Open]:
    """Yield the lines by which the user's middleware may change, fail or send messages."""
    for cls in type(middleware).__mro__:
        for name, function in methods(cls):
            is_hook = name.startswith(("before_", "after_")) and not name.endswith(_OF_A_PROCESS)
            if is_hook and (line := _changes(function)):
                why = f"{cls.__name__}.{name} may send or fail a message, or write its options"
                yield Open(place(function, line), why)


def _changes(function: FunctionType) -> int:
    """Return the line of a hook that sends or fails a message, or may write an option of retries; else 0."""
    words = [*mentions(function.__code__)]
    has_options = any(x.word == "options" for x in words)
    for x in words:
        if x.word in _SENDS or (x.kind == "sets" and x.word == "options"):
            return x.line
        if has_options and x.kind != "name" and (x.word in _CHANGES or (x.kind, x.word) == ("key", "")):
            return x.line
    return 0
