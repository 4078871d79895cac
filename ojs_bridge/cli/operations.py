"""`ojs-bridge operations`: operations on many letters or parked retries, wherever they run."""

from __future__ import annotations

from typing import Annotated, Any

from rich.console import RenderableType
from typer import Argument, Option

from ..operations.operation import ON_RETRIES, Operation
from .commands import INCOMPLETE, OUT_OF_REACH, AsJson, command, group_of
from .finding import Place
from .letters import told
from .printing import answer, counted, progress_bar, say, show, show_json, table, time_of

group = group_of("operations", "Operations on many letters or parked retries: list, stop, resume.")

#: The past of each action.
DONE = {"retry": "replayed", "purge": "deleted", "run": "made due", "cancel": "cancelled"}

Id = Annotated[str, Argument(metavar="ID", help="The operation's id.")]


@command(group, "list")
def list_(
    place: Place,
    limit: Annotated[int, Option(min=1, max=1000, help="The most operations to list.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the operations of the last 30 days, newest first."""
    found = place.bridge.operations.list(limit=limit)
    if as_json:
        for operation in found:
            show_json(_json_of(operation))
        return
    headings = ("id", "action", "began (UTC)", "state", "so far", "of", "jobs")
    show(table(headings, map(_row, found)) if found else "no operations")


@command(group, "show")
def show_one(place: Place, operation_id: Id, as_json: AsJson = False) -> None:
    """Show an operation: its choice, its progress, what became of its jobs, and the letters that stayed.

    Of the jobs that died again, it shows the fifty newest letters.
    """
    found = place.bridge.operations.get(operation_id)
    known = {name: value for name, value in _json_of(found).items() if value not in (None, "", [], {})}
    known["action"] = _action(found)
    known["jobs"] = str(found.jobs or "")
    facts = table(("", ""), ((name, value) for name, value in known.items() if name != "errors"))
    dead, _ = place.bridge.operations.died_again(operation_id)
    rows = [(letter.id, letter.error_type, time_of(letter.discarded_at)) for letter in dead]
    again = [table(("id", "died again of", "at (UTC)"), rows)] if rows else []
    answer(_json_of(found), facts, *_stayed(found), *again, as_json=as_json)


@command(group, "stop", changes=True)
def stop(place: Place, operation_id: Id, as_json: AsJson = False) -> None:
    """Ask an operation to stop; the process that carries it out does so within seconds."""
    found = place.bridge.operations.stop(operation_id)
    answer(_json_of(found), f"{found.id}: {found.state}, {_progress(found)}", as_json=as_json)


@command(group, "resume", changes=True)
def resume(place: Place, operation_id: Id, as_json: AsJson = False) -> int | None:
    """Carry out the rest of an operation that was stopped, interrupted or failed."""
    found = place.bridge.operations.get(operation_id)
    # A replay is published by the app; a purge needs only the store.
    operations = (place.publishing_bridge if found.action == "retry" else place.bridge).operations
    return carry_out(place, operations.resume(operation_id), as_json=as_json)


def carry_out(place: Place, operation: Operation, *, as_json: bool) -> int | None:
    """Carry out an operation, show its progress and its end; return the exit code."""
    if not as_json:
        say(f"operation {operation.id}; Ctrl-C stops it")
    operations = place.bridge.operations
    try:
        with progress_bar(_action(operation), operation.total) as progress:
            ended = operations.run(operation, progress=lambda now: progress(now.matched))
    except KeyboardInterrupt:
        ended = operations.get(operation.id)
    answer(_json_of(ended), _progress(ended), *_stayed(ended), as_json=as_json)
    if ended.jobs and (ended.jobs.waiting or ended.jobs.running):
        say(f"what becomes of them: ojs-bridge operations show {ended.id}")
    if ended.state == "done":
        return INCOMPLETE if ended.failed else None
    say(f"{ended.state}: {ended.why}; go on with: ojs-bridge operations resume {ended.id}")
    return OUT_OF_REACH if ended.state == "failed" else INCOMPLETE


def _json_of(operation: Operation) -> dict[str, Any]:
    errors = [{"id": letter_id, "error": why} for letter_id, why in operation.errors]
    return {**operation.to_ojs(), "errors": errors, "confirmed": True}


def _row(operation: Operation) -> tuple[object, ...]:
    total = "" if operation.total is None else operation.total
    began = time_of(operation.began_at)
    return (
        operation.id,
        _action(operation),
        began,
        operation.state,
        operation.succeeded,
        total,
        str(operation.jobs or ""),
    )


def _action(operation: Operation) -> str:
    """Return the word for an action; the specification's `retry` of a dead letter is a replay to people."""
    return "replay" if operation.action == "retry" else operation.action


def _progress(operation: Operation) -> str:
    stayed = f", {operation.failed:,} stayed" if operation.failed else ""
    number = operation.succeeded
    what = counted(number, "retry", "retries") if operation.action in ON_RETRIES else told(number)
    became = f" ({operation.jobs})" if operation.jobs and operation.succeeded else ""
    return f"{what} {DONE[operation.action]}{became}{stayed}"


def _stayed(operation: Operation) -> list[RenderableType]:
    return [table(("id", "why it stayed"), operation.errors)] if operation.errors else []
