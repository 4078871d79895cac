"""The whole program: every group of commands, `serve`, `health`, `audit` and `mark`."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from copy import copy
from functools import partial
from importlib import metadata
from typing import Annotated, Any

import typer
from typer import Argument, Option

from ..errors import ConfigurationError
from ..operations.audit import Record
from ..operations.health import SECONDS
from . import __doc__ as about
from . import dead_letters, groups, holds, operations, plan, policy, waiting
from . import now as moments
from .commands import (
    ID_HELP,
    INCOMPLETE,
    OUT_OF_REACH,
    AsJson,
    Cursor,
    Limit,
    command,
    group_of,
    show_entries,
)
from .finding import CELERY_APP, Place
from .letters import WHEN, time_from, whereabouts
from .printing import Listing, answer, brief_time_of, plain, say, show, table, time_of

_EXIT_CODES = " ".join((about or "").partition("\n\n")[2].split())
#: The panels of the help, in the order in which a user needs them.
_BEFORE, _FAILED, _RUNNING = "Before you install", "Failed jobs", "Running"
_GROUPS = {
    groups.group: _FAILED,
    waiting.RETRIES.group: _FAILED,
    operations.group: _FAILED,
    waiting.ALL.group: _RUNNING,
    waiting.SCHEDULED.group: _RUNNING,
    policy.group: _BEFORE,
}
#: The commands on dead letters: what there is, what is done about it, and what is needed more seldom.
IN_THE_ORDER_OF_USE = (
    *("groups", "list", "show", "stats", "arguments", "watch", "replay", "delete", "purge", "mute", "unmute"),
    *("resolve", "unresolve"),
    *("export", "import", "prune"),
)

program = group_of(
    "ojs-bridge",
    "Find what your Celery or Dramatiq fleet loses, and send failed jobs back.",
    add_completion=True,
)
program.info.epilog = (
    f"Start with: ojs-bridge plan MODULE:APP (changes nothing, needs no store). {_EXIT_CODES}"
)
for made, panel in _GROUPS.items():
    program.add_typer(made, epilog=_EXIT_CODES, rich_help_panel=panel)
command(dead_letters.group, "replay", changes=True)(operations.replay)
_OF_LETTERS = {one.name or "": one for one in dead_letters.group.registered_commands}
dead_letters.group.registered_commands = [_OF_LETTERS[name] for name in IN_THE_ORDER_OF_USE]
for name in ("list", "show", "replay"):
    # Whoever types them means dead letters.
    alias = copy(_OF_LETTERS[name])
    alias.hidden = True
    program.registered_commands.append(alias)
command(program, "plan", panel=_BEFORE)(plan.plan)


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


@command(program, "job", panel=_FAILED)
def job(
    place: Place,
    job_id: Annotated[str, Argument(metavar="ID", help=f"The job's id, {ID_HELP}")],
    as_json: AsJson = False,
) -> None:
    """Show where a job is, its attempts and errors: its dead letter, or as it waits.

    The store does not know a job that waits in the broker, runs, has succeeded or was dropped.
    """
    jobs = place.bridge.jobs
    found = jobs.get(jobs.id_of(job_id))
    answer(found.to_ojs(), *whereabouts(found), as_json=as_json)


command(program, "now", panel=_RUNNING)(moments.now)
command(program, "rates", panel=_RUNNING)(moments.rates)
command(program, "report", panel=_RUNNING)(moments.report)
command(program, "undo", changes=True, panel=_FAILED)(operations.undo)
command(program, "pause", changes=True, panel=_RUNNING)(holds.pause)
command(program, "resume", changes=True, panel=_RUNNING)(holds.resume)
command(program, "holds", panel=_RUNNING)(holds.holds)
command(program, "limit", changes=True, panel=_RUNNING)(holds.limit)
command(program, "limits", panel=_RUNNING)(holds.limits)


@command(program, "serve", panel=_RUNNING)
def serve(
    place: Place,
    host: Annotated[str, Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="The port to listen on.")] = 8787,
    trusted_proxies: Annotated[
        str | None,
        Option(
            metavar="ADDRESSES",
            help="The addresses of proxies, such as 127.0.0.1,10.0.0.0/8, whose X-Forwarded-For names the "
            "client for the audit and for limits.",
        ),
    ] = None,
    user_header: Annotated[
        str | None, Option(help="The header in which a proxy that guards this server names the user.")
    ] = None,
) -> None:
    """Show the page in a browser, and answer over HTTP.

    OJS_BRIDGE_OPERATOR_TOKEN, OJS_BRIDGE_REPLAYER_TOKEN and OJS_BRIDGE_READER_TOKEN guard both. So does
    OJS_BRIDGE_TOKENS, a list of tokens with names: alice:operator:TOKEN,ci:reader:TOKEN. A replayer replays
    dead letters as they are, and changes and deletes nothing.
    """
    try:
        from ..http import serve as serve_http
    except ImportError as missing:
        raise ConfigurationError(f"http: {missing}") from None
    names = ("OPERATOR_TOKEN", "REPLAYER_TOKEN", "READER_TOKEN", "TOKENS")
    tokens = {name.lower(): os.environ.get(f"OJS_BRIDGE_{name}") or None for name in names}
    user = user_header and (lambda request: request.headers.get(user_header))
    proxies = trusted_proxies or None
    serve_http(place.bridge, host=host, port=port, user=user or None, trusted_proxies=proxies, **tokens)


def run() -> None:
    """Run the program with the process's own arguments, and exit."""
    _escape_what_no_terminal_can_show()
    program()


def run_under_celery(app: Any, name: str, words: Sequence[str]) -> None:
    """Run a command, or a command of a group, with an app's own bridge, and exit."""
    _escape_what_no_terminal_can_show()
    CELERY_APP.set(app)
    typer.main.get_group(program).commands[name].main([*words], prog_name=f"celery {name}")


def _escape_what_no_terminal_can_show() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if logging.lastResort:
        logging.lastResort.setFormatter(_Plain())


class _Plain(logging.Formatter):
    """The form of a line of the log where nobody has set up logging; a warning may name a job's id."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return plain(super().format(record))


@command(program, "health", panel=_RUNNING)
def health(
    *,
    place: Place,
    timeout: Annotated[float, Option(min=0.1, help="The seconds to wait for answers.")] = SECONDS,
    as_json: AsJson = False,
) -> int | None:
    """Tell whether store and, with --app, broker answer, workers were seen lately, and no retry is overdue.

    Exit codes: 0 all is well; 1 workers are dead, jobs wait where no worker takes them, or a retry is
    overdue; 3 the store or the broker is away.
    """
    report = place.bridge.health.check(timeout)
    rows = ((name, check.status, check.message) for name, check in report.checks.items())
    answer(report.to_ojs(), table(("", "status", ""), rows), as_json=as_json)
    return {"away": OUT_OF_REACH, "degraded": INCOMPLETE}.get(report.status)


@command(program, "audit", panel=_RUNNING)
def audit(
    *,
    place: Place,
    since: Annotated[str | None, Option(help=f"At this time or later. {WHEN}.")] = None,
    until: Annotated[str | None, Option(help=f"Before this time. {WHEN}.")] = None,
    who: Annotated[
        str | None, Option(help="Only of this name, or of a pattern such as *@shop.example")
    ] = None,
    action: Annotated[str | None, Option(help="Only this action, or a pattern such as waiting.*")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List who did what in the last 180 days, newest first; if there is more, a cursor goes to stderr."""
    now = place.bridge.engine.now()
    after, before = time_from("since", since, now), time_from("until", until, now)
    read = partial(place.bridge.audit.list, since=after, until=before, who=who, action=action)
    page = read(limit=limit, cursor=cursor)
    show_entries(page.records, _table, "no records", as_json=as_json)
    if page.next_cursor:
        say(f"there may be more: --cursor {page.next_cursor}")


@command(program, "mark", panel=_RUNNING)
def mark(
    *,
    place: Place,
    text: Annotated[str, Argument(metavar="TEXT", help="The text of the mark, such as v42.")],
    at: Annotated[str | None, Option(help=f"For another time than now. {WHEN}.")] = None,
    as_json: AsJson = False,
) -> None:
    """Mark a moment, such as a deploy, on the charts of the page."""
    when = time_from("at", at, place.bridge.engine.now())
    made = place.bridge.marks.add(text, at=when)
    answer(made.to_ojs(), f"{made.text}: marked at {time_of(made.at)} UTC", as_json=as_json)


def _table(records: Sequence[Record]) -> Listing:
    headings = ("at (UTC)", "who", "from", "action", "number", "outcome", "on", "reason")
    brief = ("at (UTC)", "who", "action", "number", "outcome", "on")
    return Listing(table(headings, map(_row, records)), table(brief, map(_brief_row, records)))


def _row(record: Record) -> tuple[object, ...]:
    place = f"{record.via} {record.address}".strip()
    number = "" if record.count is None else record.count
    on, at = _subject(record), time_of(record.at)
    return (at, record.who, place, record.action, number, _outcome(record), on, record.reason)


def _brief_row(record: Record) -> tuple[object, ...]:
    number = "" if record.count is None else record.count
    on = f"{_subject(record)} ({record.reason})" if record.reason else _subject(record)
    return (brief_time_of(record.at), record.who, record.action, number, _outcome(record), on)


def _outcome(record: Record) -> str:
    return f"{record.outcome}: {record.error}" if record.error else record.outcome


def _subject(record: Record) -> str:
    """Return the subject of a record in a few words."""
    fields = {name: value for name, value in record.subject.items() if name != "id_count"}
    ids = fields.pop("ids", [])
    if len(ids) < record.subject.get("id_count", 0):
        ids = [*ids, "…"]
    if "operation" not in fields and (until := fields.pop("undo_until", None)):
        fields |= {"undo": record.id, "until": until}
    words = [*ids, *(f"{name} {_word(value)}" for name, value in fields.items())]
    return ", ".join(words)


def _word(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={inner}" for name, inner in value.items()) or "all"
    return value if isinstance(value, str) else json.dumps(value)
