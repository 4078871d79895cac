"""Changes of the arguments of many jobs by name: set, rename, remove."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Edited:
    """The arguments of a job after edits; `notes` say which edits had nothing to do."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of arguments by their names, for each of many jobs.

    `set` gives an argument a value, `rename` another name, and `remove` takes it away. Each name stands in
    one edit only, so their order does not matter. Raises ValueError that names the field, the value and the
    rule.
    """

    set: Mapping[str, Any] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    remove: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("set", "rename"):
            if not isinstance(given := getattr(self, name), Mapping):
                raise ValueError(f"{name}: {given!r:.100} must be an object with the names of arguments")
        if isinstance(self.remove, str) or not isinstance(self.remove, Sequence):
            raise ValueError(f"remove: {self.remove!r:.100} must be a list of names of arguments")
        named = [("set", name) for name in self.set]
        named += [("rename", name) for pair in self.rename.items() for name in pair]
        named += [("remove", name) for name in self.remove]
        _check_names(named)
        for name, value in self.set.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"set: {name!r:.100}: {value!r:.100} must be JSON: {error}") from None

    def __bool__(self) -> bool:
        return bool(self.set or self.rename or self.remove)

    @classmethod
    def of(cls, given: object) -> Edits:
        """Return the edits in a JSON object; raises ValueError, also for a field that is unknown."""
        if not isinstance(given, Mapping):
            raise ValueError(f"changes: {given!r:.100} must be an object with set, rename or remove")
        if unknown := [name for name in given if name not in cls.__slots__]:
            raise ValueError(f"changes: {unknown[0]!r:.100} is unknown; set, rename and remove are known")
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """Return the edits in JSON, as `of` reads them."""
        return {**asdict(self), "remove": [*self.remove]}

    def apply(self, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> Edited:
        """Return the arguments of a job after the edits; raises ValueError where they cannot be made.

        `names` are those of the parameters, where they are known; an argument without a name has its place
        for one, as "0". What moves, or stands behind what moves, is given by its name afterwards.
        """
        own = [names[place] if place < len(names) else str(place) for place in range(len(args))]
        there = {*own, *kwargs}
        if len(there) < len(own) + len(kwargs):
            raise ValueError("one of its arguments is given twice, by its place and by its name")
        for name, to in self.rename.items():
            if name in there and to in there:
                raise ValueError(f"rename: {name!r} to {to!r}: there is an argument {to!r} already")
        moved = {*self.rename, *self.remove}
        first = next((place for place, name in enumerate(own) if name in moved), len(own))
        for place in range(max(first, len(names)), len(own)):
            if own[place] not in moved:
                raise ValueError(f"{own[first]!r} cannot move: an argument behind it has no name")
        by_place = dict(zip(own[:first], args, strict=False))
        behind = {**dict(zip(own[first:], args[first:], strict=True)), **kwargs}
        left = {name: value for name, value in behind.items() if name not in self.remove}
        by_name = {self.rename.get(name, name): value for name, value in left.items()}
        for name, value in self.set.items():
            (by_place if name in by_place else by_name)[name] = value
        asked = [*(("rename", name) for name in self.rename), *(("remove", name) for name in self.remove)]
        notes = [f"{how}: there is no {name!r}" for how, name in asked if name not in there]
        return Edited([*by_place.values()], by_name, notes)


def _check_names(named: Sequence[tuple[str, object]]) -> None:
    """Raise ValueError for what is no name of an argument, and for a name that stands twice."""
    seen = set[object]()
    for how, name in named:
        if not (isinstance(name, str) and name):
            raise ValueError(f"{how}: {name!r:.100} must be the name of an argument")
        if name in seen:
            raise ValueError(f"{how}: {name!r:.100} must stand in one edit only")
        seen.add(name)


def words_of(changes: Mapping[str, Any]) -> list[str]:
    """Return the names of what the changes of a replay change, without any value; edits say how."""
    edits = changes.get("edits")
    words = [name for name in changes if name != "edits"]
    if isinstance(edits, Mapping):
        words += [f"{how} {name}" for how in ("set", "rename", "remove") for name in edits.get(how) or ()]
    return sorted(words)
