"""The arguments of a retry that `self.retry(args=..., kwargs=...)` changes, merged as by Celery 5.7."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def changed(run: Callable[..., Any], given: Arguments, args: Any, kwargs: Any) -> Arguments:
    """Return the arguments of a retry: what `args` and `kwargs` say in place of those `given` to this run.

    A parameter that was passed the other way is replaced, not passed twice. Raises TypeError for what no
    message can carry as arguments.
    """
    if args is not None and not isinstance(args, (list, tuple)):
        raise TypeError(f"self.retry(args={args!r}): must be a list or a tuple")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"self.retry(kwargs={kwargs!r}): must be a mapping")
    if args is not None and kwargs is not None:
        return args, kwargs
    if args is not None:
        return args, _not_among(run, args, given[1])
    return given if kwargs is None else _by_name(run, given[0], kwargs)


def _not_among(run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keyword arguments whose parameters are not passed by place now."""
    by_place = [p for p in _parameters(run).values() if p.kind in _BY_PLACE]
    passed = {p.name for p in by_place[: len(args)] if p.kind is p.POSITIONAL_OR_KEYWORD}
    return {name: value for name, value in kwargs.items() if name not in passed}


def _by_name(run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return arguments by place with those replaced that are now passed by name."""
    parameters, rest = _parameters(run), dict(kwargs)
    replaced = list(args)
    for place, parameter in enumerate(p for p in parameters.values() if p.kind in _BY_PLACE):
        if place < len(args) and parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name in rest:
            replaced[place] = rest.pop(parameter.name)
    return replaced, rest


def _parameters(run: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(run).parameters
    except (TypeError, ValueError):
        return {}
