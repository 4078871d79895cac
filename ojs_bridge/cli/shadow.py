"""`ojs-bridge shadow`: the report of shadow mode, and its end."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ..migration.shadowing.comparing import TaskReport, meaning, reports
from ..store import Tally
from .commands import AsJson, Yes, ask, command, group_of
from .finding import Place
from .printing import answer, counted, plain, show, show_json, table, time_of

group = group_of("shadow", "Compare what the framework did with what the bridge would have decided.")

_NOTHING = (
    "nothing has been recorded: no run has failed since, or no worker has shadow mode on "
    "(ojs_bridge.migration.shadow, OJS_BRIDGE_SHADOW)"
)


@command(group, "report")
def report(place: Place, as_json: AsJson = False) -> None:
    """Show each task's shadow_match_rate and explain each kind of difference, with examples."""
    found = reports(place.kept.shadows())
    if as_json:
        for one in found:
            show_json(one.to_json())
    elif found:
        show(_summary(found), *(line for one in found for line in _differences(one)))
    else:
        show(_NOTHING)


@command(group, "clear", changes=True)
def clear(place: Place, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete the records of shadow mode, after a policy has changed; asks."""
    found = reports(place.kept.shadows())
    if found:
        ask(f"Forget what shadow mode has recorded in {place}?", _summary(found), yes=yes)
    with place.bridge.operations.audit.recording("shadow.clear", tasks=[one.task for one in found]):
        place.kept.clear_shadows()
    words = f"{counted(len(found), 'task', 'tasks')} forgotten"
    answer({"tasks": len(found)}, words, as_json=as_json)


def _summary(found: list[TaskReport]) -> RenderableType:
    headings = ("task", "framework", "failed runs compared", "shadow_match_rate", "bridged", "last (UTC)")
    return table(headings, (_row(one) for one in found))


def _row(one: TaskReport) -> tuple[object, ...]:
    rate = one.shadow_match_rate
    return (
        one.task,
        one.framework,
        f"{one.compared:,} of {one.failed:,}",
        "" if rate is None else f"{rate:.4f}",
        one.bridged,
        time_of(one.last_seen),
    )


def _differences(one: TaskReport) -> Iterator[RenderableType]:
    for tally in one.differences:
        yield f"{plain(one.task)}: {tally.kind}, {tally.count:,} of {one.compared:,}. {meaning(tally)}"
        yield _indented(f"The last one: {tally.explanation}")
        if tally.examples:
            yield Padding(_examples(tally), (0, 0, 0, 2))


def _examples(tally: Tally) -> RenderableType:
    headings = ("job", "attempt", "error type", tally.framework, "policy", "message")
    names = ("job_id", "attempt", "error_type", "native", "ojs", "message")
    return table(headings, ([example.get(name, "") for name in names] for example in tally.examples))


def _indented(text: str) -> RenderableType:
    return Padding(Text(plain(text)), (0, 0, 0, 2))
