"""How a function becomes a command: groups of options are dataclasses, and what fails is told in one line."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_type_hints

import typer

from .failing import told

F = TypeVar("F", bound=Callable[..., int | None])


def command(group: typer.Typer, name: str) -> Callable[[F], F]:
    """Add a function to a group of commands; what it returns is the exit code.

    A parameter that is a dataclass stands for the options that its fields are.
    """

    def add(function: F) -> F:
        group.command(name, help=inspect.getdoc(function))(_flat(function))
        return function

    return add


def _flat(function: Callable[..., int | None]) -> Callable[..., None]:
    taken = inspect.signature(function, eval_str=True).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in taken if dataclasses.is_dataclass(p.annotation)}

    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in dataclasses.fields(group)})
        with told():
            code = function(**given)
        if code:
            raise typer.Exit(code)

    parameters = [parameter for one in taken for parameter in _options(one)]
    vars(call)["__signature__"] = inspect.Signature(parameters)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    group = parameter.annotation
    if not dataclasses.is_dataclass(group):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[field.name], default=field.default
        )
