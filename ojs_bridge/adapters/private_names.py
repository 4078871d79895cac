"""The private and undocumented names of a framework, and the check that the installed version has them.

A release that renames one of them could bring back, in silence, the loss that the bridge prevents with it.
So an adapter has all of them in its `compat.py`, and a worker that starts looks for each of them.
"""

from __future__ import annotations

import dis
import inspect
import logging
import operator
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial, reduce
from importlib import import_module
from types import FunctionType
from typing import Any

logger = logging.getLogger("ojs_bridge")

_OURS = __name__.partition(".")[0]


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A name in the code of a framework, its place, and what the bridge needs it for.

    A name is called with the object that has it: after `tasks = minor("_tasks", ...)`, `tasks(app)` is
    `app._tasks`. The place is a module, or something in a module, as `module:Class.method`. `only` is the use
    that alone needs the name, and `since` the framework's first version that has it.
    """

    name: str
    place: str
    need: str
    #: Whether a job may be lost without the name, or stay where no worker takes it.
    keeps_jobs: bool
    only: str = ""
    since: str = "0"

    def __call__(self, owner: object, *default: Any) -> Any:
        """Return what an object has under this name."""
        return getattr(owner, self.name, *default)

    def set(self, owner: object, value: object) -> None:
        """Put a value in the place of what an object has under this name."""
        setattr(owner, self.name, value)

    def delete(self, owner: object) -> None:
        """Take away what an object has under this name."""
        delattr(owner, self.name)

    def reader(self) -> Callable[[Any], Any]:
        """Return the fastest function that reads this name, for a name that every job or failure needs."""
        return operator.attrgetter(self.name)

    def find(self) -> Any:
        """Return what a module has under this name; raises ImportError and AttributeError."""
        return self(self._owner())

    @property
    def framework(self) -> str:
        """The framework, as its distribution is called."""
        return self.place.partition(":")[0].partition(".")[0]

    @property
    def version(self) -> str:
        """The framework's installed version. An application in a bundle may have no metadata of it."""
        return str(import_module(self.framework).__version__)

    @property
    def is_expected(self) -> bool:
        """Whether the installed version should have the name."""
        return numbers_of(self.version) >= numbers_of(self.since)

    @property
    def is_missing(self) -> bool:
        """Whether the installed version should have the name and has not."""
        if not self.is_expected:
            return False
        try:
            owner = self._owner()
        except (ImportError, AttributeError, KeyError):
            return True
        if isinstance(owner, bytes):
            return self.name.encode() not in owner
        return not hasattr(owner, self.name) and self.name not in _in_code_of(owner)

    @property
    def wrapper(self) -> str:
        """The module that has wrapped the code with this name, as instrumentation does; "" without one."""
        owner = self._owner()
        code: Any = inspect.getattr_static(owner, self.name, None) or _in_code_of(owner).get(self.name)
        while hasattr(code, "__wrapped__"):
            # wrapt, which most instrumentation uses, has the function around it in this attribute.
            by = getattr(code, "_self_wrapper", code)
            around = by.__globals__["__name__"] if type(by) is FunctionType else type(by).__module__
            if around.partition(".")[0] not in {self.framework, _OURS, *sys.stdlib_module_names}:
                return str(around)
            code = code.__wrapped__
        return ""

    def _owner(self) -> Any:
        module, _, path = self.place.partition(":")
        return reduce(_part, filter(None, path.split(".")), import_module(module))

    def __str__(self) -> str:
        lack = f"{self.framework} {self.version} has no {self.name} in {self.place}"
        return f"{lack}, which the bridge needs to {self.need}"


#: A job may be lost without a vital name.
vital = partial(PrivateName, keeps_jobs=True)
minor = partial(PrivateName, keeps_jobs=False)


def names_in(module: Mapping[str, object]) -> Iterator[PrivateName]:
    """Yield the names that are variables of a module, or values of its dictionaries."""
    for value in module.values():
        each = value.values() if isinstance(value, dict) else (value,)
        yield from (name for name in each if isinstance(name, PrivateName))


def missing_vital(names: Iterable[PrivateName], uses: Container[str]) -> list[PrivateName]:
    """Return the vital names that a worker with these uses needs and has not.

    The log tells of the other names that are missing, and of vital names that somebody has wrapped.
    """
    # A framework that no use needs may not be installed.
    needed = [name for name in names if (not name.only or name.only in uses) and name.is_expected]
    missing = [name for name in needed if name.is_missing]
    lost = [name for name in missing if name.keeps_jobs]
    if lost:
        return lost
    for name in missing:
        logger.warning("%s", name)
    for name in needed:
        if name.keeps_jobs and (wrapper := name.wrapper):
            logger.warning(
                "%s in %s is wrapped by %s: the bridge uses it as it is to %s",
                name.name,
                name.place,
                wrapper,
                name.need,
            )
    return []


def numbers_of(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, to be compared; those of a pre-release may be fewer."""
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def _part(owner: Any, name: str) -> Any:
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


@cache
def _in_code_of(owner: Any) -> dict[object, Any]:
    """Return the names and texts in the code of a function, or the attributes that a class's methods set.

    Each has the function whose code it stands in. That function may have been wrapped.
    """
    plain = inspect.unwrap(owner)
    if inspect.isfunction(plain):
        code = plain.__code__
        return dict.fromkeys((*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_consts), owner)
    classes = inspect.getmro(owner) if inspect.isclass(owner) else ()
    return {
        i.argval: method
        for cls in classes
        for method in filter(callable, vars(cls).values())
        if inspect.isfunction(plain := inspect.unwrap(method))
        for i in dis.get_instructions(plain)
        if i.opname == "STORE_ATTR"
    }
