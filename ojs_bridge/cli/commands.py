"""The frame of every command: its options, the question before a change, its errors and its exit code."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

import typer
from rich.console import RenderableType
from typer import Argument, Option

from ..errors import InvalidRetryPolicy, NotFound, StoreError, Unpublishable, Unreachable
from .printing import say, show, show_json, show_on_stderr

F = TypeVar("F", bound=Callable[..., int | None])
Entry = TypeVar("Entry")

INCOMPLETE = 1
REFUSED = 2
OUT_OF_REACH = 3

AsJson: TypeAlias = Annotated[bool, Option("--json", help="Answer in JSON, one object a line.")]
Yes: TypeAlias = Annotated[bool, Option("--yes", "-y", help="Do not ask.")]
Limit: TypeAlias = Annotated[int, Option(help="How many, 1 to 1000.")]
Cursor: TypeAlias = Annotated[
    str | None, Option(help="Go on after an earlier page: the cursor that it told.")
]
All: TypeAlias = Annotated[bool, Option("--all", help="All of them, page after page.")]
DryRun: TypeAlias = Annotated[bool, Option("--dry-run", help="Only show which.")]
Ids: TypeAlias = Annotated[list[str], Argument(metavar="ID...", help="Job ids.")]


def command(group: typer.Typer, name: str) -> Callable[[F], F]:
    """Add a function to a group of commands; the function returns the exit code.

    A parameter that is a dataclass stands for the options that are its fields, which typer does not offer.
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
        with _errors_told():
            code = function(**given)
        if code:
            raise typer.Exit(code)

    parameters = [option for parameter in taken for option in _options(parameter)]
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


@contextmanager
def _errors_told() -> Iterator[None]:
    """Turn the library's errors into lines on stderr and an exit code."""
    try:
        yield
    except StoreError as error:
        raise _failed(str(error), OUT_OF_REACH) from None
    except Unreachable as error:
        message = f"the broker cannot be reached, and what was not sent stays: {error}"
        raise _failed(message, OUT_OF_REACH) from None
    except InvalidRetryPolicy as error:
        raise _failed("\n".join(error.problems), REFUSED) from None
    except (NotFound, Unpublishable) as error:
        raise _failed(str(error), INCOMPLETE) from None
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        raise _failed(str(error), REFUSED) from None


def _failed(lines: str, code: int) -> typer.Exit:
    """Write an error to stderr, and return the exception that ends the command."""
    for line in lines.splitlines():
        say(f"ojs-bridge: {line}")
    return typer.Exit(code)


def ask(question: str, *shown: RenderableType, yes: bool) -> None:
    """Show what will be changed and ask, unless `yes`; the answer no ends the command."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise _failed(f"{question} There is no terminal to ask on: say --yes", REFUSED)
    for renderable in shown:
        show_on_stderr(renderable)
    if not typer.confirm(question, err=True):
        raise _failed("nothing was done", REFUSED)


def each(ids: Sequence[str], act: Callable[[str], object], done: str, *, as_json: bool) -> int | None:
    """Act on each id and tell of each; return the exit code.

    The error of an id is told, and the next id follows; raises StoreError and Unreachable.
    """
    wrong = 0
    for job_id in ids:
        try:
            act(job_id)
        except (StoreError, Unreachable):
            raise
        except Exception as error:  # noqa: BLE001 - whatever is wrong with this id
            wrong += 1
            _tell_error(job_id, str(error) or repr(error), as_json=as_json)
        else:
            _tell_done(job_id, done, as_json=as_json)
    return INCOMPLETE if wrong else None


def _tell_error(job_id: str, error: str, *, as_json: bool) -> None:
    if as_json:
        show_json({"id": job_id, "error": error})
    else:
        say(f"{job_id}: {error}")


def _tell_done(job_id: str, done: str, *, as_json: bool) -> None:
    if as_json:
        show_json({"id": job_id, done: True})
    else:
        show(f"{job_id}: {done}")


def found_of(get: Callable[[str], Entry], ids: Sequence[str]) -> Iterator[Entry]:
    """Yield the entries of some ids; an id without an entry is left out."""
    for job_id in ids:
        try:
            yield get(job_id)
        except NotFound:
            continue


def json_of(name: str, text: str | None) -> Any:
    """Return the JSON in an option; raises ValueError."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {text!r} is not JSON: {error}") from None
