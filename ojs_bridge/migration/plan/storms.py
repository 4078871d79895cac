"""Tasks that share a dependency, and that would all call it again and again while it fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from types import FunctionType, ModuleType

from ...rules.dependencies import Dependencies
from ...rules.standard_errors import STANDARD
from . import NOT_KNOWN, Hazard, NativeRetries, Planned
from .code import NOTHING, attribute_of, called_as, mentions, module_of, resolve

#: The libraries by which tasks call other services: those whose errors have standard types.
DATABASES = {"redis", "sqlalchemy", "pymongo", "psycopg", "psycopg2", "asyncpg", "pymysql", "MySQLdb"}
LIBRARIES = {"boto3", "smtplib"} | (
    {name.partition(".")[0] for name in STANDARD if "." in name}
    - sys.stdlib_module_names
    - {"django", "dramatiq"}
)
_MINUTE = 60.0
#: The most functions that are read for a task: those of a large package are many.
_MOST = 500


def with_storms(
    planned: Collection[Planned], libraries: Callable[[str], Collection[str]], known: Dependencies | None
) -> Iterator[Planned]:
    """Yield the tasks of a plan, with the hazard of those that share what they call, and soon call it again.

    `libraries` returns those by which a task calls other services, and retries what fails. A task with a
    dependency that has a breaker or a limit is left out.
    """
    sharing: dict[str, list[Planned]] = {}
    for one in planned:
        needed = known.of_type(one.name) if known else ()
        if runs_in_a_minute(one.native) < 2 or any(x.breaker or x.budget or x.is_limited for x in needed):  # noqa: PLR2004 - again
            continue
        for what in [f"need {x.name}" for x in needed] or [f"call {x}" for x in sorted(libraries(one.name))]:
            sharing.setdefault(what, []).append(one)
    for one in planned:
        found = [_hazard(what, tasks) for what, tasks in sharing.items() if one in tasks and len(tasks) > 1]
        yield replace(one, hazards=(*one.hazards, *found)) if found else one


def _hazard(what: str, tasks: Collection[Planned]) -> Hazard:
    word, _, name = what.partition(" ")
    most = max(runs_in_a_minute(one.native) for one in tasks)
    text = (
        f"{len(tasks)} tasks {what} and retry what fails: in the first minute of an outage each job calls "
        f"about {most} times, whatever became of the others"
    )
    if word == "need":
        return Hazard("storm", f"{text}; the dependency has no breaker and no limit: give it one")
    errors = "database.*" if name in DATABASES else "external.*"
    return Hazard(
        "storm",
        f'{text}; if that is one service, Dependency(errors=["{errors}"], jobs=[...], breaker=Breaker()) '
        "holds them while it is down",
    )


def runs_in_a_minute(native: NativeRetries | None) -> int:
    """Return how often a job that fails at once runs within a minute, on average; 0 if that is not known."""
    if native is None or NOT_KNOWN in (native.runs, native.waits):
        return 0
    runs, waited = 1, 0.0
    for wait in native.waits:
        waited += wait.mean  # type: ignore[union-attr]
        runs += waited <= _MINUTE
    return runs


def libraries_of(things: Iterable[object]) -> frozenset[str]:
    """Return the libraries that classes are of, or that the user's functions name, and those that they name.

    The type of a variable is not known: what it is called by does not count.
    """
    ahead, seen, found = [*things], set[int](), set[str]()
    while ahead:
        thing = ahead.pop()
        if (package := module_of(thing).partition(".")[0]) in LIBRARIES:
            found.add(package)
            continue
        for function in called_as(thing):
            if id(function) not in seen and len(seen) < _MOST:
                seen.add(id(function))
                ahead += _named(function, found)
    return frozenset(found)


def _named(function: FunctionType, found: set[str]) -> Iterator[object]:
    """Yield the objects that a function names; add the libraries that it imports itself to those found."""
    for mention in mentions(function.__code__):
        value: object = NOTHING
        if mention.kind == "name":
            value = resolve(function, mention.word)
            if value is NOTHING:
                found |= {mention.word.partition(".")[0]} & LIBRARIES
        elif mention.kind == "attribute" and mention.of:
            base = resolve(function, mention.of)
            if type(base) is ModuleType:
                value = vars(base).get(mention.word, NOTHING)
            elif base is not NOTHING:
                value = attribute_of(base, mention.word)
        if value is not NOTHING:
            yield value
