"""The private or undocumented names of a framework that an adapter needs, and whether they are there.

A release that renames one of them could bring back, in silence, the loss that the adapter prevents with it.
So an adapter uses them in its `compat.py` alone, and a worker looks for each of them when it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Name:
    """A name that an adapter needs; its owner is a module, or a class as `module:Class`."""

    owner: str
    #: One that goes by two names in the supported releases has an " or " between them.
    name: str
    needed_to: str
    #: Whether without it a job may be lost, or stay where no worker takes it.
    keeps_jobs: bool

    @property
    def module(self) -> str:
        """The module that has it."""
        return self.owner.partition(":")[0]

    def is_there(self) -> bool:
        """Return whether the installed release has it."""
        owner: Any = import_module(self.module)
        for part in filter(None, self.owner.partition(":")[2].split(".")):
            owner = owner.get(part) if isinstance(owner, dict) else getattr(owner, part, None)
        return any(hasattr(owner, name) or _says(owner, name) for name in self.name.split(" or "))

    def __str__(self) -> str:
        return f"{self.owner.replace(':', '.')} has no {self.name}, which is needed to {self.needed_to}"


class Names:
    """The names that one adapter needs."""

    def __init__(self) -> None:
        self.all: list[Name] = []

    def needs(self, owner: str, *names: str, keeps_jobs: bool = True) -> Callable[[_F], _F]:
        """Return a decorator of what uses some names; the first line of its docstring says what for."""

        def decorate(user: _F) -> _F:
            self.add(owner, *names, needed_to=_purpose(user), keeps_jobs=keeps_jobs)
            return user

        return decorate

    def add(self, owner: str, *names: str, needed_to: str, keeps_jobs: bool = True) -> None:
        """Add some names of one owner."""
        self.all += [Name(owner, name, needed_to, keeps_jobs) for name in names]

    def missing(self, is_needed: Callable[[Name], bool]) -> list[Name]:
        """Return the names that are needed and not there."""
        return [name for name in self.all if is_needed(name) and not name.is_there()]


def _purpose(user: Callable[..., Any]) -> str:
    said = (user.__doc__ or "").strip().splitlines()[0].rstrip(".")
    return said[0].lower() + said[1:]


def _says(owner: Any, name: str) -> bool:
    """Return whether a script has a text, or the functions of a class use a name, as for its instances."""
    if isinstance(owner, bytes):
        return name.encode() in owner
    found = [owner, *vars(owner).values()] if isinstance(owner, type) else [owner]
    codes = (getattr(getattr(each, "fget", None) or each, "__code__", None) for each in found)
    return any(name in (*c.co_names, *c.co_varnames) or repr(name) in repr(c.co_consts) for c in codes if c)
