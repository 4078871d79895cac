"""`ojs-bridge plan`: the changes that the bridge would bring to a fleet, task by task."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Annotated, Any

from typer import Argument, Option

from ..errors import ConfigurationError
from ..migration.plan import Planned
from .commands import INCOMPLETE
from .finding import app_of, is_celery, load_tasks
from .plan_files import check_path, differences, write
from .plan_pages import show_all, show_summary
from .printing import say, show, show_json


class Format(str, Enum):
    """The form of a plan."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True)
class Answer:
    """The options for the form of a plan, and for its file."""

    how: Annotated[
        Format,
        Option("--format", help="A table for people, JSON one task a line."),
    ] = Format.TABLE
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
        list[str] | None,
        Argument(metavar="TASK", help="Only these tasks: names, or patterns such as a.*"),
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
        found = _of(loaded, tasks or ())
    if answer.verify:
        found = _verified(loaded, found)
    if answer.other is not None:
        lines = [*differences(answer.other, found, whole=not tasks)]
        show(*lines or [f"{answer.other} says what the plan says"])
        return INCOMPLETE if lines else 0
    match answer.how:
        case Format.JSON:
            for one in found:
                show_json({**asdict(one), "verdict": one.verdict, "exact": one.exact})
        case Format.TABLE:
            (show_all if answer.every else show_summary)(app, found)
    if answer.file is not None:
        say(write(answer.file, app, found))
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


def _of(app: Any, names: Sequence[str]) -> list[Planned]:
    """Return the plan of an app or broker; raises ConfigurationError for a name that matches no task."""
    if is_celery(app):
        from ..migration.plan.celery import of_celery

        load_tasks(app)
        return of_celery(app, names)
    from ..migration.plan.dramatiq import of_dramatiq

    return of_dramatiq(app, names)


def _verified(app: Any, found: Sequence[Planned]) -> list[Planned]:
    """Return a plan with measurements; raises ConfigurationError for an app that is already bridged."""
    logging.disable(logging.CRITICAL)  # each run fails, and logs it
    try:
        with redirect_stdout(sys.stderr):
            return _measured(app, found)
    finally:
        logging.disable(logging.NOTSET)


def _measured(app: Any, found: Sequence[Planned]) -> list[Planned]:
    if is_celery(app):
        from ..migration.plan.celery import measured

        return measured(app, found)
    from ..migration.plan.dramatiq import measured as measured_on_dramatiq

    return measured_on_dramatiq(app, found)
