"""`ojs-bridge plan`: the changes that the bridge would bring to a fleet, task by task."""

from __future__ import annotations

import json
import logging
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Annotated

from rich.text import Text
from typer import Argument, Option

from ..adapters import framework_of
from ..config.policies import load, read_toml
from ..engine.layers import NUMBERS
from ..errors import ConfigurationError
from ..migration.plan import NOT_KNOWN, NativeRetries, Planned, WaitRange
from ..rules.notations import spoken
from ..rules.policy import AnyPartial, RetryPolicy, fields_of
from .commands import INCOMPLETE
from .finding import app_of, tasks_of
from .printing import counted, page_width, plain, say, show, show_json

_OVERRIDES = "A message or a handler can override these numbers (send_with_options, apply_async, Retry)."
_UNKNOWN = (
    "Not known: the plan cannot read how such a task is retried. It is not in the file, and install with the "
    "file leaves it native. install without a file moves it, too, with its native numbers. Begin with the "
    "file, or with policies={}, which moves no task."
)
_NOTHING = "no tasks: perhaps the modules that declare them are not imported (--import MODULE)"
#: The most statements of the summary: with the names beneath them they fit a screen.
_STATEMENTS = 12
#: The most names of tasks beneath a statement.
_NAMES = 4
#: The hazards that lose jobs, double them or never end them, the worst first; `--all` shows the others.
_SERIOUS = (
    *("acks-early", "stays-native", "no-retries", "reject-without-acks-late", "beyond-visibility-timeout"),
    *("beyond-consumer-timeout", "poison-job", "over-run", "infinite-retries", "retry-when", "expires"),
    *("age-limit", "unknown-broker", "unused-autoretry", "unused-retry-options", "delayed-sends", "storm"),
)
#: The hazards of a Celery task that loses a job when its worker is killed.
_LOSING = {"acks-early", "reject-without-acks-late"}
#: The fields of a policy that say how long a retry waits.
_WAITS = ("initial_interval", "max_interval", "backoff_strategy", "backoff_coefficient", "jitter")


class Format(str, Enum):
    """The form of a plan."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True)
class Answer:
    """The options for the form of a plan, and for its file."""

    how: Annotated[Format, Option("--format", help="A table for people, JSON one task a line.")] = (
        Format.TABLE
    )
    every: Annotated[bool, Option("--all", help="Show all tasks, with all statements about them.")] = False
    file: Annotated[
        str | None,
        Option(
            "--write",
            metavar="FILE.toml",
            help="Also write the policies to a file for `install`; to an existing file, add the tasks that "
            "it does not name.",
        ),
    ] = None
    other: Annotated[
        str | None,
        Option(
            "--diff", metavar="FILE", help="Only show how this file differs from the plan; exit 1 if it does."
        ),
    ] = None
    protect: Annotated[
        bool,
        Option(
            "--protect",
            help="Plan Celery's tasks with acks_late, and with attempts left: a killed worker's job is not "
            "lost. A task that is not known is left out.",
        ),
    ] = False
    verify: Annotated[
        bool,
        Option(
            "--verify",
            help="Also run tasks in memory, with failures in place of their bodies. Hooks and receivers of "
            "signals run, too.",
        ),
    ] = False
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an import that fails.")] = False


def plan(
    app: Annotated[
        str,
        Argument(metavar="MODULE:APP", help="The Celery app or Dramatiq broker, as its framework writes it."),
    ],
    tasks: Annotated[
        list[str] | None, Argument(metavar="TASK", help="Only these tasks: names, or patterns such as a.*")
    ] = None,
    modules: Annotated[
        list[str] | None,
        Option(
            "--import",
            metavar="MODULE",
            help="Import this module, too, as `dramatiq broker MODULE` or a receiver of `worker_init` does.",
        ),
    ] = None,
    *,
    answer: Answer,
) -> int:
    """Show what each task does today when it fails, the nearest retry policy, and the hazards.

    No task is called, and nothing is sent. With --verify tasks run in memory, without their bodies.
    """
    if answer.file is not None:
        check_path(answer.file)
    with _traceback(shown=answer.debug):
        loaded = app_of(app, modules or ())
        tasks_of(loaded)
        room = import_module(f"..migration.plan.{framework_of(loaded).name}", __package__)
        planned: list[Planned] = room.plans(loaded, tasks or (), protect=answer.protect)
        for send in room.sends(loaded):
            if not (send.names or tasks):
                say(f"{send.where} delays a job {send}; the plan cannot tell of which task (see park_delays)")
    if answer.verify:
        with _silent():
            planned = room.measured(loaded, planned)
    if answer.other is not None:
        lines = [*differences(answer.other, planned, whole=not tasks)]
        show(*lines or [f"{answer.other} says what the plan says"])
        return INCOMPLETE if lines else 0
    match answer.how:
        case Format.JSON:
            for one in planned:
                show_json({**asdict(one), "verdict": one.verdict, "exact": one.exact})
        case Format.TABLE:
            (show_all if answer.every else show_summary)(app, planned)
    if answer.file is not None:
        say(write(answer.file, app, planned))
    return 0


@contextmanager
def _traceback(*, shown: bool) -> Iterator[None]:
    """Show on stderr the traceback of a failed import."""
    try:
        yield
    except ConfigurationError as error:
        if shown and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        raise


@contextmanager
def _silent() -> Iterator[None]:
    """Log nothing, and redirect the output to stderr: each run of a check fails, and logs it."""
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(logging.NOTSET)


def show_summary(app: str, planned: Sequence[Planned]) -> None:
    """Show the changes, the hazards and the unknown, the worst first, with their tasks."""
    if not planned:
        show(_NOTHING)
        return
    show(*_wrapped(f"{app}: {_counts(planned)}"))
    names_by_text: dict[str, list[str]] = {}
    for _, text, name in sorted((rank, text, one.name) for one in planned for rank, text in _worst(one)):
        names_by_text.setdefault(text, []).append(name)
    for text, names in [*names_by_text.items()][:_STATEMENTS]:
        more = f" and {len(names) - _NAMES:,} more" if len(names) > _NAMES else ""
        show("", *_wrapped(text), *_wrapped(", ".join(names[:_NAMES]) + more, "    ", style="dim"))
    if any(one.policy is None for one in planned):
        show("", *_wrapped(_UNKNOWN))
    hidden = len(names_by_text) - _STATEMENTS
    rest = f"{hidden:,} more statements, and every" if hidden > 0 else "every"
    show("", *_wrapped(f"--all shows {rest} task with its numbers, words and lesser hazards. {_OVERRIDES}"))


def show_all(app: str, planned: Sequence[Planned]) -> None:
    """Show all statements about each task."""
    if not planned:
        show(_NOTHING)
        return
    show(*_wrapped(f"{app}: {_counts(planned)}"))
    for one in planned:
        show("", *_wrapped(one.name, style="bold"))
        for heading, text in _statements(one):
            show(*_wrapped(f"{heading:<10}{text}", "  ", " " * 12))
    if any(one.policy is None for one in planned):
        show("", *_wrapped(_UNKNOWN))
    show("", *_wrapped(_OVERRIDES))


def _counts(planned: Sequence[Planned]) -> str:
    losing = sum(not _LOSING.isdisjoint(hazard.name for hazard in one.hazards) for one in planned)
    lose = f"; running jobs of {losing:,} are lost when a worker is killed (acks_late is off): see --protect"
    counts = {
        "do exactly what they do today": sum(one.exact for one in planned),
        "change": sum(one.policy is not None and not one.exact for one in planned),
        "are not known, and not in the file": sum(one.policy is None for one in planned),
    }
    changes = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    checked = f"; {ran:,} measured" if (ran := sum(one.measured for one in planned)) else ""
    tasks = counted(len(planned), "task", "tasks") + lose * bool(losing)
    return f"{tasks}; under the policies {changes}{checked}"


def _worst(one: Planned) -> Iterator[tuple[int, str]]:
    """Yield the statements about a task for the summary, with their ranks."""
    if one.unreadable:
        yield 0, f"cannot be read: {one.unreadable}"
    for hazard in one.hazards:
        if hazard.name in _SERIOUS:
            yield 1 + _SERIOUS.index(hazard.name), f"{hazard.name}: {hazard.text}"
        elif hazard.differs and one.policy is not None:
            yield len(_SERIOUS) + 1, f"changes: {hazard.name}: {hazard.text}"
    yield from ((len(_SERIOUS) + 1, f"changes: {text}") for text in one.differences[:1])
    yield from ((len(_SERIOUS) + 2, f"not known: {line}") for line in one.open[:1])


def _statements(one: Planned) -> Iterator[tuple[str, str]]:
    yield "verdict", one.verdict
    if one.unreadable:
        yield "not read", one.unreadable
    if one.native is not None and one.native.runs == one.native.waits == NOT_KNOWN:
        yield "today", NOT_KNOWN
    elif one.native is not None:
        yield from _today(one.native)
    yield from (("open", str(line)) for line in one.open)
    if one.policy is not None:
        fields = ", ".join(f"{name} {plain(value)}" for name, value in one.entry.items())
        yield "policy", fields or "its native numbers"
        beside = [f"as the hazard {hazard.name} says" for hazard in one.hazards if hazard.differs]
        yield from (("differs", text) for text in (*one.differences, *beside) or ("in nothing",))
    else:
        yield "policy", "none: it is not in the file"
    yield from (("hazard", f"{hazard.name}: {hazard.text}") for hazard in one.hazards)


def _today(native: NativeRetries) -> Iterator[tuple[str, str]]:
    yield "runs", f"{native.runs:,}" if isinstance(native.runs, int) else native.runs
    if native.runs != 1:
        if native.waits == NOT_KNOWN:
            yield "waits", "as its code says"
        else:
            ends = dict.fromkeys(_in_words(wait) for wait in (*native.waits[:1], *native.waits[-1:]))
            yield "waits", "; at last ".join(ends)
        if isinstance(native.span, WaitRange):
            yield "together", _in_words(native.span) if native.waits else ""
        else:
            is_computed = native.runs != native.span == NOT_KNOWN
            yield "together", "as its code says" if is_computed else native.span
    yield "retried", native.retries
    yield "final", native.final
    yield "end", native.at_the_end


def _wrapped(text: str, first: str = "", other: str | None = None, style: str = "") -> list[Text]:
    """Return a text in the lines of a page. A path that is longer than a line stays whole."""
    beneath = first + "  " if other is None else other
    lines = textwrap.wrap(
        plain(text),
        page_width(),
        initial_indent=first,
        subsequent_indent=beneath,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [Text(line, style, no_wrap=True) for line in lines]


def _in_words(wait: WaitRange) -> str:
    """Return a wait with its ends and its mean."""
    words = [spoken(seconds) for seconds in (wait.least, wait.mean, wait.most)]
    return words[1] if len({*words}) == 1 else f"{words[0]} to {words[2]}, mean {words[1]}"


def check_path(file: str) -> None:
    """Raise ConfigurationError for a file that cannot take a plan, or that cannot be read."""
    if not file.endswith(".toml"):
        raise ConfigurationError(f"write: {file!r} must end in .toml")
    if Path(file).exists():
        load(file, "write")


def write(file: str, app: str, planned: Sequence[Planned]) -> str:
    """Write the policies of a plan to a file, and return what was done, in words.

    What is in the file stays as it is, comments, too: the tasks that no pattern in it names are added at its
    end. Raises ConfigurationError for a file that cannot take them, and OSError.
    """
    path = Path(file)
    if not path.exists():
        path.write_text("".join(f"{line}\n" for line in _whole_file(app, planned)), encoding="utf-8")
        return f"written to {file}"
    there = load(file, "write")
    new = [one for one in planned if one.policy is not None and there.of(one.name) is None]
    lines = [line for one in new for line in _table(one)]
    old = path.read_text(encoding="utf-8")
    text = old + "\n" * (not old.endswith("\n")) + "".join(f"{line}\n" for line in lines)
    try:
        read_toml(text)
    except ValueError as error:
        raise ConfigurationError(f"write: {file!r} cannot take tables at its end: {error}") from None
    path.write_text(text, encoding="utf-8")
    count = counted(len(new), "task", "tasks")
    return f"{count} added to {file}, and what was in it stays as it was: --diff shows what differs"


def differences(file: str, planned: Sequence[Planned], *, whole: bool = True) -> Iterator[str]:
    """Yield the differences between a file of policies and a plan, task by task.

    A pattern that names no task is a difference, too, if the plan is of the `whole` fleet.
    """
    there = load(file, "diff")
    if whole:
        try:
            there.check([one.name for one in planned], "task")
        except ConfigurationError as error:
            yield plain(str(error))
    for one in planned:
        installed = there.of(one.name)
        if one.policy is None:
            continue
        if installed is None:
            yield f"{plain(one.name)}: the file does not name it"
        else:
            yield from (f"{plain(one.name)}: {text}" for text in _unlike(installed.policies, one.policy))
            if one.retry_on and not (installed.retry_on and installed.retry_on.is_asked):
                yield f"{plain(one.name)}: retry_on is not {one.retry_on!r} in the file"
            if one.acks_late and not installed.acks_late:
                yield f"{plain(one.name)}: acks_late is not true in the file"


def _unlike(layers: Sequence[AnyPartial], planned: AnyPartial) -> Iterator[str]:
    """Yield the fields that differ: the plan's own fields, and the waits of a task that is retried."""
    if not planned:
        named = {name for layer in layers for name in fields_of(layer)} & NUMBERS
        yield from (
            f"{name} is set in the file, and the plan leaves it to the task" for name in sorted(named)
        )
        return
    wanted = RetryPolicy.merge(planned)
    compared = {**fields_of(planned), **(dict.fromkeys(_WAITS, ...) if wanted.runs > 1 else {})}
    said = RetryPolicy.merge(*layers).to_ojs(only=compared)
    for name, value in wanted.to_ojs(only=compared).items():
        if said[name] != value:
            yield f"{name} is {json.dumps(said[name])} in the file, and the plan says {json.dumps(value)}"


def _whole_file(app: str, planned: Sequence[Planned]) -> Iterator[str]:
    yield f"# Written by `ojs-bridge plan {plain(app)}`: the retry policies nearest to what each task does."
    yield '# install(app, bridge, policies="this file") moves these tasks, and leaves the others native.'
    yield "# install(app, bridge), without a file, moves all tasks with their native numbers."
    yield "# Where a table sets numbers, a retry has the arguments that were sent, unchanged."
    for one in planned:
        yield from _table(one)
    if all(one.policy is None for one in planned):
        yield from ("", "[policies]  # It has no task, and so no task is moved.")


def _table(one: Planned) -> Iterator[str]:
    yield ""
    if one.unreadable:
        yield f"# {plain(one.name)} could not be read: {plain(one.unreadable)}"
    if one.policy is None:
        yield f"# {plain(one.name)} is left out, and stays native: what it does is not known:"
    yield from (f"# not known: {plain(str(line))}" for line in one.open)
    if one.policy is None:
        return
    yield from (f"# differs: {plain(text)}" for text in one.differences)
    yield from (f"# {plain(hazard.name)}: {plain(hazard.text)}" for hazard in one.hazards)
    if not one.entry:
        yield "# its own numbers: it waits as its code says; max_attempts would cap these waits"
    yield f"[policies.{_string(one.name)}]"
    yield from (f"{field} = {_value(value)}" for field, value in one.entry.items())


def _value(value: object) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)


def _string(text: str) -> str:
    """Return a TOML basic string: as in JSON, but for DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
