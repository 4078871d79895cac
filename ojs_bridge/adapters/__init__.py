"""What the adapters of both frameworks use, and what the rooms above ask of a framework."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..bridge import Bridge

#: The packages of the frameworks. Their adapters have these names, too.
NAMES = ("celery", "dramatiq")


@dataclass(frozen=True, slots=True)
class Framework:
    """What the rooms above ask of a framework; each adapter has one, as `FRAMEWORK`.

    `testing` and `migration` have a module for each, which they find by its name.
    """

    name: str
    #: The packages of its code, and of what it is made of.
    packages: frozenset[str]
    #: The class of its apps or brokers.
    kind: type[Any]
    #: Returns the app that a name means, whose module is imported; None if it means none.
    find: Callable[[str, bool], Any]
    #: Returns the tasks or actors of an app by name; raises any error of the modules that it imports for it.
    tasks_of: Callable[[Any], Mapping[str, Any]]
    #: Returns the bridge of an app; raises ConfigurationError.
    bridge_of: Callable[[Any], Bridge]


def frameworks() -> Iterator[Framework]:
    """Yield the frameworks that this process has imported."""
    for name in NAMES:
        if name in sys.modules:
            yield import_module(f"ojs_bridge.{name}").FRAMEWORK


def framework_of(app: Any) -> Framework:
    """Return the framework of an app or a broker."""
    return next(framework for framework in frameworks() if isinstance(app, framework.kind))


def argument_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> object:
    """Return the argument that a handler gets under a name; None if it gets none."""
    if name in kwargs:
        return kwargs[name]
    place = {parameter: at for at, parameter in enumerate(parameters_of(function))}.get(name, len(args))
    return args[place] if place < len(args) else None


@functools.lru_cache(maxsize=1024)
def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a handler's positional arguments, which a message does not carry."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in by_place)
