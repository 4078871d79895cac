"""`ojs-bridge dead-letters groups`, `mute` and `unmute`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from typer import Argument, Option

from ..operations.groups import ErrorGroup
from ..store import Order
from .commands import AsJson
from .finding import Place
from .letters import Filter, time_after
from .printing import Listing, answer, brief_time_of, plain, show, show_json, table, time_of

_BARS = " ▁▂▃▄▅▆▇█"
#: The columns of a sparkline.
_STEPS = 16

Fingerprint = Annotated[str, Argument(metavar="FINGERPRINT", help="A group, as `groups` shows it.")]


def groups(
    *,
    place: Place,
    chosen: Filter,
    order: Annotated[Order, Option(help="The last seen first, or the largest.")] = "last",
    muted: Annotated[bool, Option("--muted", help="List muted groups, too.")] = False,
    limit: Annotated[int, Option(help="The most groups to list, 1 to 200.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List dead letters by their faults: the job type, the place in your code, the error and its message.

    Messages that differ in numbers, ids and paths are one group.

    Replay, delete or export a group with the option --group of the other commands. --text is refused: groups
    are not searched for one.
    """
    kind = chosen.kind(place.bridge.engine.now())
    found = place.bridge.dead_letters.groups.list(order=order, muted=muted, limit=limit, steps=_STEPS, **kind)
    if as_json:
        for group in found:
            show_json(group.to_ojs())
    elif found:
        show(_table(found))
    else:
        show(f"no groups{place.in_namespace}")


def mute(
    *,
    place: Place,
    fingerprint: Fingerprint,
    lasting: Annotated[str | None, Option("--for", help="For so long, such as P7D or 2h.")] = None,
    as_json: AsJson = False,
) -> None:
    """Leave a group out of the list, for seven days or so long as you say; its letters stay as they are.

    The mute is lifted when the group grows by more letters than it has now.
    """
    until = None if lasting is None else time_after("for", lasting, place.bridge.engine.now())
    made = place.bridge.dead_letters.groups.mute(fingerprint, until=until)
    told = f"muted until {time_of(made.until)} UTC, or until more than {made.count} more letters have died"
    answer(made.to_ojs(), f"{fingerprint}: {told}", as_json=as_json)


def unmute(*, place: Place, fingerprint: Fingerprint, as_json: AsJson = False) -> None:
    """Take the mute of a group back."""
    place.bridge.dead_letters.groups.unmute(fingerprint)
    answer({"fingerprint": fingerprint, "muted": False}, f"{fingerprint}: unmuted", as_json=as_json)


def _table(found: Sequence[ErrorGroup]) -> Listing:
    headings = ("group", "letters", "first seen (UTC)", "last seen", "deaths", "types", "queues", "error")
    brief = ("group", "letters", "last seen", "error")
    return Listing(table(headings, map(_row, found)), table(brief, map(_brief_row, found)))


def _row(shown: ErrorGroup) -> tuple[object, ...]:
    group = shown.group
    times = (time_of(group.first_at), time_of(group.last_at))
    touched = (", ".join(group.types), ", ".join(group.queues))
    return (group.fingerprint, group.count, *times, sparkline(group.deaths), *touched, _error(shown))


def _brief_row(shown: ErrorGroup) -> tuple[object, ...]:
    group = shown.group
    return (group.fingerprint, group.count, brief_time_of(group.last_at), _error(shown))


def _error(shown: ErrorGroup) -> str:
    muted = f"(muted by {shown.mute.by}) " if shown.mute else ""
    place = f" ({plain(shown.frame)})" if shown.frame else ""
    return f"{muted}{plain(shown.group.sample.error_type)}: {plain(shown.pattern)}{place}"


def sparkline(counts: Sequence[int]) -> str:
    """Return counts as bars, the greatest as a whole block."""
    most = max((*counts, 1))
    return "".join(_BARS[-(-n * (len(_BARS) - 1) // most)] for n in counts)
