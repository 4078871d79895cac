"""`ojs-bridge now`, `rates` and `report`: whether it is bad, how the runs ended, and what happened."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from typer import Option

from ..operations.now import FRESH, Moment
from ..operations.rates import RateHistory
from ..rules.facts import Facts
from ..rules.notations import spoken
from ..rules.words import counted, number_of
from .commands import INCOMPLETE, OUT_OF_REACH, AsJson
from .finding import Place
from .letters import WHEN, facts_table, time_from
from .printing import live, plain, show, show_json, table, time_of

#: The styles of the levels, whose names say it without a colour, too.
_LEVELS = {"well": "bold green", "slow": "bold yellow", "bad": "bold red", "away": "bold red"}
_KINDS = {
    "bleeds": "dies",
    "contained": "held",
    "on_its_way": "retries",
    "slow": "slow",
    "away": "away",
    "ended": "ended",
}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT(\d\d:\d\d):\d\dZ")
#: The outcomes in the order of the table of rates, each with the words for it.
_OUTCOMES = {
    "completed": "succeeded",
    "retried": "retried",
    "dead_lettered": "died",
    "discarded": "discarded",
    "snoozed": "snoozed",
    "lost": "lost",
}


def now(
    place: Place,
    watch: Annotated[bool, Option("--watch", help="Show it anew every five seconds, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> int | None:
    """Say in one sentence whether it is bad now, what it is, since when, and what is done about it.

    Under it stand the rates beside what is usual at this time of day, what waits, queues, and what workers
    run. With --app the broker is asked, too. Exit codes: 0 all is well, or slow; 1 jobs die or stand still; 3
    the store or the broker is away.
    """
    if watch:
        _watch(place, as_json=as_json)
        return None
    moment = place.bridge.now()
    if as_json:
        show_json(moment.to_ojs())
    else:
        show(*_shown(moment))
    return {"bad": INCOMPLETE, "away": OUT_OF_REACH}.get(moment.verdict.level)


def _watch(place: Place, *, as_json: bool) -> None:
    try:
        if as_json:
            while True:
                show_json(place.bridge.now().to_ojs())
                sys.stdout.flush()
                time.sleep(FRESH)
        with live() as update:
            while True:
                update(Group(*_shown(place.bridge.now())))
                time.sleep(FRESH)
    except KeyboardInterrupt:
        return


def _shown(moment: Moment) -> Iterator[RenderableType]:
    verdict, facts = moment.verdict, moment.facts
    yield Text.assemble(
        (f"{verdict.level.upper():4}", _LEVELS[verdict.level]), f"  {_in_utc(verdict.sentence)}"
    )
    if verdict.why:
        yield Text(f"      {_in_utc(verdict.why)}")
    if verdict.lines:
        lines = Table.grid(padding=(0, 2))
        for line in verdict.lines:
            lines.add_row(_KINDS[line.kind], _number(line.count), _in_utc(line.text))
        yield lines
    yield ""
    yield facts_table(_strip(moment))
    if facts.queues:
        headings = ("queue", "framework", "waiting", "in a second", "out a second", "keeps up", "workers")
        yield table(headings, _queues(facts))
    running = [*_running(moment)]
    if running:
        yield table(("running for", "type", "id", "worker"), running)
    yield f"of {time_of(facts.at)} UTC" + (f"; {moment.note}" if moment.note else "")


def _in_utc(text: str) -> str:
    """Return a text with its times as times of day."""
    return plain(_TIME.sub(r"\1 UTC", text))


def _number(count: float | None) -> str:
    return "" if count is None else number_of(count)


def _strip(moment: Moment) -> Iterator[tuple[str, str]]:
    pulse, facts = moment.to_ojs()["pulse"], moment.facts
    waits: Mapping[str, int] = pulse["waits"]
    queued = [queue.depth for queue in facts.queues if queue.depth is not None]
    waiting = [f"{sum(queued):,} in queues"] if queued else []
    # A store that has told nothing yet has no numbers.
    is_told = facts.store.status == "ok" or facts.last_seen_at is not None
    if is_told:
        yield "deaths a minute", _beside(pulse["deaths_per_minute"], pulse["usual_deaths_per_minute"])
        yield "jobs a second", _beside(pulse["jobs_per_second"], pulse["usual_jobs_per_second"])
        waiting += [
            f"{waits['retry']:,} parked retries",
            f"{waits['in_broker']:,} retries in the broker",
            f"{waits['scheduled']:,} scheduled",
            f"{waits['held']:,} held",
        ]
        yield "dead letters", f"{pulse['dead_letters']:,}"
        yield "workers", ", ".join(map(_host, pulse["workers"])) or "none"
    if waiting:
        yield "waiting", ", ".join(waiting)
    for name in ("store", "broker"):
        part = pulse[name]
        yield name, part["status"] + (f": {part['message']}" if part["status"] != "ok" else "")


def _beside(number: float, usual: float | None) -> str:
    return number_of(number) + ("" if usual is None else f", usually {number_of(usual)}")


def _host(host: Mapping[str, Any]) -> str:
    silent = f", {host['silent']} silent" if host["silent"] else ""
    return f"{host['host']} ({host['framework']}) {host['seen']}{silent}"


def _queues(facts: Facts) -> Iterator[tuple[object, ...]]:
    for queue in facts.queues:
        oldest = (
            f", the oldest for {spoken(max((facts.at - queue.oldest_at).total_seconds(), 0))}"
            if queue.oldest_at
            else ""
        )
        yield (
            queue.queue,
            queue.framework,
            "" if queue.depth is None else f"{queue.depth:,}{oldest}",
            _number(queue.in_per_second),
            number_of(queue.out_per_second),
            "paused" if queue.paused else {True: "yes", False: "no", None: ""}[queue.keeps_up],
            queue.workers,
        )


def _running(moment: Moment) -> Iterator[tuple[str, str, str, str]]:
    """Yield the jobs that run for the longest."""
    jobs = [(job, worker["name"]) for worker in moment.to_ojs()["workers"] for job in worker["running"]]
    jobs.sort(key=lambda one: -one[0]["seconds"])
    for job, worker in jobs[:10]:
        yield spoken(float(round(job["seconds"]))), job["type"], job["id"], worker


def rates(
    place: Place,
    since: Annotated[
        str | None, Option(help=f"At this time or later: of the last hour by default. {WHEN}.")
    ] = None,
    until: Annotated[str | None, Option(help=f"Before this time. {WHEN}.")] = None,
    type_: Annotated[
        str | None, Option("--type", help="Only this job type, or a pattern such as billing.*")
    ] = None,
    queue: Annotated[str | None, Option(help="Only this queue.")] = None,
    as_json: AsJson = False,
) -> None:
    """Count how many runs of each job type came to which outcome, and how long they took.

    The last 14 days are known. In JSON each step of time has its numbers: up to three hours of the last day
    by the minute, anything else by the hour.
    """
    at = place.bridge.engine.now()
    begins = time_from("since", since, at) or at - timedelta(hours=1)
    ends = time_from("until", until, at)
    if ends and begins >= ends:
        raise ValueError(f"since: {begins} must be before until, {ends}")
    history = place.bridge.rates(since=begins, until=ends, type=type_, queue=queue)
    if as_json:
        show_json(history.to_ojs())
    elif history.by_type:
        show(table(("type", "runs", *_OUTCOMES.values()), _rates(history)), _span(history, at))
    else:
        show("no runs")


def _rates(history: RateHistory) -> Iterator[tuple[object, ...]]:
    for type_, outcomes in history.by_type.items():
        numbers = {outcome: sum(outcomes.get(outcome, ())) for outcome in _OUTCOMES}
        # A lost attempt is among those that were retried or have died.
        yield (type_, sum(numbers.values()) - numbers["lost"], *numbers.values())


def _span(history: RateHistory, at: datetime) -> str:
    steps = max((len(series) for of in history.by_type.values() for series in of.values()), default=0)
    until = min(history.since + steps * history.step, at)
    middle = [value for value in history.seconds["completed"]["p50"] if value is not None]
    took = f"; the median run took {spoken(sorted(middle)[len(middle) // 2])}" if middle else ""
    length = counted(round((until - history.since).total_seconds() / 60), "minute")
    return f"from {time_of(history.since)} UTC on, {length}{took}"


def report(
    place: Place,
    since: Annotated[str | None, Option(help=f"At this time or later; else of the last day. {WHEN}.")] = None,
    until: Annotated[str | None, Option(help=f"Before this time. {WHEN}.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write an incident down as Markdown: what died of which error, how many recovered, and who did what."""
    at = place.bridge.engine.now()
    made = place.bridge.report(since=time_from("since", since, at), until=time_from("until", until, at))
    if as_json:
        show_json(made.to_ojs())
    else:
        show(*(Text(line, no_wrap=True) for line in made.to_markdown().splitlines()))
