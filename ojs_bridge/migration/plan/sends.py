"""Finds the lines of a fleet that send a job with a delay, by their source; runs nothing."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import resolve_name
from types import FunctionType
from typing import Any

from ...config.settings import Settings
from ...rules.notations import spoken
from . import Hazard, Planned
from .code import NOTHING, mentions, place, source_of
from .expressions import DEPTH, Scope, computed

#: How many jobs a canvas sends first, and with its delay. Of a chord it depends on Celery's version.
_CANVAS = {"group": None, "chain": 1, "pipeline": 1, "chord": 0}
#: The arguments of a timedelta, in their order.
_UNITS = ("days", "seconds", "microseconds", "milliseconds", "minutes", "hours", "weeks")
#: The default, in seconds.
_PARK_AFTER = 60.0


@dataclass(frozen=True, slots=True)
class Send:
    """A place that sends jobs with a delay."""

    #: Such as `shop/views.py:12`.
    where: str
    #: In seconds; infinite where it is not known.
    delay: float
    #: The names of their tasks; none where the code names none.
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        known = math.isfinite(self.delay)
        return f"by {spoken(self.delay)}" if known else "by a time that is not known"


@dataclass(frozen=True, slots=True)
class Sending:
    """How a framework's code sends a job with a delay."""

    #: The arguments that say the delay, each with its unit in seconds; NaN for one that says a time.
    units: Mapping[str, float]
    #: The methods with such an argument; those that other libraries have, too, count if they name a task.
    methods: frozenset[str]
    others: frozenset[str]
    #: Returns the name of a task of the fleet that an object or a text stands for, else "".
    name_of: Callable[[object], str]

    def sends(self, functions: Mapping[FunctionType, tuple[str, ...]]) -> list[Send]:
        """Return the sends of functions, each of which comes with the names of the tasks that run it."""
        words = self.methods | self.others
        found: list[Send] = []
        for function, own in functions.items():
            if any(x.word in words for x in mentions(function.__code__)) and (node := source_of(function)):
                sender = _Sender(function, node, self.name_of, own)
                found += [send for call in ast.walk(node) for send in self._sent(sender, call)]
        # A function within a function is read twice, and may know more names.
        named = {send.where for send in found if send.names}
        return [*dict.fromkeys(x for x in found if x.names or x.where not in named)]

    def delays(self, options: Mapping[str, Any]) -> list[float]:
        """Return the delays that options say, in seconds; infinity for one that is not known."""
        said = [(options[name], unit) for name, unit in self.units.items() if options.get(name) is not None]
        return [_seconds(value, unit) for value, unit in said]

    def _sent(self, sender: _Sender, node: ast.AST) -> Iterator[Send]:
        match node:
            case ast.Call(func=ast.Attribute(attr=word, value=value), args=args, keywords=said):
                delays = self.delays({str(x.arg): sender.value(x.value) for x in said})
                if delays and word in self.methods | self.others:
                    # These two are given what they send.
                    sent = args[:1] if word in ("send_task", "enqueue") else [value]
                    names = tuple(dict.fromkeys(name for x in sent for name in sender.named(x) if name))
                    if names or word in self.methods:
                        yield Send(place(sender.function, node.lineno), max(delays), names)


def _seconds(value: object, unit: float) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    with suppress(OverflowError):
        if isinstance(value, (int, float)) and not math.isnan(value * unit):
            return value * unit
    return math.inf


class _Sender(Scope):
    """A function that sends jobs."""

    kinds = (int, float, timedelta)

    def __init__(
        self, function: FunctionType, node: ast.AST, name_of: Callable[[object], str], own: tuple[str, ...]
    ) -> None:
        super().__init__(function, node)
        self._name_of = name_of
        self._own = own if function.__code__.co_varnames[:1] == ("self",) else ()
        #: What the function itself imports.
        self._imported: dict[str, object] = {}
        for one in ast.walk(node):
            match one:
                case ast.ImportFrom(module=module, names=names, level=level):
                    package = str(function.__globals__.get("__package__"))
                    with suppress(ImportError):
                        home = sys.modules.get(resolve_name("." * level + (module or ""), package))
                        self._imported |= {
                            x.asname or x.name: vars(home or ast).get(x.name, NOTHING) for x in names
                        }

    def static(self, node: ast.AST) -> object:
        """Return the object of a name, also of one that the function imports, or of an attribute."""
        match node:
            case ast.Name(id=name) if name in self._imported:
                return self._imported[name]
        return super().static(node)

    def value(self, node: ast.AST, depth: int = 0) -> Any:
        """Return the number or the timedelta of an expression; NOTHING where it cannot be computed."""
        match node:
            case ast.Call(func=called, args=args, keywords=said) if self.static(called) is timedelta:
                names = [*_UNITS[: len(args)], *(str(x.arg) for x in said)]
                numbers = [self.value(x, depth) for x in (*args, *(x.value for x in said))]
                return computed(lambda *x: timedelta(**dict(zip(names, x, strict=True))), numbers)
            case ast.Call(func=ast.Attribute(attr="total_seconds", value=value), args=[]):
                return computed(timedelta.total_seconds, [self.value(value, depth)])
        return super().value(node, depth)

    def named(self, node: ast.AST, depth: int = 0) -> list[str]:
        """Return the tasks that an expression sends first, all of a group; "" for one that is not known."""
        match node:
            case ast.Name(id="self") if self._own:
                return [*self._own]
            case ast.Name(id=name) if name in self.values:
                return self.named(self.values[name], depth + 1) if depth < DEPTH else [""]
            case ast.Name() | ast.Attribute():
                return [self._name_of(self.static(node))]
            case ast.Constant(value=text) | ast.Subscript(slice=ast.Constant(value=text)):
                return [self._name_of(text)]
            case ast.Call(func=ast.Name(id=word) | ast.Attribute(attr=word), args=items) if word in _CANVAS:
                return [name for x in items for name in self.named(x, depth)][: _CANVAS[word]]
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [name for x in items for name in self.named(x, depth)]
            case (
                ast.BinOp(left=one, op=ast.BitOr())
                | ast.ListComp(elt=one)
                | ast.GeneratorExp(elt=one)
                | ast.Starred(value=one)
                | ast.Call(func=ast.Attribute(value=one))
            ):
                return self.named(one, depth)
        return [""]


def long_ones(sends: Iterable[Send], settings: Settings | None) -> list[Send]:
    """Return the sends whose delay may be longer than `park_after`, which is a minute without a bridge."""
    least = settings.park_after.total_seconds() if settings else _PARK_AFTER
    return [send for send in sends if send.delay > least]


def with_delays(
    planned: Iterable[Planned],
    sends: Iterable[Send],
    is_parked: Callable[[str], bool],
    today: Callable[[str, float], str],
) -> Iterator[Planned]:
    """Yield the tasks of a plan, with the hazard of those that are sent with long delays.

    `today` says what becomes of a task's job with such a delay, and `is_parked` whether the store has it.
    """
    for one in planned:
        mine = sorted((x for x in sends if one.name in x.names), key=lambda x: -x.delay)
        if not mine:
            yield one
        else:
            more = f" (one of {len(mine)} places)" if mine[1:] else ""
            then = "it waits in the store, as park_delays says"
            if not is_parked(one.name):
                longest = today(one.name, mine[0].delay)
                then = f"{longest}; with a store and park_delays=True the bridge keeps it there instead"
            hazard = Hazard("delayed-sends", f"{mine[0].where} delays it {mine[0]}{more}: {then}")
            yield replace(one, hazards=(*one.hazards, hazard))
