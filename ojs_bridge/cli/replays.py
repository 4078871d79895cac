"""`ojs-bridge dead-letters replay`: single letters, with changes, or all of a kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from typer import Argument, Option

from ..engine.ports import Override
from ..errors import InvalidRetryPolicy
from ..operations.dead_letters import DeadLetters
from ..operations.letters import count
from ..operations.replaying import check_rate
from ..rules.policy import check_partial
from ..store import Letter
from .commands import ID_HELP, INCOMPLETE, AsJson, DryRun, Yes, ask, each, found_of, json_of, whole
from .finding import Place
from .letters import Filter, counts, searched, show_letters, show_matched, told
from .operations import carry_out
from .printing import say


@dataclass(frozen=True)
class Changes:
    """The options that change single letters; None changes nothing."""

    set_queue: Annotated[str | None, Option(help="Send the job to this queue.")] = None
    args: Annotated[str | None, Option(metavar="JSON", help="A list, in place of the job's own.")] = None
    kwargs: Annotated[str | None, Option(metavar="JSON", help="An object, in place of the job's own.")] = None
    meta: Annotated[
        str | None, Option(metavar="JSON", help="Headers or options, merged over the job's own.")
    ] = None
    policy: Annotated[
        str | None, Option(metavar="JSON", help="A partial policy, merged over the job's own.")
    ] = None

    def read(self) -> Override:
        """Return the changes as the library takes them; raises ValueError and InvalidRetryPolicy."""
        given = {name: json_of(name, getattr(self, name)) for name in ("args", "kwargs", "meta")}
        policy = json_of("policy", self.policy)
        try:
            check_partial(policy)
        except InvalidRetryPolicy as error:
            raise error.under("policy") from None
        return Override(queue=self.set_queue, retry=policy, **given)


def replay(
    *,
    place: Place,
    chosen: Filter,
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
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int | None:
    """Send dead letters back to their queues through their app.

    A job keeps its id and its history, and has all its attempts again.
    """
    _check(ids, chosen, changes, rate, everything=everything)
    share = _share(stop_if_failing, rate)
    bridge = place.bridge if dry_run else place.publishing_bridge
    letters = bridge.dead_letters
    ids = whole(ids or (), letters.id_of)
    if ids and dry_run:
        return _look_at(letters, ids, place, as_json=as_json)
    if ids:
        override = changes.read()
        return each(ids, lambda i: letters.replay_with(i, override), "replayed", as_json=as_json)
    kind = chosen.kind_until(bridge.engine.now())
    stuck = Counter[str]()
    matched = count(_noting(searched(letters, kind), letters, stuck))
    if dry_run:
        show_matched(matched, as_json=as_json)
        return _tell(stuck, place)
    if matched.total:
        _tell(stuck, place)
        ask(f"Replay {told(matched.total)} from {place}?", *counts(matched), yes=yes)
    begun = bridge.operations.begin("retry", rate=rate, stop_if_failing=share, **kind)
    return carry_out(place, begun, as_json=as_json)


def _check(
    ids: list[str] | None, chosen: Filter, changes: Changes, rate: float | None, *, everything: bool
) -> None:
    """Raise ValueError for options that do not go together."""
    if bool(ids) == everything:
        raise ValueError("replay: say which: ids, or --all with options such as --queue and --type")
    if ids and (chosen != Filter() or rate is not None):
        raise ValueError("replay: --rate and the options that say which go with --all, not with ids")
    if everything and changes != Changes():
        raise ValueError("replay: changes go with ids, not with --all")
    check_rate(rate)


def _share(told: str | None, rate: float | None) -> float | None:
    """Return a share such as 50% as a number; raises ValueError."""
    if told is None:
        return None
    if rate is None:
        raise ValueError("stop-if-failing: it goes with --rate")
    percent = told.removesuffix("%")
    if not (percent.isascii() and percent.isdecimal() and int(percent) < 100):  # noqa: PLR2004
        raise ValueError(f"stop-if-failing: {told!r} must be a share from 0% to 99%")
    return int(percent) / 100


def _look_at(letters: DeadLetters, ids: Sequence[str], place: Place, *, as_json: bool) -> int | None:
    found = {letter.id: letter for letter in found_of(letters.get, ids)}
    show_letters(found.values(), as_json=as_json)
    wrong = {i: f"there is no dead letter {i!r}" for i in ids if i not in found}
    if place.has_app:
        wrong |= {i: why for i, letter in found.items() if (why := letters.why_not(letter))}
    for why in wrong.values():
        say(why)
    return INCOMPLETE if wrong else None


def _noting(found: Iterable[Letter], letters: DeadLetters, stuck: Counter[str]) -> Iterator[Letter]:
    for letter in found:
        if letters.why_not(letter):
            stuck[letter.type] += 1
        yield letter


def _tell(stuck: Counter[str], place: Place) -> int | None:
    """Print the number of letters that this app cannot replay; return the exit code."""
    if not place.has_app:
        say("only the app knows which of them it can publish: --app MODULE:APP")
        return None
    for type_, number in stuck.most_common():
        say(f"{told(number)} of type {type_!r} would stay: this app does not know it")
    return INCOMPLETE if stuck else None
