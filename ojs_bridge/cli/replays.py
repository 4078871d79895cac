"""`ojs-bridge dead-letters replay`: single ones, with changes, or all of a kind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..errors import InvalidRetryPolicy
from ..replaying import Bulk, override_of
from ..store import Stats
from .answers import counts, each, show_bulk, show_letters, told
from .asking import ask
from .dead_letters import found_of, group
from .finding import Place
from .kinds import Which, count
from .operation import command
from .options import AsJson, Yes
from .printing import progress_bar, show


@dataclass(frozen=True)
class Changes:
    """What is changed of single letters: None keeps; raises ValueError and InvalidRetryPolicy."""

    set_queue: Annotated[str | None, typer.Option("--set-queue", help="Send it to this queue.")] = None
    args: Annotated[str | None, typer.Option("--args", metavar="JSON", help="A list, in place of its.")] = (
        None
    )
    kwargs: Annotated[
        str | None, typer.Option("--kwargs", metavar="JSON", help="An object, in place of its.")
    ] = None
    meta: Annotated[
        str | None, typer.Option("--meta", metavar="JSON", help="Headers or options, merged over its.")
    ] = None
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="JSON", help="A partial policy, merged over its.")
    ] = None

    def read(self) -> dict[str, Any]:
        """Return the changes as the library takes them."""
        given = {name: json_of(name, getattr(self, name)) for name in ("args", "kwargs", "meta")}
        changes = {"queue": self.set_queue, **given, "retry": json_of("policy", self.policy)}
        try:
            override_of(**changes)
        except InvalidRetryPolicy as error:
            raise error.under("policy") from None
        return changes


@command(group, "replay")
def replay(
    *,
    place: Place,
    which: Which,
    changes: Changes,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Job ids.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All of the kind that the options say; asks.")
    ] = False,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", help="With --all: at most so many a second.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int | None:
    """Send dead letters back to their queues through their app: same ids, fresh attempts, history kept."""
    _check(ids, which, changes, rate, everything=everything)
    bridge = place.bridge if dry_run else place.publishing_bridge
    letters = bridge.dead_letters
    if ids:
        if dry_run:
            show_letters(found_of(letters, ids), as_json=as_json)
            return None
        overrides = changes.read()
        return each(ids, lambda letter_id: letters.retry(letter_id, **overrides), "replayed", as_json=as_json)
    kind = which.kind_until(bridge.now())
    matched = count(letters, kind)
    if dry_run:
        _show_what(matched, as_json=as_json)
        return None
    if matched.total:
        ask(f"Replay {told(matched.total)} from {place}?", *counts(matched), yes=yes)
    with progress_bar("replaying", matched.total) as progress:
        done = letters.retry_all(confirm=True, rate=rate, progress=progress, **kind)
    return show_bulk(done, "replayed", as_json=as_json)


def _check(
    ids: list[str] | None, which: Which, changes: Changes, rate: float | None, *, everything: bool
) -> None:
    """Raise ValueError for options that do not go together."""
    if bool(ids) == everything:
        raise ValueError("replay: say which: ids, or --all with options such as --queue and --type")
    if ids and (which != Which() or rate is not None):
        raise ValueError("replay: --rate and the options that say which go with --all, not with ids")
    if everything and changes != Changes():
        raise ValueError("replay: changes go with ids, not with --all")
    if rate is not None and not rate > 0:
        raise ValueError(f"rate: {rate!r} must be a number of jobs a second above zero")


def _show_what(matched: Stats, *, as_json: bool) -> None:
    if as_json:
        show_bulk(Bulk(matched.total, confirmed=False), "replayed", as_json=True)
    else:
        show(*counts(matched))


def json_of(name: str, text: str | None) -> Any:
    """Return what an option holds in JSON; raises ValueError."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {text!r} is not JSON: {error}") from None
