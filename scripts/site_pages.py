"""The parts of the pages that are made from the code: settings, policies, events, commands, routes, names.

`python scripts/site_pages.py` writes them into the pages. A test says when a page is behind the code.
"""

from __future__ import annotations

import ast
import inspect
import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

from ojs_bridge import Bridge, RetryPolicy, Snooze
from ojs_bridge.adapters.private_names import names_in
from ojs_bridge.celery.compat import TESTING
from ojs_bridge.cli.program import program
from ojs_bridge.config.sources import SETTINGS
from ojs_bridge.engine import events
from ojs_bridge.engine.events import Event
from ojs_bridge.http.app import document
from ojs_bridge.operations.group import ErrorGroup
from ojs_bridge.operations.webhooks import facts_of
from ojs_bridge.rules.decision import GiveBack
from ojs_bridge.rules.faults import LIVE
from ojs_bridge.rules.job import Job, format_time
from ojs_bridge.rules.standard_errors import (
    AWS,
    GRPC,
    MONGODB,
    MYSQL,
    SMTP,
    SQLSTATES,
    STANDARD,
    STATUSES,
    ByValue,
)
from ojs_bridge.store import Group

#: The sections of the specification, `ojs-retry.md`, that define the fields of a policy.
SECTIONS = {
    "max_attempts": "2.2",
    "initial_interval": "2.2, 4",
    "backoff_coefficient": "2.2, 3.3",
    "max_interval": "2.2, 3.5",
    "jitter": "5",
    "non_retryable_errors": "6",
    "on_exhaustion": "2.2",
    "backoff_strategy": "3",
}
#: The way in which a variable's text is read.
FORMS = {
    "_as_it_is": "a text",
    "_integer": "an integer",
    "_boolean": "`true`, `false`, `1` or `0`",
    "_json": "JSON",
}
#: The values that standard errors are asked for.
VALUES = {
    "HTTP status": {**STATUSES, "other 4xx": "external.rejected", "other 5xx": "external.unavailable"},
    "gRPC code": GRPC,
    "AWS code": AWS,
    "SQLSTATE, or its class": SQLSTATES,
    "MySQL code": MYSQL,
    "MongoDB code": MONGODB,
    "SMTP reply": {**SMTP, "other 4xx": "external.unavailable", "other 5xx": "external.rejected"},
}
#: The settings that are no arguments of a bridge.
ELSEWHERE = {
    "policies": "The policies of `install` and `OJSRetries`: partial policies by name, or a file.",
    "reliable_fetch": "Whether a Celery worker notes what it takes from Redis in the same step.",
}


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table of Markdown."""
    lines = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    titles = [*head]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, ["---"] * len(titles), *lines))


def settings() -> str:
    """Return each setting: its argument, key and variable, its default, and what the docstring says."""
    said = ELSEWHERE | arguments()
    rows = (
        (
            f"`{name}`",
            f"`OJS_BRIDGE_{name.upper()}`",
            FORMS[setting.read.__name__],
            "none" if setting.default in (None, {}, ()) else f"`{setting.default}`",
            said[name],
        )
        for name, setting in SETTINGS.items()
    )
    return table(("In code, Django and TOML", "Variable", "In the variable", "Default", "Meaning"), rows)


def arguments() -> dict[str, str]:
    """Return what the docstring of a bridge says about each argument."""
    said = (inspect.getdoc(Bridge) or "").partition("Args:\n")[2]
    entries = re.split(r"^(?=    \w+: )", said, flags=re.MULTILINE)[1:]
    pairs = (" ".join(entry.split()).split(": ", 1) for entry in entries)
    return {name: meaning[0].upper() + meaning[1:] for name, meaning in pairs}


def policy() -> str:
    """Return each field of a policy, with its default and its section of the specification."""
    defaults = RetryPolicy().to_ojs()
    rows = (
        (
            f"`{name}`",
            f"`{json.dumps(defaults[name])}`" if name in defaults else "",
            field.description,
            SECTIONS[name],
        )
        for name, field in RetryPolicy.model_fields.items()
    )
    return table(("Field", "Default", "Meaning", "Section"), rows)


def event_types() -> str:
    """Return each type of event with its own fields."""
    fields: dict[str, dict[str, Any]] = {}
    for event in all_events():
        fields.setdefault(event.type, {}).update(event.data)
    rows = ((f"`{name}`", ", ".join(f"`{field}`" for field in of)) for name, of in sorted(fields.items()))
    return table(("Event", "Fields of `data`"), rows)


def all_events() -> list[Event]:
    """Return events of every type, as a small shop emits them in virtual time."""
    import dramatiq
    from dramatiq.brokers.stub import StubBroker

    from ojs_bridge.dramatiq import OJSRetries
    from ojs_bridge.testing import virtual_time

    broker = StubBroker()
    retry: Any = {"max_attempts": 2, "initial_interval": "PT2M", "on_exhaustion": "dead_letter"}
    broker.add_middleware(OJSRetries(Bridge(retry=retry)))
    charge = dramatiq.Actor(
        _fail, broker=broker, actor_name="charge", queue_name="default", priority=0, options={}
    )
    pauses = [Snooze("PT10S")]
    look = dramatiq.Actor(
        lambda: _snooze(pauses),
        broker=broker,
        actor_name="look",
        queue_name="default",
        priority=0,
        options={},
    )
    logging.disable(logging.CRITICAL)
    try:
        with virtual_time(broker) as ojs:
            look.send()
            charge.send()
            ojs.run()
            letters = ojs.bridge.dead_letters
            letters.replay(ojs.dead_letters[0].id)
            ojs.run()
            letters.delete(ojs.dead_letters[0].id)
            charge.send()
            ojs.run()
            letters.purge(confirm=True)
            charge.send()
            ojs.step()
            ojs.bridge.retries.cancel(ojs.parked[0].id)
            ojs.bridge.pause(queue="default")
            charge.send()
            ojs.step()
            ojs.bridge.resume(queue="default")
            return [*ojs.events, *_of_workers()]
    finally:
        logging.disable(logging.NOTSET)


def _fail() -> None:
    raise TimeoutError("the bank is silent")


def _snooze(pauses: list[Snooze]) -> None:
    if pauses:
        raise pauses.pop()


def _of_workers() -> list[Event]:
    """Return the events of a shutdown, a replay rule, a breaker and groups: virtual time has none of them."""
    now, job = datetime.now(timezone.utc), Job(id="j-1", type="charge", queue="default", replay_count=1)
    decision = GiveBack(reason="the worker is shutting down")
    given_back = events.of(job, decision, max_attempts=2, seconds=1.0, at=now)
    facts = facts_of(ErrorGroup(Group("0" * 16, 0, now, now, (), (), (), None), now, timedelta(1)))
    groups = [events.group(state, "0" * 16, now, facts) for state in LIVE]
    return [*given_back, events.replayed(job, now, rule="timeouts"), *_of_breakers(now), *groups]


def _of_breakers(now: datetime) -> list[Event]:
    """Return the events of a breaker."""
    counts = {"runs": 50, "failed": 48}
    return [
        events.breaker("opened", "bank", now, **counts, probe_at=format_time(now)),
        events.breaker("half_open", "bank", now, **counts, probes=3),
        events.breaker("closed", "bank", now, **counts, rate=2.5),
    ]


def command_line() -> str:
    """Return the help of every command."""
    command: Any = typer.main.get_command(program)
    command.commands = {name: one for name, one in command.commands.items() if not one.hidden}
    _say_in_full(command)
    with command.make_context("ojs-bridge", [], resilient_parsing=True) as context:
        text = get_docs_for_click(obj=command, ctx=context, name="ojs-bridge")
    return text.partition("\n")[2]


def _say_in_full(command: Any) -> None:
    """Let a list of commands have the first sentence of each, which the program cuts to fit a screen."""
    for each in getattr(command, "commands", {}).values():
        each.short_help = each.help.partition("\n\n")[0].replace("\n", " ")
        _say_in_full(each)


def routes() -> str:
    """Return every route of the HTTP API."""
    rows = (
        (
            f"`{method.upper()}`",
            f"`{path}`",
            operation["summary"],
            operation["x-ojs-bridge-role"],
            _parameters(operation),
            _body(operation),
        )
        for path, operations in document()["paths"].items()
        for method, operation in operations.items()
    )
    return table(("", "Route", "Effect", "Least role", "Parameters", "Body"), rows)


def _parameters(operation: Mapping[str, Any]) -> str:
    named = [parameter["name"] for parameter in operation.get("parameters", []) if parameter["in"] == "query"]
    return ", ".join(f"`{name}`" for name in named)


def _body(operation: Mapping[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {}).values()
    references = [media["schema"]["$ref"].rpartition("/")[2] for media in content]
    fields = [
        name for found in references[:1] for name in document()["components"]["schemas"][found]["properties"]
    ]
    return ", ".join(f"`{name}`" for name in fields)


def private_names() -> str:
    """Return each private name of a framework, what the bridge needs it for, and whether it is vital."""
    modules = [import_module(f"ojs_bridge.{name}.compat") for name in ("celery", "dramatiq")]
    names = [name for module in modules for name in names_in(vars(module)) if name.only != TESTING]
    rows = (
        (f"`{name.place}`", f"`{name.name}`", name.need, "vital" if name.keeps_jobs else "") for name in names
    )
    return table(("In", "Name", "The bridge needs it to", ""), rows)


def public_names(module: str) -> str:
    """Return each public name of a module with the first line of its docstring."""
    found, values = import_module(module), _docstrings_of_values()
    rows = (
        (f"`{name}`", (values.get(name) or inspect.getdoc(getattr(found, name)) or "").partition("\n")[0])
        for name in found.__all__
    )
    return table(("Name", "What it is"), rows)


def _docstrings_of_values() -> dict[str, str]:
    """Return what stands below each value and type alias of the package: Python has no docstring of them."""
    said = {}
    for path in (DOCS.parent / "ojs_bridge").rglob("*.py"):
        for value, below in pairwise(ast.parse(path.read_text("utf-8")).body):
            match value, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str() as doc)
                ):
                    said[name] = doc
    return said


def standard_errors() -> str:
    """Return the classes of the standard errors by their type, or by what says the type."""
    groups = defaultdict[str, list[str]](list)
    for name, entry in STANDARD.items():
        match entry:
            case ByValue():
                groups[f"by {entry.what}"].append(name)
            case (error_type, code):
                groups[f"{code.lower()}, or `{error_type}`"].append(name)
            case _:
                groups[f"`{entry}`"].append(name)
    rows = ((said, ", ".join(f"`{name}`" for name in names)) for said, names in groups.items())
    return table(("Type", "Errors"), rows)


def values_of_errors() -> str:
    """Return the values by which errors have their types."""
    rows = []
    for of, types in VALUES.items():
        groups = defaultdict[str, list[str]](list)
        for value, error_type in types.items():
            groups[error_type].append(value)
        rows += [(of, f"`{error_type}`", ", ".join(values)) for error_type, values in groups.items()]
    return table(("Of", "Type", "Values"), rows)


#: The parts by their names in the pages: `<!-- made: settings -->`.
PARTS = {
    "settings": settings,
    "policy": policy,
    "events": event_types,
    "command line": command_line,
    "routes": routes,
    "private names": private_names,
    "standard errors": standard_errors,
    "values of errors": values_of_errors,
}
#: A made part in a page: of the code, or of the public names of a module.
MADE = re.compile(
    r"^<!-- (?:made: (?P<part>[\w ]+)|names of (?P<module>[\w.]+)) -->\n.*?^<!-- end -->$", re.M | re.S
)
DOCS = Path(__file__).parents[1] / "docs"


def as_made(page: str) -> str:
    """Return a page with its made parts as the code has them now."""

    def part(place: re.Match[str]) -> str:
        text = PARTS[place["part"]]() if place["part"] else public_names(place["module"])
        return f"{place[0].partition(chr(10))[0]}\n{text.strip()}\n<!-- end -->"

    return MADE.sub(part, page)


if __name__ == "__main__":
    for path in DOCS.rglob("*.md"):
        page = path.read_text("utf-8")
        if (made := as_made(page)) != page:
            path.write_text(made, "utf-8")
            print(f"wrote {path.relative_to(DOCS)}")
