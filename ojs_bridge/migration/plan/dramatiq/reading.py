"""What leaves it open how often an actor is retried: its code, its fleet's, and its broker's middleware."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from dramatiq import Actor, errors
from dramatiq.broker import Broker
from dramatiq.middleware import Middleware, Retries

from ....dramatiq import OJSRetries
from ..code import (
    NOTHING,
    Askers,
    Mention,
    Sign,
    functions_around,
    mentions,
    methods,
    place,
    resolve,
    source_of,
    wrapped,
)
from ..planned import Open
from .settings import Settings

#: The options of a message by which it is retried.
_OPTIONS = frozenset(
    ("max_retries", "min_backoff", "max_backoff", "retry_when", "throws", "retries", "on_retry_exhausted")
)
_CHANGES = frozenset(("setdefault", "update", "pop", "popitem", "clear", "__setitem__"))
_SENDS = frozenset(("enqueue", "send", "send_with_options"))
#: What a middleware does once for a process, not for a message.
_OF_A_PROCESS = ("process_boot", "worker_boot", "worker_shutdown", "declare", "process_stopped", "fork")


class Fleet:
    """The functions of a fleet's modules that ask for retries by Dramatiq's `Retry`, or change a message."""

    def __init__(self, broker: Broker) -> None:
        actors = [*broker.actors.values()]
        runs = [x for actor in actors for x in wrapped(actor.fn)]
        self.askers = Askers(functions_around("dramatiq", runs, [broker, *actors]), _asks)


def open_by_code(fleet: Fleet, broker: Broker, actor: Actor[..., Any]) -> Iterator[Open]:
    """Yield the lines of an actor's code that ask for a retry, or change its message's options."""
    functions = wrapped(actor.fn) or [x for cls in type(actor.fn).__mro__ for _, x in methods(cls)]
    if not functions:
        yield Open(actor.actor_name, "what it runs is no function of the project's, and is not read")
    for function in functions:
        words = [*mentions(function.__code__)]
        for sign in (_asks(function, words), fleet.askers.called_by(function, words)):
            if sign:
                yield Open(sign.where, sign.why)
    for middleware in broker.middleware:
        yield from _open_by_middleware(middleware)


def open_by_settings(settings: Settings, broker: Broker) -> Iterator[Open]:
    """Yield what the broker's own `Retries` leaves open: a class of the user's, or a `retry_when`."""
    for middleware in broker.middleware:
        if isinstance(middleware, Retries) and type(middleware) not in (Retries, OJSRetries):
            name = f"{type(middleware).__module__}.{type(middleware).__qualname__}"
            yield Open(name, "it is a Retries of its own, which no worker starts together with the bridge")
    if settings.retry_when is not None and not settings.is_asked:
        why = "the broker's retry_when says whether there is a retry, and the bridge asks an actor's only"
        yield Open(where_of(settings.retry_when), why)


def where_of(function: Any) -> str:
    """Return where a function is defined, as `path:line`."""
    for found in wrapped(function):
        return place(found, found.__code__.co_firstlineno)
    return repr(function)


def _asks(function: FunctionType, words: list[Mention]) -> Sign | None:
    """Return the first line by which a function may say itself whether, or when, a message is retried."""
    for x in words:
        if x.word == "Retry" and x.kind != "text" and _is_dramatiqs(function, words, x):
            return Sign(place(function, x.line), "it raises Retry, which says its own delay")
        if x.word == "CurrentMessage" and x.kind != "text" and any(y.word == "options" for y in words):
            return Sign(place(function, x.line), "it looks at the options of its own message")
    return None


def _is_dramatiqs(function: FunctionType, words: list[Mention], mention: Mention) -> bool:
    """Return whether an exception is Dramatiq's, or may be: an import in a function is not resolved."""
    found = resolve(function, mention.word)
    if found is NOTHING:
        return any(x.word.split(".")[0] == "dramatiq" for x in words)
    return found is errors.Retry


def _open_by_middleware(middleware: Middleware) -> Iterator[Open]:
    """Yield where a middleware of the user's may write the options of messages, or send them again."""
    if isinstance(middleware, Retries):
        return
    for cls in type(middleware).__mro__:
        for name, function in methods(cls):
            if not name.startswith(("before_", "after_")) or name.endswith(_OF_A_PROCESS):
                continue
            if line := _writes_options(function):
                yield Open(place(function, line), f"{cls.__name__}.{name} may write the options of a message")
            elif line := next((x.line for x in mentions(function.__code__) if x.word in _SENDS), 0):
                yield Open(place(function, line), f"{cls.__name__}.{name} may send a message again")


def _writes_options(function: FunctionType) -> int:
    """Return the line of a hook that writes an option of retries, or one that is not read; 0 for none."""
    words = [*mentions(function.__code__)]
    has_options = any(x.word == "options" for x in words)
    for x in words:
        if (x.kind == "sets" and x.word == "options") or (x.kind == "attribute" and x.word == "fail"):
            return x.line
        if has_options and x.kind != "name" and (x.word in _CHANGES or x.word in _OPTIONS):
            return x.line
    if not has_options:
        return 0
    node = source_of(function)
    stored = [x for x in ast.walk(node) if isinstance(x, ast.Subscript)] if node else []
    written = [x for x in stored if isinstance(x.ctx, ast.Store) and not isinstance(x.slice, ast.Constant)]
    return written[0].lineno if written else 0 if node else function.__code__.co_firstlineno
