"""Reads the retries of an actor: its options, its broker's options, and the lines that leave them open."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from io import IOBase
from types import FunctionType
from typing import Any

from dramatiq import Actor, errors
from dramatiq.broker import Broker
from dramatiq.middleware import Middleware, Retries

from ....dramatiq import OJSRetries
from ....dramatiq.actors import names_exceptions
from ....dramatiq.compat import settings_of
from .. import ENDLESS, NOT_KNOWN, Open, Runs, WaitRange, dramatiq_wait
from ..code import (
    NOTHING,
    READING,
    WRITING,
    Askers,
    Calls,
    Mention,
    attribute_of,
    functions_around,
    lines_with,
    may_be,
    mentions,
    methods,
    place,
    resolve,
    source_of,
    wrapped,
)

#: The options of a message's retries.
_OPTIONS = frozenset(
    ("max_retries", "min_backoff", "max_backoff", "retry_when", "throws", "retries", "on_retry_exhausted")
)
#: The numbers among them. A hook that is called before each run, or each sending, may compute them.
_NUMBERS = frozenset(("max_retries", "min_backoff", "max_backoff"))
_BEFORE = frozenset(("before_process_message", "before_enqueue"))
#: The methods of Python's own objects. A message's options have them, and so has what a hook keeps there.
_COMMON = frozenset((*dir(dict), *dir(list), *dir(str), *dir(set), *dir(ExitStack), *dir(IOBase)))
#: Functions that only look at what they are given.
_LOOKING = frozenset(("dict", "len", "str", "repr", "list", "sorted", "set", "dumps", "print"))
_WRITES = "it may write options of retries"
#: Parts of the names of hooks that are called for a declaration, and of those that are called for a process.
_OF_A_DECLARATION = ("declare",)
_OF_A_PROCESS = ("boot", "shutdown", "fork", "stopped")


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
    def of(cls, actor: Actor[..., Any], broker: Broker, given: Mapping[str, Any] | None = None) -> Settings:
        """Return the settings of an actor of a broker, with those that hooks give to its messages."""
        retries = retries_of(broker)
        over = settings_of(retries or Retries())
        own = {name: actor.options[name] for name in over if name in actor.options}
        return cls(actor, retries, throws=actor.options.get("throws"), **(over | own | {**(given or {})}))

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

    def wait(self, n: int) -> WaitRange:
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
    retrying = [m for m in broker.middleware if isinstance(m, Retries)]
    return next((m for m in retrying if not isinstance(m, OJSRetries)), next(iter(retrying), None))


class Around:
    """The modules around a broker, and their functions that may decide about the retry of a message."""

    def __init__(self, broker: Broker) -> None:
        actors = [*broker.actors.values()]
        runs = [x for actor in actors for x in wrapped(actor.fn)]
        hooks = [x for middleware in broker.middleware for _, x in _hooks(middleware)]
        calls = Calls(functions_around("dramatiq", [*runs, *hooks], [broker, *actors]), _COMMON)
        self._askers = Askers(calls, _asks, "may raise Retry, or use the retries of its message")
        self._changers = Askers(calls, _changes, "may enqueue or fail a message, or write its options")
        self._broker = broker
        #: The hooks that write options of retries into a message, each with its middleware.
        self._writers: list[tuple[Middleware, FunctionType]] = []
        ranked = [line for middleware in broker.middleware for line in self._in_middleware(middleware)]
        #: The lines that leave the retries of every actor open, the surest first.
        self.open = [*dict.fromkeys(line for _, line in sorted(ranked, key=lambda x: x[0]))]

    def given(self, actor: Actor[..., Any]) -> dict[str, Any]:
        """Return the options of retries that hooks give to an actor's messages, as far as they are read."""
        given: dict[str, Any] = {}
        for middleware, function in self._writers:
            given |= _Hook(middleware, function, self._broker, actor).writes() or {}
        return given

    def open_lines(self, settings: Settings) -> Iterator[Open]:
        """Yield the lines and options that leave the number or the waits of an actor's retries open."""
        actor = settings.actor
        for middleware, function in self._writers:
            if _Hook(middleware, function, self._broker, actor).writes() is None:
                called = f"{type(middleware).__name__}.{function.__name__}"
                yield Open(place(function, next(_written(function))), f"{called}: {_WRITES}")
        yield from self.open
        if settings.retry_when is not None and not settings.is_asked:
            why = "the broker's retry_when decides about retries, and the bridge asks only that of an actor"
            yield Open(place_of(settings.retry_when), why)
        functions = wrapped(actor.fn) or [x for cls in type(actor.fn).__mro__ for _, x in methods(cls)]
        if not functions:
            why = "what it runs is no function of the project, and is not read"
            yield Open(actor.actor_name, why)
        asking = [line for function in functions for line in self._askers.signs(function)]
        yield from sorted(asking, key=lambda line: not line.why.startswith("it "))
        for holder in (actor, self._broker):
            for name, function in (x for cls in type(holder).__mro__ for x in methods(cls)):
                for line in (line for line, key, writes in _uses(function) if writes and key in _OPTIONS):
                    yield Open(place(function, line), f"its own {name} writes options of retries")

    def _in_middleware(self, middleware: Middleware) -> Iterator[tuple[int, Open]]:
        """Yield the lines by which the user's middleware may change messages, each with its rank."""
        if isinstance(middleware, Retries):
            if type(middleware) not in (Retries, OJSRetries):
                name = f"{type(middleware).__module__}.{type(middleware).__qualname__}"
                yield 0, Open(name, "it is another Retries: no worker starts with both it and the bridge")
            return
        for name, function in _hooks(middleware):
            called = f"{type(middleware).__name__}.{name}"
            if any(part in name for part in _OF_A_PROCESS):
                for line in _written(function):
                    yield 1, Open(place(function, line), f"{called} writes options of retries")
            else:
                signs = self._changers.signs(function)
                if name in _BEFORE and any(sign.why == _WRITES for sign in signs):
                    self._writers.append((middleware, function))
                    ends = _ends(function, mentions(function.__code__))
                    signs = [sign for sign in (*signs, ends) if sign and sign.why != _WRITES]
                for sign in signs:
                    rank = 1 if sign.why == _WRITES else 2
                    yield rank, Open(sign.where, f"{called}: {sign.why}")


def _hooks(middleware: Middleware) -> Iterator[tuple[str, FunctionType]]:
    """Yield the hooks of the user's middleware that are called in a worker, or for a message."""
    for cls in type(middleware).__mro__:
        for name, function in methods(cls):
            if name.startswith(("before_", "after_")) and not any(x in name for x in _OF_A_DECLARATION):
                yield name, function


def place_of(function: Any) -> str:
    """Return where a function is defined, as `path:line`."""
    return next(map(place, wrapped(function)), repr(function))


def _asks(function: FunctionType, words: Collection[Mention]) -> Open | None:
    """Return the first line of a function that may itself decide about its message's retry."""
    for x in words:
        if x.kind == "text":
            continue
        # Without a delay of its own it is an error like any other.
        lines = lines_with(function, x.word, (None,)) if x.word == "Retry" else ()
        if (lines is None or x.line in lines) and may_be(
            function, words, x.word, "dramatiq", (errors.Retry,)
        ):
            return Open(place(function, x.line), "it raises Retry, which has a delay of its own")
    if not any(x.word == "CurrentMessage" for x in words):
        return None
    used = [line for line, key, writes in _uses(function) if key in _OPTIONS or (writes and key is None)]
    return Open(place(function, used[0]), "it uses the retries of its own message") if used else None


def _changes(function: FunctionType, words: Collection[Mention]) -> Open | None:
    """Return the first line of a hook that may write an option of retries, or enqueue or fail a message."""
    if line := next(_written(function), None):
        return Open(place(function, line), _WRITES)
    return _ends(function, words)


def _ends(function: FunctionType, words: Collection[Mention]) -> Open | None:
    """Return the first line of a hook that may enqueue or fail a message."""
    for x in words:
        if x.kind == "attribute" and x.word in ("enqueue", "fail"):
            return Open(place(function, x.line), f"it may {x.word} a message")
    return None


def _written(function: FunctionType) -> Iterator[int]:
    """Yield the lines of a function that may write an option of retries."""
    for line, key, writes in _uses(function):
        if writes and (key is None or key in _OPTIONS):
            yield line


@cache
def _uses(function: FunctionType) -> tuple[tuple[int, str | None, bool], ...]:
    """Return the uses of `options` in a function: line, key, and whether it may be written.

    The key is None where the use may be of any key, and where only the running process knows the key.
    """
    node = source_of(function)
    if node is None:
        lines = [x.line for x in mentions(function.__code__) if x.word == "options"]
        return tuple((line, None, True) for line in lines[:1])
    above = {child: one for one in ast.walk(node) for child in ast.iter_child_nodes(one)}
    names = {"options"}
    for one in ast.walk(node):
        match one:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="options")):
                names.add(name)
    uses = []
    for one in ast.walk(node):
        match one:
            case ast.Attribute(attr="options") | ast.Name():
                if isinstance(one, ast.Attribute) or one.id in names:
                    uses += [(one.lineno, *use) for use in _use(function, one, above)]
    return tuple(uses)


def _use(
    function: FunctionType, options: ast.expr, above: Mapping[ast.AST, ast.AST]
) -> Iterator[tuple[str | None, bool]]:
    """Yield the keys of a use of `options`, and whether they may be written."""
    of = above[options]
    stored = not isinstance(getattr(options, "ctx", None), ast.Load)
    match of:
        case ast.Subscript(slice=key, ctx=ctx) if of.value is options:
            yield _key(function, key), not isinstance(ctx, ast.Load)
        case ast.Attribute(attr=name) if name in READING | WRITING and isinstance(above[of], ast.Call):
            first = [*above[of].args, None][0]  # type: ignore[attr-defined]
            yield ("", False) if first is None else (_key(function, first), name in WRITING)
        case ast.Attribute(attr="update") if isinstance(call := above[of], ast.Call):
            given = [key for x in call.args for key in (x.keys if isinstance(x, ast.Dict) else [None])]
            yield from ((None if key is None else _key(function, key), True) for key in given)
            yield from ((x.arg, True) for x in call.keywords)
        case ast.Compare(left=key) if key is not options:
            yield _key(function, key), False
        case ast.Assign(targets=[ast.Name(id=name)]) if of.value is options and isinstance(
            options, ast.Attribute
        ):
            yield "", False  # the uses of the variable are read
        case ast.Assign(targets=[target]) if target is options and isinstance(options, ast.Name):
            yield "", False
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            yield None, name not in _LOOKING
        case ast.Dict() | ast.keyword(arg=None) | ast.FormattedValue() | ast.For() | ast.BoolOp() | ast.If():
            yield "", False
        case _:
            yield None, stored or not isinstance(of, ast.Attribute)


def _key(function: FunctionType, node: ast.expr) -> str | None:
    """Return the key of a subscript, if it is a text of the code or of its module."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) if name not in function.__code__.co_varnames:
            value = resolve(function, name)
        case ast.Attribute(value=ast.Name(), attr=name):
            # `self.KEY`, of the method's class
            value = attribute_of(resolve(function, function.__qualname__.partition(".")[0]), name)
        case _:
            return None
    return value if type(value) is str else None


class _Hook:
    """What a hook writes into the messages of an actor that bring no options of their own; nothing is run."""

    def __init__(self, middleware: Middleware, function: FunctionType, broker: Broker, actor: Any) -> None:
        self._function, self._actor, self._broker = function, actor, broker
        self._written = {*_written(function)}
        node = source_of(function)
        self._body = node.body if isinstance(node, ast.FunctionDef) else []
        names = [x.arg for x in node.args.args] if node else []
        self._sent = object()
        self._known: dict[str, Any] = dict(zip(names, (middleware, broker, self._sent), strict=False))
        self._options: dict[str, Any] = {}

    def writes(self) -> dict[str, Any] | None:
        """Return the numbers that it writes; None where they are not known, or change with each call."""
        known = {**self._known}
        ends = self._block(self._body) if self._body else None
        first, self._known = {**self._options}, known
        if ends is None or self._block(self._body) is None or self._options != first:
            return None
        given = {name: value for name, value in first.items() if name in _OPTIONS}
        plain = given.keys() <= _NUMBERS and all(type(x) in (int, float, type(None)) for x in given.values())
        return given if plain else None

    def _block(self, block: list[ast.stmt]) -> bool | None:
        """Follow statements; return whether they go on, and None where an option is not known."""
        goes_on: bool | None = True
        for statement in block:
            returns = any(isinstance(x, (ast.Return, ast.Raise)) for x in ast.walk(statement))
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if not self._writes(value):
                    self._known[name] = self._value(value)
                case ast.If(test=test, body=body, orelse=orelse) if (answer := self._truth(test)) is not None:
                    goes_on = self._block(body if answer else orelse)
                case ast.Return():
                    return False
                case _ if returns:
                    return None
                case _ if self._writes(statement):
                    goes_on = self._write(statement)
            if not goes_on:
                return goes_on
        return True

    def _writes(self, node: ast.AST) -> bool:
        return any(getattr(x, "lineno", 0) in self._written for x in ast.walk(node))

    def _write(self, statement: ast.stmt) -> bool | None:
        """Follow a statement that writes one option."""
        match statement:
            case ast.Assign(targets=[ast.Subscript(value=of, slice=key)], value=value):
                name, new = self._value(key), self._value(value)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=of, attr="setdefault"), args=[key, value])):
                name, new = self._value(key), self._value(value)
                new = self._options.get(name, new) if type(name) is str else NOTHING
            case _:
                return None
        if self._value(of) is not self._options or type(name) is not str or new is NOTHING:
            return None
        self._options[name] = new
        return True

    def _truth(self, test: ast.expr) -> bool | None:
        value = self._value(test)
        return bool(value) if type(value) in (bool, int, float, str, dict, type(None)) else None

    def _value(self, node: ast.expr) -> Any:
        """Return the value of an expression; NOTHING where it is not known."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                own = name in self._known or name in self._function.__code__.co_varnames
                return self._known.get(name, NOTHING) if own else resolve(self._function, name)
            case ast.Attribute(value=of, attr=name):
                return self._attribute(self._value(of), name)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                answer = self._truth(test)
                return NOTHING if answer is None else self._value(body if answer else orelse)
            case ast.BoolOp(op=op, values=[*parts, last]):
                for part in parts:
                    truth = self._truth(part)
                    if truth is None or truth is isinstance(op, ast.Or):
                        return NOTHING if truth is None else self._value(part)
                return self._value(last)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                answer = self._truth(operand)
                return NOTHING if answer is None else not answer
        return self._looked_up(node)

    def _looked_up(self, node: ast.expr) -> Any:
        """Return an item, an actor, or the answer to a question about one."""
        match node:
            case ast.Call(func=ast.Attribute(value=of, attr="get_actor"), args=[name], keywords=[]):
                is_own = self._value(of) is self._broker and self._value(name) == self._actor.actor_name
                return self._actor if is_own else NOTHING
            case ast.Call(func=ast.Attribute(value=of, attr="get"), args=[key, *rest], keywords=[]):
                return self._item(of, key, [*map(self._value, rest), None][0])
            case ast.Subscript(value=of, slice=key):
                return self._item(of, key, NOTHING)
            case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=None)]):
                value = self._value(left)
                is_asked = isinstance(op, (ast.Is, ast.IsNot)) and value is not NOTHING
                return (value is None) is isinstance(op, ast.Is) if is_asked else NOTHING
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn() as op], comparators=[of]):
                items, name = self._value(of), self._value(key)
                known = (
                    type(items) is dict
                    and type(name) is str
                    and (items is not self._options or name in _OPTIONS)
                )
                return (name in items) is isinstance(op, ast.In) if known else NOTHING
        return NOTHING

    def _item(self, of: ast.expr, key: ast.expr, default: Any) -> Any:
        items, name = self._value(of), self._value(key)
        if type(items) is not dict or type(name) is not str:
            return NOTHING
        # A message may bring another option of the fleet's own.
        is_open = items is self._options and name not in _OPTIONS and name not in items
        return NOTHING if is_open else items.get(name, default)

    def _attribute(self, of: Any, name: str) -> Any:
        if of is self._sent:
            return {"options": self._options, "actor_name": self._actor.actor_name}.get(name, NOTHING)
        with suppress(Exception):  # only Django's settings, which are lazy, are asked for it
            return getattr(of, name) if type(of).__module__ == "django.conf" else vars(of)[name]
        return NOTHING if of is NOTHING else attribute_of(of, name)
