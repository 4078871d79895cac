"""The verdict: whether it is bad now, in one sentence, from what is known at a moment.

What still kills jobs comes first. Then what stands still, what is held, what may die soon, and what is slow.
The times in its texts are those of RFC 3339, so that whoever shows them can show them in a zone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeAlias

from .facts import MINUTES, ErrorFacts, Facts, HoldFacts, HostFacts, TypeFacts
from .job import format_time
from .notations import spoken
from .queues import behind, is_behind
from .rise import LATELY, RETRIES, Rise, burst_of, minute_of, rise_of
from .words import counted, cut, jobs_wait, number_of

Level: TypeAlias = Literal["well", "slow", "bad", "away"]
LineKind: TypeAlias = Literal["bleeds", "contained", "on_its_way", "slow", "away", "ended"]

#: A mark explains what began so soon after it.
EXPLAINS = timedelta(minutes=15)
#: After how long without a worker jobs stand still: a rollout has a pause, too.
ROLLOUT = timedelta(seconds=90)
#: How long a silent host is told if all queues keep up, the share of workers whose silence is told on, and
#: that whose silence is bad.
TOLD, LARGE, HALF = timedelta(hours=1), 1 / 3, 1 / 2
#: For how long no job may have ended where usually so many do.
STILL, EXPECTED = 10, 20
#: After how long a burst of deaths has ended, and for how long that is told.
OVER, ENDED = timedelta(minutes=LATELY), timedelta(minutes=15)
#: The most lines, and hosts in a line.
MOST, HOSTS = 12, 5


@dataclass(frozen=True, slots=True)
class Line:
    """A fact, with its number; what it is about is named where that is known."""

    kind: LineKind
    text: str
    count: float | None = None
    type: str | None = None
    fingerprint: str | None = None
    queue: str | None = None
    dependency: str | None = None

    def to_ojs(self) -> dict[str, Any]:
        """Return the line in JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it is bad now, in one sentence; `why` says more, `since` when the worst began.

    `about` is the fact of the sentence, which is not among the `lines`.
    """

    level: Level
    sentence: str
    why: str = ""
    since: datetime | None = None
    lines: tuple[Line, ...] = ()
    about: Line | None = None

    def to_ojs(self) -> dict[str, Any]:
        """Return the verdict in JSON."""
        return {
            "level": self.level,
            "sentence": self.sentence,
            "why": self.why,
            "since": self.since and format_time(self.since),
            "lines": [line.to_ojs() for line in self.lines],
            "about": self.about and self.about.to_ojs(),
        }


class Found(NamedTuple):
    """A fact with its weight: how bad it is, since when, and why; `rest` is for the end of a sentence."""

    level: Level
    line: Line
    since: datetime | None = None
    why: str = ""


def verdict_of(facts: Facts) -> Verdict:
    """Return the verdict about what is known."""
    if (away := _away(facts)) is not None:
        return away
    risen = [
        (one, rise_of(facts.at, one.deaths, one.usual_deaths))
        for one in facts.types
        if not _is_stanched(facts, one)
    ]
    bleeding = [(one, rise) for one, rise in risen if rise and not rise.over]
    # What dies most now comes first. Of two that are alike it is the one of which more have died: so the
    # sentence does not jump from one to the other.
    bleeding.sort(key=lambda found: (-math.frexp(found[1].rate)[1], -found[1].excess))
    bled = {one.type for one, _ in bleeding}
    found = [_bleeds(facts, one, rise) for one, rise in bleeding]
    found += _still(facts)
    found += _contained(facts, bled)
    found += _on_its_way(facts, bled)
    found += _slow(facts)
    found += _ended(facts, [(one, rise) for one, rise in risen if rise is None or rise.over])
    levels = [one.level for one in found]
    level: Level = "bad" if "bad" in levels else "slow" if "slow" in levels else "well"
    lines = [one.line for one in found]
    if level == "well":
        return Verdict("well", _calm(facts), _why_well(facts), None, tuple(lines[:MOST]))
    worst = next(one for one in found if one.level == level)
    lines.remove(worst.line)
    more = len(bleeding) - 1
    others = f", and {counted(more, 'more job type dies', 'more job types die')}" if more > 0 else ""
    sentence = f"{worst.line.text}{others}."
    return Verdict(level, sentence, worst.why, worst.since, tuple(lines[:MOST]), worst.line)


def _away(facts: Facts) -> Verdict | None:
    """Return the verdict if store or broker are away: one sentence, and nothing else."""
    if facts.store.status == "degraded" and facts.last_seen_at is None and not any(facts.runs):
        return Verdict("slow", "The store takes long to answer, and nothing is known yet.")
    store, broker = (part.status == "away" for part in (facts.store, facts.broker))
    if not (store or broker):
        return None
    part = facts.store if store else facts.broker
    since = _since(part.since)
    if store and broker:
        sentence, why = f"The store and the broker are away{since}: no job begins.", _WAIT
    elif store:
        begins = "jobs begin without their reservations" if facts.fail_open else "no job begins"
        sentence, why = f"The store is away{since}: {begins}.", "" if facts.fail_open else _WAIT
    elif part.of:
        sentence, why = f"The broker of {part.of} is away{since}: no job of it comes to a worker.", _SENT
    else:
        sentence, why = f"The broker is away{since}: no job comes to a worker.", _SENT
    message = f" It says: {cut(part.message)}" if part.message else ""
    line = Line("away", sentence.rstrip("."))
    return Verdict("away", sentence, f"{why}{message}".strip(), part.since, (), line)


_WAIT = "Jobs wait, and none is lost; they go on by themselves when it answers."
_SENT = "What was sent before is still there; what is sent now fails at its sender."


def _is_stanched(facts: Facts, one: TypeFacts) -> bool:
    """Return whether something holds the jobs of a type, and none has died since the minute when it began."""
    for hold in facts.holds:
        since = (minute_of(facts.at) - minute_of(hold.since)) // timedelta(minutes=1)
        if _is_about(hold, one) and since > 0 and not any(one.deaths[-since:]):
            return True
    return False


def _bleeds(facts: Facts, one: TypeFacts, rise: Rise) -> Found:
    holds = [hold for hold in facts.holds if _is_about(hold, one) and hold.held]
    error = f": {said(one.error)}" if one.error else ""
    depends = f", dependency {', '.join(one.depends)}" if one.depends else ""
    ways = {True: "breaker", False: "pause"}
    held = "".join(f"; its {ways[hold.is_breaker]} holds {counted(hold.held, 'job')}" for hold in holds[:1])
    text = f"{one.type}: {_rate(rise, one.usual_deaths, 'death')}{error}{depends}{held}"
    line = Line(
        "bleeds",
        text,
        None if rise.is_slow else round(rise.rate, 1),
        one.type,
        one.error.fingerprint if one.error else None,
        dependency=one.depends[0] if one.depends else None,
    )
    return Found("slow" if rise.over else "bad", line, rise.since, " ".join(_reasons(facts, one, rise)))


def _ended(facts: Facts, risen: Sequence[tuple[TypeFacts, Rise | None]]) -> Iterator[Found]:
    """Yield the bursts of deaths that are over, and types of which a few die again and again."""
    for one, rise in risen:
        burst = burst_of(facts.at, one.deaths, one.usual_deaths)
        if rise and (burst is None or rise.since < burst.since):
            yield _bleeds(facts, one, rise)
        elif burst and OVER <= facts.at - burst.until <= ENDED:
            since = sum(one.deaths[-((facts.at - burst.until) // timedelta(minutes=1) + 1) :])
            number, times = counted(burst.number, "death"), f"{_time(burst.since)} to {_time(burst.until)}"
            text = f"{one.type}: {number} from {times}"
            text += "; no more than usual since" if since else "; none since"
            fingerprint = one.error.fingerprint if one.error else None
            yield Found("well", Line("ended", text, burst.number, one.type, fingerprint), burst.since)


def _reasons(facts: Facts, one: TypeFacts, rise: Rise) -> Iterator[str]:
    before = [
        mark for mark in facts.marks if timedelta() <= rise.since + timedelta(minutes=1) - mark.at < EXPLAINS
    ]
    if before and not rise.is_long:
        mark = max(before, key=lambda mark: mark.at)
        after = max((rise.since - mark.at).total_seconds(), 0)
        soon = f"{spoken(after // 60 * 60)} after" if after >= 60 else "right after"  # noqa: PLR2004 - a minute
        yield f"It began {soon} the mark {mark.text}."
    runs = sum(one.runs[-4:])
    died = sum(one.deaths[-4:])
    if runs > died:
        yield f"In the last minutes {died:,} of {runs:,} runs died."
    elif runs:
        yield "In the last minutes every run died."
    if one.error and one.error.retrying:
        retry = "retries" if one.error.retrying == 1 else "retry"
        yield f"{counted(one.error.retrying, 'more job')} {retry} with this error."


def _still(facts: Facts) -> Iterator[Found]:
    """Yield what stands still: queues whose jobs nobody takes, and frameworks without a worker."""
    living = {host.framework for host in facts.hosts if host.seen}
    silent = [host for host in facts.hosts if host.silent_since and host.framework not in living]
    for framework in sorted({host.framework for host in silent}):
        its = [host for host in silent if host.framework == framework]
        since = max(host.silent_since for host in its if host.silent_since)
        waiting = sum(queue.depth or 0 for queue in facts.queues if queue.framework == framework)
        wait = f": {jobs_wait(waiting)}" if waiting else ""
        text = f"No worker of {framework} answers since {_time(since)}{wait}"
        yield Found("bad", Line("slow", text, waiting or None), since, "")
    quiet = {host.framework for host in silent}
    last = facts.last_seen_at
    for queue in facts.queues:
        if queue.workers or not queue.depth or queue.framework in quiet or queue.paused:
            continue
        began = last is None or facts.at - last > ROLLOUT or queue.framework in living
        text = f"No worker takes the queue {queue.queue}: {jobs_wait(queue.depth)}"
        yield Found("bad" if began else "slow", Line("slow", text, queue.depth, queue=queue.queue))


def _contained(facts: Facts, bled: set[str]) -> Iterator[Found]:
    for hold in sorted(facts.holds, key=lambda hold: (not hold.is_breaker, -hold.held)):
        if not (hold.held or hold.is_breaker or hold.forgotten) or bled & {*hold.types}:
            continue
        since = f"since {_time(hold.since)}"
        number = f"{counted(hold.held, 'job')} held" if hold.held else "no job is held yet"
        error = next((one.error for one in facts.types if one.error and _is_about(hold, one)), None)
        if hold.is_breaker:
            # What had died of it is one fault with it.
            text = f"{hold.dependency}: its breaker is open {since}, {number}"
            text += f"; {said(error)}" if error else ""
        else:
            by = f"are paused by {hold.by}" if hold.by else "are held"
            why = f" ({hold.why})" if hold.why else ""
            text = f"{hold.of} {by} {since}{why}: {number}"
        text += f"; {hold.forgotten}" if hold.forgotten else ""
        died = sum(sum(one.deaths) for one in facts.types if _is_about(hold, one))
        why = f"{counted(died, 'job')} of it died in the last hour, and none dies now." if died else ""
        line = Line("contained", text, hold.held, queue=hold.queue, dependency=hold.dependency)
        yield Found("slow" if hold.is_breaker or hold.forgotten else "well", line, hold.since, why)


def _on_its_way(facts: Facts, bled: set[str]) -> Iterator[Found]:
    """Yield the types whose retries are far above the usual, and that do not die yet."""
    contained = {one.type for hold in facts.holds if hold.held for one in facts.types if _is_about(hold, one)}
    for one in facts.types:
        usual = one.usual_retried
        if usual is None:
            # Without days before, what was there before the last quarter of an hour is usual.
            usual = sorted(one.retried[: MINUTES - 15])[(MINUTES - 15) // 2]
        rise = rise_of(facts.at, one.retried, usual, RETRIES)
        if rise is None or rise.over or one.type in bled | contained:
            continue
        fault = one.retry_error
        error = f": {said(fault)}" if fault else ""
        died = "" if any(one.deaths) else "; none has died"
        text = f"{one.type}: {_rate(rise, one.usual_retried, 'retry', 'retries')}{error}{died}"
        number = (fault and fault.retrying) or (rise.in_hour if rise.is_slow else round(rise.rate, 1))
        line = Line("on_its_way", text, number, one.type, fault.fingerprint if fault else None)
        yield Found("slow", line, rise.since)


def _slow(facts: Facts) -> Iterator[Found]:
    silent = [host for host in facts.hosts if host.silent]
    told = set[HostFacts]()
    for queue in facts.queues:
        if not is_behind(queue, facts.at):
            continue
        its = [host for host in silent if host.framework == queue.framework and queue.queue in host.queues]
        told.update(its)
        since = max((host.silent_since for host in its if host.silent_since), default=None)
        names = _names({host.host for host in its})
        because = f"; silent: {names}{_since(since)}" if its else ""
        line = Line("slow", f"{behind(queue, facts.at)}{because}", queue.depth, queue=queue.queue)
        yield Found("slow", line, since)
    yield from _silent(facts, told)
    for name, part in (("store", facts.store), ("broker", facts.broker)):
        if part.status == "degraded":
            yield Found("slow", Line("slow", f"The {name} takes long to answer"))
    if facts.overdue:
        yield Found("slow", Line("slow", f"Parked jobs are late: {facts.overdue}"))
    if not any(host.seen for host in facts.hosts) and not silent:
        yield Found(
            "slow", Line("slow", "No worker runs: none was seen in the last 90 s"), facts.last_seen_at
        )
    elif facts.usual_runs is not None and not any(facts.runs[-STILL:]):
        usual = facts.usual_runs
        if usual * STILL >= EXPECTED:
            text = f"No job has ended for {STILL} minutes; usually {number_of(usual)} a minute do"
            yield Found("slow", Line("slow", text))


def _silent(facts: Facts, told: Collection[HostFacts]) -> Iterator[Found]:
    """Yield the hosts whose workers are silent: for an hour, or for as long as they are many."""
    living = {host.host for host in facts.hosts if host.seen}
    whole = list[HostFacts]()
    for host in facts.hosts:
        share, since = _silent_share(facts, host), host.silent_since
        is_old = since is not None and facts.at - since > TOLD and share < LARGE
        if not share or is_old or (host in told and share < HALF):
            continue
        if host.host not in living:
            whole.append(host)
            continue
        if host.seen:
            are = "is" if host.silent == 1 else "are"
            of = f"{host.silent} of {host.seen + host.silent} workers on {host.host}"
            text = f"{of} {are} silent{_since(since)}"
        else:
            text = f"No worker of {host.framework} on {host.host} answers{_since(since)}"
        yield Found("bad" if share >= HALF else "slow", Line("slow", text), since)
    if not whole:
        return
    since = max((host.silent_since for host in whole if host.silent_since), default=None)
    names = {host.host for host in whole}
    if len(names) > 1:
        text = f"{len(names)} of {len(names | living)} hosts are silent{_since(since)}: {_names(names)}"
    else:
        lost = ", ".join(f"{counted(host.silent, 'worker')} of {host.framework}" for host in whole)
        text = f"The host {whole[0].host} is silent{_since(since)}: {lost}"
    is_half = any(_silent_share(facts, host) >= HALF for host in whole)
    yield Found("bad" if is_half else "slow", Line("slow", text), since)


def _silent_share(facts: Facts, host: HostFacts) -> float:
    """Return which share of the workers of a host's framework is silent, if some on this host are.

    A framework without a worker that lives is told by itself.
    """
    its = [one for one in facts.hosts if one.framework == host.framework]
    seen, silent = sum(one.seen for one in its), sum(one.silent for one in its)
    return silent / (seen + silent) if seen and host.silent else 0.0


def _names(hosts: Collection[str]) -> str:
    first, more = sorted(hosts)[:HOSTS], len(hosts) - HOSTS
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def _calm(facts: Facts) -> str:
    """Return why it is well, as the first sentence says it."""
    died, ran = sum(facts.deaths), sum(facts.runs)
    if not ran:
        return "All is well. No job ran in the last hour."
    number = {0: "No job died", 1: "One job died"}.get(died, f"{died:,} jobs died")
    is_over = any(burst_of(facts.at, one.deaths, one.usual_deaths) for one in facts.types)
    well = "It is well again" if is_over else "All is well"
    if facts.usual_deaths is None:
        return f"{well}. {number} in the last hour."
    usual = round(sum(facts.usual_deaths))
    does = {0: "none does", 1: "one does"}.get(usual, f"{usual:,} do")
    return f"{well}. {number} in the last hour; usually {does}."


def _why_well(facts: Facts) -> str:
    told = list[str]()
    known = [queue for queue in facts.queues if queue.depth is not None and not queue.paused]
    if known and all(queue.keeps_up is not False for queue in known):
        waiting = [queue for queue in known if queue.depth]
        if not waiting:
            told.append("No job waits in a queue.")
        elif any(queue.keeps_up for queue in waiting):
            told.append("Every queue keeps up.")
        oldest = [queue.oldest_at for queue in waiting if queue.oldest_at]
        if waiting and len(oldest) == len(waiting):
            longest = max((facts.at - min(oldest)).total_seconds(), 0)
            told.append(f"No job has waited longer than {spoken(float(round(longest)) or 1.0)}.")
    workers = sum(host.seen for host in facts.hosts)
    silent = sum(host.silent for host in facts.hosts)
    if workers and not silent:
        told.append("The only worker answers." if workers == 1 else f"All {workers} workers answer.")
    elif workers:
        told.append(f"{counted(workers, 'worker answers', 'workers answer')}.")
    if not any(hold.held for hold in facts.holds):
        told.append("Nothing is held.")
    return " ".join(told)


def _is_about(hold: HoldFacts, one: TypeFacts) -> bool:
    return one.type in hold.types or (hold.dependency is not None and hold.dependency in one.depends)


def _rate(rise: Rise, usual: float | None, noun: str, plural: str = "") -> str:
    """Return how many there are, how many usually, and since when."""
    if rise.is_slow:
        so = "" if usual is None else f", usually {number_of(usual * MINUTES)}"
        return f"{counted(rise.in_hour, noun, plural)} in the last hour{so}"
    so = "" if usual is None else f", usually {number_of(usual)}"
    number = number_of(max(rise.rate, 0.1))
    noun = noun if number == "1" else plural or f"{noun}s"
    since = "for an hour or more" if rise.is_long else f"since {_time(rise.since)}"
    return f"{number} {noun} a minute{so}, {since}"


def said(error: ErrorFacts) -> str:
    """Return an error in a few words: its message, and its class where that alone says little."""
    message = cut(error.message)
    name = error.error_type.rpartition(".")[2]
    if not message:
        return error.error_type
    return message if " " in message or name in message else f"{name}: {message}"


def _since(at: datetime | None) -> str:
    return f" since {_time(at)}" if at else ""


def _time(at: datetime) -> str:
    return format_time(at.replace(microsecond=0)).replace(".000", "")
