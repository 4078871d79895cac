"""`celery -A proj dead-letters ...`, `retries ...` and so on: the same commands, with the app's own bridge.

Celery loads this module whenever it starts, in workers, too: typer and rich are imported when a command runs.
The commands are made with Celery's own click, because typer may bring another one.
"""

from __future__ import annotations

import click

from . import the_program


def _command(name: str, does: str) -> click.Command:
    """Return a command for Celery that hands its words on to one of ours, or to a group of ours."""

    @click.command(
        name,
        help=does,
        short_help=does,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def run(ctx: click.Context, words: tuple[str, ...]) -> None:
        the_program().run_under_celery(ctx.obj.app, name, words)

    return run


dead_letters = _command("dead-letters", "Search, replay and delete dead letters.")
waiting = _command("waiting", "List, run, move and cancel all that waits in the store.")
retries = _command("retries", "List, run, move and cancel the retries that wait in the store.")
scheduled = _command("scheduled", "List, run, move and cancel the delayed jobs that wait in the store.")
pause = _command("pause", "Hold jobs in the store: they do not begin.")
resume = _command("resume", "End a pause: its jobs go on.")
holds = _command("holds", "List what holds jobs.")
limit = _command("limit", "Limit the jobs of a dependency.")
limits = _command("limits", "List the limits of dependencies.")
