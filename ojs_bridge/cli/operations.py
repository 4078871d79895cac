"""`ojs-bridge operations`, and `dead-letters replay`: of single letters, or an operation on many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Annotated, Any

from rich.console import RenderableType
from typer import Argument, Option

from ..engine.runs import Override
from ..errors import InvalidRetryPolicy, NothingMatched
from ..operations.dead_letters import DeadLetters
from ..operations.editing import EditedLetter
from ..operations.letters import count
from ..operations.operation import ON_WAITING, Action, Operation, check_probe
from ..operations.replaying import check_rate
from ..rules.edits import Edits
from ..rules.policy import check_partial
from ..store import Filter, Letter
from .commands import (
    ID_HELP,
    INCOMPLETE,
    OUT_OF_REACH,
    AsJson,
    DryRun,
    Yes,
    ask,
    command,
    each,
    found_of,
    group_of,
    json_of,
    whole,
)
from .finding import Place
from .letters import (
    LetterChoice,
    counts,
    facts_table,
    letter_count,
    letters_table,
    searched,
    show_letters,
    show_matched,
)
from .printing import (
    Listing,
    answer,
    brief_time_of,
    counted,
    progress_bar,
    say,
    show,
    show_json,
    table,
    time_of,
)

group = group_of(
    "operations", "Operations on many letters or waiting jobs: list, stop, resume, send a probe's rest."
)

#: The past of each action.
DONE = {"replay": "replayed", "purge": "deleted", "run": "made due", "move": "moved", "cancel": "cancelled"}

Id = Annotated[str, Argument(metavar="ID", help=f"The operation's id, {ID_HELP}")]


@command(group, "list")
def list_(
    place: Place,
    limit: Annotated[int, Option(min=1, max=1000, help="The most operations to list.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the operations of the last 30 days, newest first."""
    operations = place.bridge.operations.list(limit=limit)
    if as_json:
        for operation in operations:
            show_json(_json_of(operation))
        return
    headings = ("id", "action", "began (UTC)", "state", "so far", "jobs")
    brief = map(partial(_row, time=brief_time_of), operations)
    rows = Listing(table(headings, map(_row, operations)), table(headings, brief))
    show(rows if operations else "no operations")


@command(group, "show")
def show_one(place: Place, operation_id: Id, as_json: AsJson = False) -> None:
    """Show an operation: its choice, its progress, what became of its jobs, and the letters that stayed.

    Of the jobs that died again, it shows the fifty newest letters.
    """
    operation_id = place.bridge.operations.id_of(operation_id)
    operation = place.bridge.operations.get(operation_id)
    known = {**operation.to_ojs(), "action": operation.action, "jobs": str(operation.jobs or "")}
    facts = facts_table(
        (name, value)
        for name, value in known.items()
        if value is not False and value not in (None, "", [], {})
    )
    dead, _ = place.bridge.operations.died_again(operation_id)
    again: list[RenderableType] = ["", "died again:", letters_table(dead)] if dead else []
    answer(_json_of(operation), facts, *_stayed(operation), *again, as_json=as_json)


@command(group, "stop", changes=True)
def stop(place: Place, operation_id: Id, as_json: AsJson = False) -> None:
    """Ask an operation to stop; the process that carries it out does so within seconds."""
    operations = place.bridge.operations
    operation = operations.stop(operations.id_of(operation_id))
    answer(_json_of(operation), f"{operation.id}: {operation.state}, {_progress(operation)}", as_json=as_json)


@command(group, "resume", changes=True)
def resume(place: Place, operation_id: Id, as_json: AsJson = False) -> int | None:
    """Carry out the rest of an operation that was stopped, interrupted or failed."""
    operations = place.bridge.operations
    operation = operations.get(operations.id_of(operation_id))
    # A replay is published by the app; a purge needs only the store.
    operations = (place.publishing_bridge if operation.action == "replay" else place.bridge).operations
    return carry_out(place, operations.resume(operation.id), as_json=as_json)


def undo(
    place: Place,
    deletion: Annotated[
        str,
        Argument(metavar="ID", help=f"A purge's operation, or a deletion's record in `audit`, {ID_HELP}"),
    ],
    as_json: AsJson = False,
) -> int | None:
    """Bring deleted dead letters back, for an hour after their deletion.

    A letter stays deleted if its job has begun again, or died again, since.
    """
    operations = place.bridge.operations
    undone = operations.undo(place.bridge.audit.id_of(operations.id_of(deletion)))
    stayed = f", {undone.stayed:,} stayed in the bin" if undone.stayed else ""
    words = [f"{letter_count(undone.restored)} back{stayed}"]
    reasons = [table(("id", "why it stayed"), undone.reasons)] if undone.reasons else []
    answer(undone.to_ojs(), *words, *reasons, as_json=as_json)
    return INCOMPLETE if undone.stayed else None


@command(group, "rest", changes=True)
def rest(place: Place, operation_id: Id, as_json: AsJson = False) -> int | None:
    """Send the dead letters that a probe (`replay --limit`) has left, as the probe was sent; it goes once."""
    operations = place.publishing_bridge.operations
    return carry_out(place, operations.rest(operations.id_of(operation_id)), as_json=as_json)


def begin(place: Place, action: Action, where: Filter, *, as_json: bool, **how: Any) -> int | None:
    """Begin an operation and carry it out; tell it where the filter has nothing. Return the exit code."""
    try:
        begun = place.bridge.operations.begin(action, where, **how)
    except NothingMatched:
        nothing: dict[str, Any] = {"action": action, "matched": 0, "succeeded": 0, "failed": 0, "errors": []}
        what = counted(0, "job", "jobs") if action in ON_WAITING else letter_count(0)
        answer({**nothing, "confirmed": True}, f"{what} {DONE[action]}", as_json=as_json)
        return None
    return carry_out(place, begun, as_json=as_json)


def carry_out(place: Place, operation: Operation, *, as_json: bool) -> int | None:
    """Carry out an operation, show its progress and its end; return the exit code."""
    if not as_json:
        say(f"operation {operation.id}; Ctrl-C stops it")
    operations = place.bridge.operations
    try:
        with progress_bar(operation.action, operation.total) as progress:
            ended = operations.run(operation, progress=lambda now: progress(now.matched))
    except KeyboardInterrupt:
        ended = operations.get(operation.id)
    answer(_json_of(ended), _progress(ended), *_stayed(ended), as_json=as_json)
    if ended.jobs and (ended.jobs.waiting or ended.jobs.running):
        say(f"what becomes of them: ojs-bridge operations show {ended.id}")
    if ended.action == "purge" and ended.succeeded and not ended.forever:
        say(f"within an hour: ojs-bridge undo {ended.id}")
    if ended.rest:
        say(f"{letter_count(ended.rest)} are left; send them: ojs-bridge operations rest {ended.id}")
    if ended.state == "done":
        return INCOMPLETE if ended.failed else None
    say(f"{ended.state}: {ended.why}; go on with: ojs-bridge operations resume {ended.id}")
    return OUT_OF_REACH if ended.state == "failed" else INCOMPLETE


def _json_of(operation: Operation) -> dict[str, Any]:
    errors = [{"id": letter_id, "error": why} for letter_id, why in operation.errors]
    return {**operation.to_ojs(), "errors": errors, "confirmed": True}


def _row(operation: Operation, time: Callable[[datetime | None], str] = time_of) -> tuple[object, ...]:
    done = f"{operation.succeeded:,}{'' if operation.total is None else f' of {operation.total:,}'}"
    began, jobs = time(operation.began_at), str(operation.jobs or "")
    return (operation.id, operation.action, began, operation.state, done, jobs)


def _progress(operation: Operation) -> str:
    stayed = f", {operation.failed:,} stayed" if operation.failed else ""
    number = operation.succeeded
    what = counted(number, "job", "jobs") if operation.action in ON_WAITING else letter_count(number)
    became = f" ({operation.jobs})" if operation.jobs and operation.succeeded else ""
    return f"{what} {DONE[operation.action]}{became}{stayed}"


def _stayed(operation: Operation) -> list[RenderableType]:
    return [table(("id", "why it stayed"), operation.errors)] if operation.errors else []


@dataclass(frozen=True)
class Changes:
    """The options that change what is sent: of single letters, or `edits` of many; None changes nothing."""

    set_queue: Annotated[str | None, Option(help="Send the job to this queue.")] = None
    args: Annotated[str | None, Option(metavar="JSON", help="A list, in place of the job's own.")] = None
    kwargs: Annotated[str | None, Option(metavar="JSON", help="An object, in place of the job's own.")] = None
    meta: Annotated[
        str | None, Option(metavar="JSON", help="Headers or options, merged over the job's own.")
    ] = None
    policy: Annotated[
        str | None, Option(metavar="JSON", help="A partial policy, merged over the job's own.")
    ] = None
    set: Annotated[
        list[str] | None, Option(metavar="NAME=JSON", help="Give this argument a value; may be given again.")
    ] = None
    rename: Annotated[list[str] | None, Option(metavar="NAME=NEW", help="Give an argument another name.")] = (
        None
    )
    remove: Annotated[list[str] | None, Option(metavar="NAME", help="Take an argument away.")] = None

    @property
    def only_edits(self) -> bool:
        """Whether these are changes that go with many letters, too."""
        return replace(self, set=None, rename=None, remove=None) == Changes()

    def edits(self) -> Edits:
        """Return the changes of arguments by name; raises ValueError."""
        values = _pairs("set", self.set)
        return Edits(
            {name: json_of(f"set: {name}", value) for name, value in values.items()},
            _pairs("rename", self.rename),
            self.remove or (),
        )

    def read(self) -> Override:
        """Return the changes as the library takes them; raises ValueError and InvalidRetryPolicy."""
        given = {name: json_of(name, getattr(self, name)) for name in ("args", "kwargs", "meta")}
        policy = json_of("policy", self.policy)
        try:
            check_partial(policy)
        except InvalidRetryPolicy as error:
            raise error.under("policy") from None
        return Override(queue=self.set_queue, retry=policy, edits=self.edits(), **given)


def _pairs(option: str, given: Iterable[str] | None) -> dict[str, str]:
    """Return the names in an option and what stands behind their equals signs; raises ValueError."""
    pairs: dict[str, str] = {}
    for text in given or ():
        name, sign, value = text.partition("=")
        if not sign or name in pairs:
            rule = "must be given once" if sign else "must be a name, an equals sign and what it gets"
            raise ValueError(f"{option}: {text!r} {rule}")
        pairs[name] = value
    return pairs


def replay(
    *,
    place: Place,
    chosen: LetterChoice,
    changes: Changes,
    ids: Annotated[list[str] | None, Argument(metavar="[ID...]", help=f"A job's id, {ID_HELP}")] = None,
    everything: Annotated[bool, Option("--all", help="Replay all that the filters choose; asks.")] = False,
    rate: Annotated[float | None, Option(metavar="N", help="With --all: so many a second, at most.")] = None,
    stop_if_failing: Annotated[
        str | None,
        Option(
            metavar="SHARE", help="With --rate: stop when more of the replayed jobs, such as 50%, die again."
        ),
    ] = None,
    limit: Annotated[
        int | None, Option(metavar="N", help="With --all: a probe, of so many letters; the rest goes later.")
    ] = None,
    newest: Annotated[bool, Option("--newest", help="With --limit: the newest, and not the oldest.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int | None:
    """Send dead letters back to their queues through their app.

    A job keeps its id and its history, and has all its attempts again.
    """
    _check(ids, chosen, changes, rate, everything=everything)
    check_probe("replay", ids, limit, newest=newest)
    share, edits = _share(stop_if_failing, rate), changes.edits()
    bridge = place.bridge if dry_run else place.publishing_bridge
    letters = bridge.dead_letters
    ids = whole(ids or (), letters.id_of)
    if ids and dry_run:
        return _look_at(letters, ids, place, as_json=as_json)
    if ids:
        override = changes.read()
        return each(ids, lambda i: letters.replay_with(i, override), "replayed", as_json=as_json)
    where = chosen.of(place).until_now(bridge.engine.now())
    stuck = Counter[str]()
    matched = count(_noting(searched(letters, where), letters, stuck))
    told = _previewed(letters.preview(where, edits, newest=newest)) if edits and (dry_run or not yes) else ()
    if dry_run:
        show_matched(matched, *told, as_json=as_json)
        return _tell(stuck, place)
    if matched.total:
        _tell(stuck, place)
        number, order = min(limit or matched.total, matched.total), "newest" if newest else "oldest"
        of = f"the {order} {number:,} of " if number < matched.total else ""
        ask(f"Replay {of}{letter_count(matched.total)} from {place}?", *counts(matched), *told, yes=yes)
    how = {"rate": rate, "stop_if_failing": share, "limit": limit, "newest": newest, "changes": edits}
    return begin(place, "replay", where, as_json=as_json, **how)


def _previewed(letters: Sequence[EditedLetter]) -> list[RenderableType]:
    """Return a table of letters before and after edits."""
    told = [letter.to_ojs() for letter in letters]
    rows = [(x["id"], x["before"], x["error"] or x["after"], "; ".join(x["notes"])) for x in told]
    return ["", table(("id", "before", "after", ""), rows)]


def _check(
    ids: list[str] | None, chosen: LetterChoice, changes: Changes, rate: float | None, *, everything: bool
) -> None:
    """Raise ValueError for options that do not go together."""
    if bool(ids) == everything:
        raise ValueError("replay: say which: ids, or --all with options such as --queue and --type")
    if ids and (chosen != LetterChoice() or rate is not None):
        raise ValueError("replay: --rate and the options that say which go with --all, not with ids")
    if everything and not changes.only_edits:
        raise ValueError("replay: changes go with ids, not with --all, but --set, --rename and --remove")
    check_rate(rate)


def _share(text: str | None, rate: float | None) -> float | None:
    """Return a share such as 50% as a number; raises ValueError."""
    if text is None:
        return None
    if rate is None:
        raise ValueError("stop-if-failing: it goes with --rate")
    percent = text.removesuffix("%")
    if not (percent.isascii() and percent.isdecimal() and int(percent) < 100):  # noqa: PLR2004
        raise ValueError(f"stop-if-failing: {text!r} must be a share from 0% to 99%")
    return int(percent) / 100


def _look_at(letters: DeadLetters, ids: Sequence[str], place: Place, *, as_json: bool) -> int | None:
    chosen = {letter.id: letter for letter in found_of(letters.get, ids)}
    show_letters(chosen.values(), as_json=as_json)
    wrong = {i: f"there is no dead letter {i!r}" for i in ids if i not in chosen}
    if place.has_app:
        wrong |= {i: why for i, letter in chosen.items() if (why := letters.why_not(letter))}
    for why in wrong.values():
        say(why)
    return INCOMPLETE if wrong else None


def _noting(matches: Iterable[Letter], letters: DeadLetters, stuck: Counter[str]) -> Iterator[Letter]:
    for letter in matches:
        if letters.why_not(letter):
            stuck[letter.type] += 1
        yield letter


def _tell(stuck: Counter[str], place: Place) -> int | None:
    """Print the number of letters that this app cannot replay; return the exit code."""
    if not place.has_app:
        say("only the app knows which of them it can publish: --app MODULE:APP")
        return None
    for type_, number in stuck.most_common():
        say(f"{letter_count(number)} of type {type_!r} would stay: this app does not know it")
    return INCOMPLETE if stuck else None
