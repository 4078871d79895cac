"""`celery -A proj dead-letters ...`: the same commands, with the app's own bridge.

Celery loads this whenever it starts, workers too: typer and rich are imported when the command runs. It is a
command of the click that Celery uses, which typer need not share.
"""

from __future__ import annotations

import sys

import click

from . import MISSING


@click.command(
    "dead-letters",
    short_help="Search, replay and delete dead letters.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def dead_letters(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Search, replay and delete dead letters."""
    try:
        from .program import run_under_celery
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "tomli"):
            raise
        sys.stderr.write(f"{MISSING}\n")
        sys.exit(2)
    run_under_celery(ctx.obj.app, words)
