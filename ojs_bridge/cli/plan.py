"""`ojs-bridge plan`: what moving a fleet to the bridge would change, task by task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from typing import Annotated, Any

import typer

from ..migration.plan.planned import Planned
from .apps import app_of, is_celery, load_tasks
from .plan_files import check_path, write
from .plan_tables import as_markdown, show_plan
from .printing import say, show_json


class Format(str, Enum):
    """How a plan is told."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


def plan(
    app: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:APP", help="The Celery app or Dramatiq broker, as its framework writes it."
        ),
    ],
    tasks: Annotated[
        list[str] | None,
        typer.Argument(metavar="TASK", help="Only these: names, or patterns such as a.*"),
    ] = None,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import", metavar="MODULE", help="Import this one too, as `dramatiq broker MODULE` does."
        ),
    ] = None,
    how: Annotated[
        Format,
        typer.Option("--format", help="A table for people, Markdown for a review, JSON one task a line."),
    ] = Format.TABLE,
    file: Annotated[
        str | None,
        typer.Option(
            "--write", metavar="FILE.toml", help="Also write the policies, as `install` reads them."
        ),
    ] = None,
) -> None:
    """Show what each task does today when it fails, the retry policy nearest to that, and what to look at.

    No task is called, nothing is sent.
    """
    if file is not None:
        check_path(file)
    found = _of(app_of(app, modules or ()), tasks or ())
    match how:
        case Format.JSON:
            for one in found:
                show_json({**asdict(one), "exact": one.policy is not None and not one.differences})
        case Format.MARKDOWN:
            typer.echo(as_markdown(found), nl=False)
        case Format.TABLE:
            show_plan(found)
    if file is not None:
        write(file, app, found)
        say(f"written to {file}")


def _of(app: Any, names: Sequence[str]) -> list[Planned]:
    """Return the plan of an app or broker; raises ConfigurationError for a name that matches no task."""
    if is_celery(app):
        from ..migration.plan.celery import of_celery

        load_tasks(app)
        return of_celery(app, names)
    from ..migration.plan.dramatiq import of_dramatiq

    return of_dramatiq(app, names)
