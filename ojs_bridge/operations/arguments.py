"""Which values the arguments of dead letters have: whom a fault hurts."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..engine.redaction import Redactor
from ..store import Filter, Letter, Letters
from .letters import READ, SEARCH_SECONDS, every_page, shown

#: The newest letters that are counted, the most arguments and values that are told, and the most characters.
LETTERS, NAMES, TOLD, LONGEST = 10_000, 50, 10, 200
#: The most values of an argument that are told apart, and the most arguments: a job may have any of them.
VALUES, ARGUMENTS = 2_000, 500

#: A value that has a form in JSON: any but a text, a number, a truth or null is such a text.
Value: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument, its commonest values with the numbers of their letters, and whether it has only one."""

    name: str
    values: tuple[tuple[Value, int], ...]
    one_value: bool

    def to_ojs(self) -> dict[str, Any]:
        """Return the argument in JSON."""
        values = [{"value": value, "count": count} for value, count in self.values]
        return {"name": self.name, "values": values, "one_value": self.one_value}


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of so many counted letters, of all that match.

    Those with one value come first, then those of which the commonest value has the most letters.
    """

    counted: int
    of: int
    arguments: tuple[Argument, ...]

    def to_ojs(self) -> dict[str, Any]:
        """Return the arguments in JSON."""
        return {
            "counted": self.counted,
            "of": self.of,
            "arguments": [argument.to_ojs() for argument in self.arguments],
        }


def count_arguments(letters: Letters, where: Filter, redactor: Redactor, limit: int) -> Arguments:
    """Count the values of the arguments of so many letters at most, for five seconds at most.

    An argument that the redaction hides in a letter is not counted. Raises ValueError.
    """
    if not (isinstance(limit, int) and limit > 0):
        raise ValueError(f"limit: {limit!r} must be a number of letters above zero")
    pages = every_page(lambda cursor: letters.list(where, limit=READ, cursor=cursor))
    counts: dict[str, Counter[str]] = {}
    counted, ends = 0, time.monotonic() + SEARCH_SECONDS
    hidden: set[str] = set()
    for letter in (letter for page in pages for letter in page.letters):
        if counted >= limit or time.monotonic() > ends:
            break
        counted += 1
        whole, seen = dict(_values(letter)), dict(_values(shown(letter, redactor)))
        hidden |= {name for name, value in seen.items() if value != whole.get(name)}
        for name, value in seen.items():
            if name in counts or len(counts) < ARGUMENTS:
                values = counts.setdefault(name, Counter())
                if value in values or len(values) < VALUES:
                    values[value] += 1
    found = [_argument(name, values, counted) for name, values in counts.items() if name not in hidden]
    found.sort(key=lambda one: (not one.one_value, -one.values[0][1], one.name))
    return Arguments(counted, max(letters.count(where), counted), tuple(found[:NAMES]))


def _argument(name: str, values: Counter[str], counted: int) -> Argument:
    told = tuple((json.loads(value), count) for value, count in values.most_common(TOLD))
    return Argument(name, told, counted > 1 and told[0][1] == counted)


def _values(letter: Letter) -> Iterator[tuple[str, str]]:
    """Yield the name of each argument of a letter, and its value in JSON; those of an object stand apart."""
    reading = letter.reading
    args, names = reading.args or (), reading.names
    pairs = [(names[place] if place < len(names) else str(place), value) for place, value in enumerate(args)]
    for name, value in (*pairs, *(reading.kwargs or {}).items()):
        if isinstance(value, Mapping) and value:
            yield from ((f"{name}.{inner}"[:LONGEST], _told(one)) for inner, one in value.items())
        else:
            yield str(name)[:LONGEST], _told(value)


def _told(value: object) -> str:
    """Return a value in JSON, as it is told: a long or a compound one is a text that is cut."""
    if not isinstance(value, str | int | float | bool | None):
        value = json.dumps(value, default=repr, sort_keys=True)
    if isinstance(value, str) and len(value) > LONGEST:
        value = f"{value[:LONGEST]}…"
    return json.dumps(value)
