"""`ojs-bridge pause`, `resume` and `holds`: which jobs may not begin; `limit` and `limits`: how many may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from typer import Argument, Option

from ..operations.holds import Shown
from ..operations.limits import LimitState
from ..rules.notations import per_period
from .commands import AsJson, show_entries
from .finding import Place
from .letters import LATER, time_to
from .printing import Listing, answer, brief_time_of, listing, say, table, time_of


@dataclass(frozen=True)
class Named:
    """The options that name the jobs of a pause: they have all that is named."""

    type: Annotated[
        str | None, Argument(metavar="TYPE", help="A job type, such as billing.*; '*' is every type.")
    ] = None
    queue: Annotated[str | None, Option(help="The jobs of this queue.")] = None
    error_type: Annotated[
        str | None, Option(help="The retries whose last error has this type, such as external.stripe.*")
    ] = None
    dependency: Annotated[str | None, Option(help="The jobs that need this dependency.")] = None


def pause(
    place: Place,
    named: Named,
    until: Annotated[str | None, Option(help=f"When it ends by itself. {LATER}.")] = None,
    as_json: AsJson = False,
) -> None:
    """Hold jobs in the store: they do not begin, and use no attempt.

    Every worker knows it within two seconds. Jobs that run, run on.
    """
    bridge = place.bridge
    at = None if until is None else time_to("until", until, bridge.engine.now())
    hold = bridge.pause(**asdict(named), until=at)
    ends = f" until {time_of(hold.until)} UTC" if hold.until else ""
    answer(hold.to_ojs(), f"{hold.id}: on{ends}", as_json=as_json)


def resume(
    place: Place,
    named: Named,
    hold_id: Annotated[
        str | None, Option("--id", help="The pause's id, in place of its type, queue and error type.")
    ] = None,
    rate: Annotated[str | None, Option(help="No faster than this, such as 50/s or 100/m.")] = None,
    as_json: AsJson = False,
) -> None:
    """End the pause of a type, queue and error type: its jobs go on, in their order."""
    hold = place.bridge.resume(**asdict(named), id=hold_id, rate=rate)
    pace = f", {rate} at most" if rate else ""
    answer(hold.to_ojs(), f"{hold.id}: over; its jobs go on{pace}", as_json=as_json)


def holds(place: Place, as_json: AsJson = False) -> None:
    """List what holds jobs: who, why, since and until when, and how many are held."""
    bridge = place.bridge
    shown = bridge.holds.list()
    show_entries(shown, _table, "no holds", as_json=as_json)
    now = bridge.engine.now()
    for hold in (one.hold for one in shown):
        if is_long := hold.still_on(now):
            say(f"{hold.id}: {is_long}")


def limit(
    place: Place,
    dependency: Annotated[str, Argument(help="The dependency's name.")],
    rate: Annotated[str | None, Option(help="How many jobs begin, such as 10/s, 100/m or 5/h.")] = None,
    concurrency: Annotated[int | None, Option(help="How many run at a time; 0 holds them all.")] = None,
    until: Annotated[str | None, Option(help=f"When it ends by itself. {LATER}.")] = None,
    as_json: AsJson = False,
) -> None:
    """Limit the jobs of a dependency, in the place of its own rate or concurrency.

    Every worker knows it within two seconds. Jobs that run, run on. `resume --id limit:NAME` takes it back.
    """
    bridge = place.bridge
    at = None if until is None else time_to("until", until, bridge.engine.now())
    hold = bridge.limit(dependency, rate=rate, concurrency=concurrency, until=at)
    ends = f" until {time_of(hold.until)} UTC" if hold.until else ""
    answer(hold.to_ojs(), f"{hold.id}: on{ends}", as_json=as_json)


def limits(place: Place, as_json: AsJson = False) -> None:
    """List the limits of dependencies, and how many jobs run and wait."""
    show_entries(place.bridge.limits.list(), _limits_table, "no limits", as_json=as_json)


def _limits_table(states: Sequence[LimitState]) -> Listing:
    rows = [
        (
            it.key if it.argument is None else f"{it.key}, each {it.argument}",
            "{} in {}".format(*per_period(it.rate)) if it.rate else "",
            "" if it.concurrency is None else f"{it.active} of {it.concurrency}",
            it.waiting,
            ": ".join(filter(None, (it.operator.by, it.operator.why))) if it.operator else "",
            time_of(it.operator.until if it.operator else None),
        )
        for it in states
    ]
    headings = ("dependency", "rate", "running", "held", "set by", "until (UTC)")
    return listing(headings, rows, headings[:5])


def _table(shown: Sequence[Shown]) -> Listing:
    headings = ("id", "held", "by", "since (UTC)", "until (UTC)", "why")
    whole = (
        (it.hold.id, it.held, it.hold.by, time_of(it.hold.since), time_of(it.hold.until), _why(it))
        for it in shown
    )
    brief = ((it.held, brief_time_of(it.hold.since), it.hold.id, _who_and_why(it)) for it in shown)
    return Listing(table(headings, whole), table(("held", "since (UTC)", "id", "by"), brief))


def _why(it: Shown) -> str:
    """Return the words of the operator, or of what holds jobs without one."""
    return it.hold.why if it.hold.by else it.hold.reason


def _who_and_why(it: Shown) -> str:
    return ": ".join(filter(None, (it.hold.by, _why(it))))
