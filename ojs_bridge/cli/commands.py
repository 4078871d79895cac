"""The frame of every command: its options, the question before a change, its errors and its exit code."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar

import typer
from rich.console import RenderableType
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from ..errors import (
    BridgeError,
    InvalidRetryPolicy,
    NotFound,
    StoreError,
    Unpublishable,
    Unreachable,
    Unroutable,
)
from ..operations.audit import Actor, acting
from ..operations.letters import LOOK_THROUGH, MAX_PAGE, AnyPage, every_page
from ..store import Page
from .printing import answer, plain, say, show, show_json, show_on_stderr

F = TypeVar("F", bound=Callable[..., int | None])


class Shown(Protocol):
    """An entry of a list."""

    def to_ojs(self) -> dict[str, Any]:
        """Return the entry in JSON."""


Entry = TypeVar("Entry", bound=Shown)

INCOMPLETE = 1
REFUSED = 2
OUT_OF_REACH = 3

AsJson: TypeAlias = Annotated[bool, Option("--json", help="Answer in JSON, one object a line.")]
Yes: TypeAlias = Annotated[bool, Option("--yes", "-y", help="Do not ask.")]
Limit: TypeAlias = Annotated[int, Option(help="The most entries to list, 1 to 1000.")]
Cursor: TypeAlias = Annotated[
    str | None, Option(help="Go on where the list that has printed this cursor ended.")
]
All: TypeAlias = Annotated[bool, Option("--all", help="List all entries.")]
DryRun: TypeAlias = Annotated[bool, Option("--dry-run", help="Change nothing: show what would be changed.")]
#: What an id on the command line may be.
ID_HELP = "or the beginning of it that no other has, of four characters or more."
Ids: TypeAlias = Annotated[list[str], Argument(metavar="ID...", help=f"A job's id, {ID_HELP}")]


_REASON = (
    inspect.Parameter(
        "reason",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, Option(help="Why, for the audit.")],
    ),
)


class _Command(TyperCommand):
    """A command in whose help a flag has no type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options and arguments."""
        return _with_plain_flags(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands in whose help a flag has no type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options."""
        return _with_plain_flags(super().get_params(ctx))


def _with_plain_flags(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def group_of(name: str, does: str, *, add_completion: bool = False) -> typer.Typer:
    """Return a group of commands, all of which take `-h`."""
    return typer.Typer(
        name=name,
        cls=Group,
        help=does,
        context_settings={"help_option_names": ["--help", "-h"]},
        no_args_is_help=True,
        add_completion=add_completion,
        pretty_exceptions_enable=False,
    )


def command(
    group: typer.Typer,
    name: str,
    *,
    changes: bool = False,
    panel: str | None = None,
    takes: Mapping[str, type] | None = None,
) -> Callable[[F], F]:
    """Add a function to a group of commands, in a panel of its help; the function returns the exit code.

    A command that changes something takes a reason for the audit. A parameter that is a dataclass stands for
    its fields, which are options; `takes` names a class with more of them. typer does not offer that.
    """

    def add(function: F) -> F:
        # A line of code is longer than one of a terminal, which breaks the paragraph anew.
        told = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")
        add_to = group.command(name, cls=_Command, help=told, rich_help_panel=panel)
        add_to(_flat(function, _REASON[:changes], takes or {}))
        return function

    return add


def _flat(
    function: Callable[..., int | None], more: Sequence[inspect.Parameter], takes: Mapping[str, type]
) -> Callable[..., None]:
    known = inspect.signature(function, eval_str=True).parameters.values()
    taken = [p.replace(annotation=takes.get(p.name, p.annotation)) for p in known]
    groups: dict[str, Any] = {p.name: p.annotation for p in taken if dataclasses.is_dataclass(p.annotation)}

    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in dataclasses.fields(group)})
        actor = Actor.of_system("cli", given.pop("reason", None) or "")
        try:
            with acting(actor):
                code = function(**given)
        except BrokenPipeError:
            raise
        except (BridgeError, ValueError, OSError) as error:
            raise _failed(*_message_and_code(error)) from None
        if code:
            raise typer.Exit(code)

    parameters = [*(option for parameter in taken for option in _options(parameter)), *more]
    vars(call)["__signature__"] = inspect.Signature(parameters)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    group: Any = parameter.annotation
    options: Iterable[inspect.Parameter] = [parameter]
    if dataclasses.is_dataclass(group):
        options = inspect.signature(group, eval_str=True).parameters.values()  # type: ignore[arg-type]
    return (option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options)


def _message_and_code(error: Exception) -> tuple[str, int]:
    """Return the words for an error, and its exit code."""
    match error:
        case StoreError():
            return str(error), OUT_OF_REACH
        case Unreachable():
            return f"the broker cannot be reached, and what was not sent stays: {error}", OUT_OF_REACH
        case InvalidRetryPolicy():
            return "\n".join(error.problems), REFUSED
        case NotFound() | Unpublishable() | Unroutable():
            return str(error), INCOMPLETE
        case OSError(filename=str(name), strerror=str(why)):
            return f"file: {name!r}: {why}", REFUSED
    return str(error), REFUSED


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
    if not typer.confirm(plain(question), err=True):
        raise _failed("nothing was done", REFUSED)


def whole(ids: Iterable[str], id_of: Callable[[str], str]) -> list[str]:
    """Return the whole ids, each once; raises ValueError for a beginning that several have."""
    return [*dict.fromkeys(map(id_of, ids))]


def each(ids: Sequence[str], act: Callable[[str], object], done: str, *, as_json: bool) -> int | None:
    """Act on each id and print each result; return the exit code.

    An error of one id is printed, and the next id follows. Raises StoreError and Unreachable.
    """
    wrong = 0
    for job_id in ids:
        try:
            act(job_id)
        except (StoreError, Unreachable):
            raise
        except Exception as error:  # noqa: BLE001 - one bad id must not stop the others
            wrong += 1
            why = str(error) or repr(error)
            if as_json:
                show_json({"id": job_id, "error": why})
            else:
                say(f"{job_id}: {why}")
        else:
            answer({"id": job_id, done: True}, f"{job_id}: {done}", as_json=as_json)
    return INCOMPLETE if wrong else None


def listed(
    read: Callable[..., AnyPage], limit: int, cursor: str | None, *, everything: bool
) -> Iterator[AnyPage]:
    """Yield every page, or as many as have `limit` entries; the cursor of the next one goes to stderr.

    A page of a search for a text may have few entries, or none. Ctrl-C ends the search.
    """
    if everything:
        yield from every_page(lambda cursor: read(limit=MAX_PAGE, cursor=cursor))
        return
    looked = 0
    try:
        while True:
            page = read(limit=limit, cursor=cursor)
            yield page
            cursor = page.next_cursor
            limit -= len(page.letters if isinstance(page, Page) else page.jobs)
            if cursor is None or limit <= 0:
                break
            looked += LOOK_THROUGH
            if sys.stderr.isatty():
                say(f"at least {looked:,} were searched; Ctrl-C stops")
    except KeyboardInterrupt:
        say("the search was stopped")
    if cursor:
        say(f"there may be more: --cursor {cursor}")


def show_entries(
    entries: Iterable[Entry],
    as_table: Callable[[Sequence[Entry]], RenderableType],
    none: str,
    *,
    as_json: bool,
) -> None:
    """Answer with the entries of a list, or that there are none; in JSON each as soon as it is read."""
    if as_json:
        for entry in entries:
            show_json(entry.to_ojs())
        return
    rows = list(entries)
    show(as_table(rows) if rows else none)


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
        quotes = f", in which a text has quotes, as '\"{text}\"'" if str(text).isalnum() else ""
        raise ValueError(f"{name}: {text!r} is not JSON{quotes}: {error}") from None
