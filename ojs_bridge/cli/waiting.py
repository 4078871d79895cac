"""`ojs-bridge retries`, `scheduled` and `waiting`: what waits in the store, or one kind of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Annotated

from typer import Argument, Option

from ..operations import waiting
from ..operations.letters import Whereabouts
from ..operations.operation import Action
from ..operations.waiting import WORDS, Drained
from ..rules.policy import attempts_in_words
from ..store import KINDS, Kind, Parked
from .commands import (
    ID_HELP,
    INCOMPLETE,
    All,
    AsJson,
    Cursor,
    DryRun,
    Limit,
    Yes,
    ask,
    command,
    each,
    found_of,
    group_of,
    listed,
    show_entries,
    whole,
)
from .finding import Place
from .letters import LATER, Choice, time_to, whereabouts
from .operations import begin
from .printing import (
    Listing,
    Rows,
    answer,
    counted,
    error_in_words,
    listing,
    progress_bar,
    say,
    show,
    show_json,
    table,
    time_of,
)

#: What has been done with a job, by the name of the action.
DONE: Mapping[Action, str] = {"run": "due", "move": "moved", "cancel": "cancelled"}


@dataclass(frozen=True)
class AnyChoice(Choice):
    """The options that choose among all that waits."""

    kind: Annotated[str | None, Option(help=f"Only of this kind: {', '.join(KINDS)}.")] = None


@dataclass(frozen=True)
class Which:
    """The ids that a command names, or `--all`, to which the filters belong; how it asks and answers."""

    ids: Annotated[list[str] | None, Argument(metavar="[ID...]", help=f"A job's id, {ID_HELP}")] = None
    everything: Annotated[bool, Option("--all", help="All that the filters choose, or all there are.")] = (
        False
    )
    yes: Yes = False
    as_json: AsJson = False

    def are_filtered(self, name: str, chosen: Choice) -> bool:
        """Return whether the filters choose; raises ValueError for options that do not go together."""
        if bool(self.ids) == self.everything:
            raise ValueError(f"{name}: say which: ids, or --all with options such as --queue and --type")
        if self.ids and chosen != type(chosen)():
            raise ValueError(f"{name}: the options that say which go with --all, not with ids")
        return self.everything


class Waiting:
    """The commands of a group, which serve one kind of what waits in the store, or both."""

    def __init__(self, name: str, kind: Kind | None, does: str) -> None:
        self._kind, self._name, self._words = kind, name, WORDS[kind]
        self.group = group_of(name, does)
        takes = {"chosen": Choice if kind else AnyChoice}
        command(self.group, "list", takes=takes)(self.list)
        command(self.group, "show")(self.show)
        command(self.group, "due")(self.due)
        for changes in (self.run, self.move, self.cancel):
            command(self.group, changes.__name__, changes=True, takes=takes)(changes)

    def list(
        self,
        place: Place,
        chosen: Choice,
        limit: Limit = 50,
        cursor: Cursor = None,
        everything: All = False,
        as_json: AsJson = False,
    ) -> None:
        """List what waits, the next one due first; if there is more, a cursor goes to stderr.

        So does the number of retries that are due so soon that they wait in the broker.
        """
        where = chosen.where(place.bridge.engine.now())
        read = partial(self._of(place).list, where)
        pages = listed(read, limit, cursor, everything=everything)
        jobs = (parked for page in pages for parked in page.jobs)
        show_entries(jobs, _table, f"no {self._words[1]}", as_json=as_json)
        short = self._of(place).in_broker(where)
        if short and short.count:
            retries, due = counted(short.count, "retry", "retries"), time_of(short.next_due_at)
            say(f"in the broker, due soon: {retries}, the first at {due} UTC")

    def show(
        self,
        place: Place,
        job_id: Annotated[str, Argument(metavar="ID", help=f"A job's id, {ID_HELP}")],
        as_json: AsJson = False,
    ) -> None:
        """Show a job that waits: when it is due, and why it waits."""
        view = self._of(place)
        found = Whereabouts(view.get(view.id_of(job_id)))
        answer(found.to_ojs(), *whereabouts(found), as_json=as_json)

    def due(
        self,
        place: Place,
        within: Annotated[str, Option(help="How far ahead to look, at most 100 days: PT2H or 2h.")] = "1h",
        queue: Annotated[str | None, Option(help="Only of this queue.")] = None,
        type_: Annotated[
            str | None, Option("--type", help="Only of this job type, such as billing.*")
        ] = None,
        as_json: AsJson = False,
    ) -> None:
        """Count what falls due from now on, in steps of time; held jobs do not."""
        now = place.bridge.engine.now()
        ahead = self._of(place).due(time_to("within", within, now) - now, queue=queue, type=type_)
        answer(ahead.to_ojs(), _steps(ahead), _told(ahead), as_json=as_json)

    def run(self, place: Place, chosen: Choice, which: Which) -> int | None:
        """Let the fleet's workers publish what waits now; asks for all that the filters choose."""
        return self._do("run", place, chosen, which)

    def move(
        self,
        place: Place,
        chosen: Choice,
        which: Which,
        to: Annotated[str, Option(help=f"{LATER}. A time in the past is now.")],
    ) -> int | None:
        """Let what waits be due at another time; asks for all that the filters choose."""
        return self._do("move", place, chosen, which, time_to("to", to, place.bridge.engine.now()))

    def cancel(self, place: Place, chosen: Choice, which: Which) -> int | None:
        """Delete what waits: these jobs never run again; asks."""
        return self._do("cancel", place, chosen, which)

    def _do(
        self, action: Action, place: Place, chosen: Choice, which: Which, at: datetime | None = None
    ) -> int | None:
        """Act on the jobs of some ids, or on all that the filters choose."""
        if which.are_filtered(action, chosen):
            bulk, where = place.bridge.operations, chosen.where(place.bridge.engine.now())
            where = replace(where, kind=self._kind or where.kind)
            if number := bulk.count(action, where):
                to = f" to {time_of(at)} UTC" if at else ""
                question = f"{action.capitalize()} {counted(number, *self._words)} in {place}{to}?"
                ask(question, yes=which.yes)
            return begin(place, action, where, at=at, as_json=which.as_json)
        view = self._of(place)
        ids = whole(which.ids or (), view.id_of)
        if action == "cancel" and (parked := [*found_of(view.get, ids)]):
            question = f"Cancel {counted(len(parked), *self._words)} in {place}?"
            ask(question, _table(parked), yes=which.yes)
        act = partial(getattr(view, action), **({"at": at} if at else {}))
        return each(ids, act, DONE[action], as_json=which.as_json)

    def _of(self, place: Place) -> waiting.Waiting:
        """Return the view of the bridge, which has the name of the group."""
        view: waiting.Waiting = getattr(place.bridge, self._name)
        return view


ALL = Waiting("waiting", None, "All that waits in the store until it is due.")
RETRIES = Waiting("retries", "retry", "The retries that wait in the store until they are due.")
SCHEDULED = Waiting(
    "scheduled", "scheduled", "The jobs that wait in the store because their users delay them."
)


@command(ALL.group, "drain", changes=True)
@command(RETRIES.group, "drain", changes=True)
def drain(
    place: Place,
    tasks: Annotated[
        list[str] | None,
        Option("--task", metavar="PATTERN", help="Only of job types such as billing.*; repeatable."),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int | None:
    """Before a roll-back: publish all that waits now, delayed by its framework until it is due; asks.

    Those are retries and scheduled jobs. Workers without the bridge run them when they are due. A job that
    Celery delays on Redis for longer than the visibility timeout is delivered twice. What is parked meanwhile
    is published, too. A job that cannot be published stays, and is printed.
    """
    view = place.publishing_bridge.waiting
    if dry_run:
        show_entries(view.drainable(tasks or ()), _table, "nothing waits", as_json=as_json)
        return None
    number = sum(1 for _ in view.drainable(tasks or ()))
    if number:
        ask(f"Publish {job_count(number)} of {place} now, as delayed messages?", yes=yes)
    with progress_bar("draining", number) as progress:
        drained = view.drain(tasks or (), progress=progress)
    if as_json:
        failed = [{"id": job_id, "error": why} for job_id, why in drained.failed.items()]
        others = dict(drained.others)
        show_json({"published": drained.published, "failed": failed, "held": drained.held, "others": others})
    else:
        _show_drained(drained)
    return INCOMPLETE if drained.failed or drained.held else None


def _table(jobs: Sequence[Parked]) -> Listing:
    headings = ("id", "kind", "due (UTC)", "type", "queue", "attempt", "reason", "error")
    return listing(headings, map(_row, jobs), ("id", "kind", "due (UTC)", "type", "error"))


def _row(parked: Parked) -> tuple[object, ...]:
    at, error = parked.next_retry_at, error_in_words(parked.errors)
    attempt = attempts_in_words(parked.attempt, parked.max_attempts, "/")
    return (parked.id, parked.kind, at, parked.type, parked.queue, attempt, parked.reason, error)


def _steps(ahead: waiting.Ahead) -> Rows:
    counts = zip(*ahead.by_kind.values(), strict=True)
    rows = ((ahead.since + n * ahead.step, *of) for n, of in enumerate(counts) if any(of))
    return table(("from (UTC)", *(WORDS[kind][1] for kind in ahead.by_kind)), rows)


def _told(ahead: waiting.Ahead) -> str:
    known = [count for counts in ahead.by_kind.values() for count in counts if count is not None]
    late = f", {ahead.late:,} late" if ahead.late else ""
    some = "" if ahead.is_whole else "; what comes after is too much to count"
    return f"{counted(sum(known), 'job falls', 'jobs fall')} due{late}{some}"


def _show_drained(drained: Drained) -> None:
    show(f"{job_count(drained.published)} published")
    if drained.failed:
        show(table(("id", "why it stays"), drained.failed.items()))
    if drained.held:
        say(
            f"staying: {job_count(drained.held)} that others publish at this moment, or that "
            "workers which still run have parked again; stop those, and drain again in a minute"
        )
    for framework, number in drained.others.items():
        say(f"staying: {job_count(number)} of {framework}; drain with an app of its own, --app MODULE:APP")


def job_count(number: int) -> str:
    return counted(number, "job", "jobs")
