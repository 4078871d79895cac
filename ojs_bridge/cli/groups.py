"""`ojs-bridge dead-letters groups`, and what operators say of groups: `mute`, `resolve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from typer import Argument, Option

from ..operations.group import ErrorGroup
from ..operations.groups import GroupOrder
from ..rules.faults import State
from . import dead_letters
from .commands import AsJson, command, show_entries
from .finding import Place
from .letters import LetterChoice, time_after
from .printing import Listing, answer, listing, plain, say, time_of

group = dead_letters.group

_BARS = " ▁▂▃▄▅▆▇█"
#: The columns of a sparkline.
_STEPS = 16

Fingerprint = Annotated[
    str, Argument(metavar="FINGERPRINT", help="A group, as `groups` shows it, or its beginning.")
]


@command(group, "groups")
def groups(
    *,
    place: Place,
    chosen: LetterChoice,
    order: Annotated[GroupOrder, Option(help="The last seen first, the largest, or the worst.")] = "last",
    muted: Annotated[bool, Option("--muted", help="List muted groups, too.")] = False,
    state: Annotated[State | None, Option(help="Only the groups of this state.")] = None,
    limit: Annotated[int, Option(help="The most groups to list, 1 to 200.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List dead letters by their faults: the job type, the place in your code, the error and its message.

    Messages that differ in numbers, ids and paths are one group. Errors whose jobs still retry are among
    them.

    Replay, delete or export a group with the option --group of the other commands. --text is refused: groups
    are not searched for one.
    """
    where = chosen.of(place)
    page = place.bridge.groups.list(where, order=order, state=state, muted=muted, limit=limit, steps=_STEPS)
    if len(page) == limit:
        say("there may be more: --limit lists up to 200")
    show_entries(page, _table, f"no groups{place.in_namespace}", as_json=as_json)


@command(group, "mute", changes=True)
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
    fingerprint = place.bridge.groups.id_of(fingerprint)
    made = place.bridge.groups.mute(fingerprint, until=until)
    words = f"muted until {time_of(made.until)} UTC, or until more than {made.count} more letters have died"
    answer(made.to_ojs(), f"{fingerprint}: {words}", as_json=as_json)


@command(group, "unmute", changes=True)
def unmute(*, place: Place, fingerprint: Fingerprint, as_json: AsJson = False) -> None:
    """Take the mute of a group back."""
    fingerprint = place.bridge.groups.id_of(fingerprint)
    place.bridge.groups.unmute(fingerprint)
    answer({"fingerprint": fingerprint, "muted": False}, f"{fingerprint}: unmuted", as_json=as_json)


@command(group, "resolve", changes=True)
def resolve(
    *,
    place: Place,
    fingerprint: Fingerprint,
    mark: Annotated[str | None, Option(help="The mark that has mended it, such as v42.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say that the fault of a group is mended; its letters stay, and its next death brings it back."""
    fingerprint = place.bridge.groups.id_of(fingerprint)
    made = place.bridge.groups.resolve(fingerprint, mark)
    told = f"resolved in {plain(made.mark)}" if made.mark else "resolved"
    answer(made.to_ojs(), f"{fingerprint}: {told}; the next death brings it back", as_json=as_json)


@command(group, "unresolve", changes=True)
def unresolve(*, place: Place, fingerprint: Fingerprint, as_json: AsJson = False) -> None:
    """Take the resolution of a group back."""
    fingerprint = place.bridge.groups.id_of(fingerprint)
    place.bridge.groups.unresolve(fingerprint)
    answer({"fingerprint": fingerprint, "resolved": False}, f"{fingerprint}: not resolved", as_json=as_json)


def _table(groups: Sequence[ErrorGroup]) -> Listing:
    seen = ("first seen (UTC)", "last seen", "deaths", "types", "queues", "error")
    brief = ("group", "state", "letters", "last seen", "types", "error")
    return listing(("group", "state", "letters", "retrying", *seen), map(_row, groups), brief)


def _row(shown: ErrorGroup) -> tuple[object, ...]:
    group = shown.group
    touched = (", ".join(group.types), ", ".join(group.queues))
    muted = f"(muted by {shown.mute.by}) " if shown.mute else ""
    place = f" ({plain(shown.frame)})" if shown.frame else ""
    error = f"{muted}{plain(shown.error_type)}: {plain(shown.pattern)}{place}"
    seen = (group.first_at, group.last_at, sparkline(group.deaths))
    return (
        group.fingerprint,
        shown.state.replace("_", " "),
        group.count,
        shown.retrying,
        *seen,
        *touched,
        error,
    )


def sparkline(counts: Sequence[int]) -> str:
    """Return counts as bars, the greatest as a whole block."""
    most = max((*counts, 1))
    return "".join(_BARS[-(-n * (len(_BARS) - 1) // most)] for n in counts)
