"""The whole program: every group of commands, and `serve`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import typer
from typer import Option

from ..errors import ConfigurationError
from . import __doc__ as about
from . import (
    dead_letters,
    fleet,
    groups,
    operations,
    plan,
    policy,
    replays,
    retries,
)
from .commands import command, group_of
from .finding import CELERY_APP, Place
from .printing import show

_GROUPS = (dead_letters, retries, operations, policy)
_EXIT_CODES = (about or "").partition("\n\n")[2]

program = group_of(
    "ojs-bridge",
    "Plans, dead letters, parked retries and retry policies of a Celery or Dramatiq fleet.",
    add_completion=True,
)
program.info.epilog = " ".join(_EXIT_CODES.split())
for module in _GROUPS:
    program.add_typer(module.group, epilog=program.info.epilog)
command(dead_letters.group, "replay", changes=True)(replays.replay)
command(dead_letters.group, "groups")(groups.groups)
command(dead_letters.group, "mute", changes=True)(groups.mute)
command(dead_letters.group, "unmute", changes=True)(groups.unmute)
command(program, "plan")(plan.plan)
command(program, "audit")(fleet.audit)
command(program, "mark")(fleet.mark)
command(program, "health")(fleet.health)


def _show_version(wanted: bool) -> None:
    if wanted:
        show(f"ojs-bridge {metadata.version('ojs-bridge')}")
        raise typer.Exit


@program.callback()
def options(
    version: Annotated[
        bool, Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the program's own options."""


@command(program, "serve")
def serve(
    place: Place,
    host: Annotated[str, Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="The port to listen on.")] = 8787,
    user_header: Annotated[
        str | None, Option(help="The header in which a proxy that guards this server names the user.")
    ] = None,
) -> None:
    """Serve the page and its HTTP API; OJS_BRIDGE_OPERATOR_TOKEN and OJS_BRIDGE_READER_TOKEN guard them.

    So does OJS_BRIDGE_TOKENS, a list of tokens with names: alice:operator:TOKEN,ci:reader:TOKEN.
    """
    try:
        from ..http import serve as serve_http
    except ImportError as missing:
        raise ConfigurationError(f"http: {missing}") from None
    names = ("OPERATOR_TOKEN", "READER_TOKEN", "TOKENS")
    tokens = {name.lower(): os.environ.get(f"OJS_BRIDGE_{name}") or None for name in names}
    user = user_header and (lambda request: request.headers.get(user_header))
    serve_http(place.bridge, host=host, port=port, user=user or None, **tokens)


def run() -> None:
    """Run the program with the process's own arguments, and exit."""
    _escape_what_no_terminal_can_show()
    program()


def run_under_celery(app: Any, group: str, words: Sequence[str]) -> None:
    """Run a command of a group with an app's own bridge, and exit."""
    _escape_what_no_terminal_can_show()
    CELERY_APP.set(app)
    [chosen] = (module.group for module in _GROUPS if module.group.info.name == group)
    typer.main.get_command(chosen).main([*words], prog_name=f"celery {group}")


def _escape_what_no_terminal_can_show() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
