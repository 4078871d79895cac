"""What the store has told at a time, and the facts in it that the verdict needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ..engine.running import Told
from ..rules.dependencies import Dependencies
from ..rules.facts import (
    MINUTES,
    ErrorFacts,
    Facts,
    HoldFacts,
    HostFacts,
    MarkFacts,
    Minutes,
    Part,
    QueueFacts,
    TypeFacts,
)
from ..rules.job import parse_time
from ..store import KINDS
from .audit import Mark
from .group import ErrorGroup
from .health import Health, Worker, Workers
from .holds import Shown
from .lately import Flow, Flows, Hour, Usual, queue_name
from .operation import Operation


@dataclass(frozen=True, slots=True)
class Known:
    """What the store has told at a time.

    `usual` is that of the hours of the first and of the last minute. `running` is what processes have told.
    """

    at: datetime
    hour: Hour
    usual: tuple[Usual | None, Usual | None] = (None, None)
    running: Sequence[Told] = ()
    waits: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    dead_letters: int = 0
    marks: Sequence[Mark] = ()
    groups: Sequence[ErrorGroup] = ()
    operations: Sequence[Operation] = ()
    holds: Sequence[Shown] = ()
    workers: Sequence[Worker] = ()
    in_broker: int = 0


def facts_of(
    known: Known,
    store: Part,
    health: Health,
    flows: Flows,
    dependencies: Dependencies,
    now: datetime,
    *,
    fail_open: bool,
) -> Facts:
    """Return the facts of the time at which the store has told them; only the queues are of now."""
    types = _types(known, dependencies)
    workers = Workers(known.workers, known.at)
    waiting = health.checks["waiting"]
    usual = known.usual[1]
    return Facts(
        known.at,
        store,
        part_of(health, "broker"),
        sum_of(one.deaths for one in types),
        sum_of(one.runs for one in types),
        by_minute(known, lambda one: one.deaths),
        usual.runs if usual else None,
        types,
        tuple(_holds(known)),
        tuple(_queues(known, workers, health, flows, now)),
        tuple(_hosts(workers)),
        tuple(MarkFacts(mark.at, mark.text) for mark in known.marks),
        max((worker.seen_at for worker in known.workers), default=None),
        waiting.message if waiting.status == "degraded" else "",
        fail_open,
    )


def part_of(health: Health, name: str) -> Part:
    """Return whether the store or the broker answers."""
    check = health.checks[name]
    since, frameworks = check.facts.get("away_since"), check.facts.get("frameworks", {})
    away = [framework for framework, status in frameworks.items() if status == "away"]
    of = " and ".join(away) if len(away) < len(frameworks) else ""
    return Part(check.status, check.message, since and parse_time(since), of)


def sum_of(series: Iterable[Minutes]) -> Minutes:
    """Return the sum of some numbers a minute, for each minute."""
    return tuple(map(sum, zip((0,) * MINUTES, *series, strict=True)))


def by_minute(known: Known, of: Callable[[Usual], float]) -> tuple[float, ...] | None:
    """Return what is usual in each of the minutes, the first of which may be of the hour before."""
    first, last = known.usual
    first, last = first or last, last or first
    if first is None or last is None:
        return None
    hour = known.at.replace(minute=0, second=0, microsecond=0)
    times = (known.hour.since + timedelta(minutes=n) for n in range(MINUTES))
    return tuple(of(last if at >= hour else first) for at in times)


def _types(known: Known, dependencies: Dependencies) -> tuple[TypeFacts, ...]:
    usual = known.usual[1]
    kills = _errors(known.groups, lambda died, retrying: (died, retrying))
    retries = _errors(known.groups, lambda died, retrying: (retrying, died))
    return tuple(
        TypeFacts(
            type_,
            *minutes,
            usual.deaths_of.get(type_, 0.0) if usual else None,
            usual.retried_of.get(type_, 0.0) if usual else None,
            tuple(dependencies.names_of(type_)),
            kills.get(type_),
            retries.get(type_),
        )
        for type_, minutes in known.hour.of_types().items()
    )


def _errors(
    groups: Sequence[ErrorGroup], weight: Callable[[int, int], tuple[int, int]]
) -> dict[str, ErrorFacts]:
    """Return the error of each type: of the group that weighs the most, by late deaths and by retries."""
    errors = dict[str, ErrorFacts]()

    def key(shown: ErrorGroup) -> tuple[tuple[int, int], datetime]:
        return weight(sum(shown.group.deaths[-2:]), shown.retrying), shown.group.last_at

    for shown in sorted(groups, key=key):
        error = ErrorFacts(shown.group.fingerprint, shown.error_type, shown.message, shown.retrying)
        errors.update(dict.fromkeys(shown.group.types, error))
    return errors


def _holds(known: Known) -> Iterable[HoldFacts]:
    kinds = known.hour.kinds()
    for shown in known.holds:
        hold = shown.hold
        if hold.is_limit:
            continue
        types = {type_ for type_, queue in kinds if hold.covers(type_, queue)}
        if hold.dependency and not hold.jobs:
            types.clear()
        yield HoldFacts(
            hold.id,
            hold.of,
            hold.since,
            shown.held,
            tuple(sorted(types)),
            hold.dependency,
            hold.queue,
            hold.by,
            hold.why,
            hold.still_on(known.at),
        )


def _queues(
    known: Known, workers: Workers, health: Health, flows: Flows, now: datetime
) -> Iterable[QueueFacts]:
    taken = workers.counts(lambda worker: worker.queues)
    rows: Sequence[Mapping[str, Any]] = health.checks["backlog"].facts.get("queues", ())
    at = now - timedelta(seconds=health.checks["backlog"].facts.get("age", 0.0))
    backlog = {(row["framework"], row["queue"]): row for row in rows}
    paused = {
        shown.hold.queue
        for shown in known.holds
        if shown.hold.queue and not (shown.hold.type or shown.hold.error_type or shown.hold.dependency)
    }
    outs = known.hour.of_queues(known.at)
    for framework, queue in sorted({*taken, *backlog}):
        row, out = backlog.get((framework, queue)), outs.get(queue_name(queue), 0.0)
        depth = None if row is None else int(row["depth"])
        flow = Flow(None, None) if depth is None else flows.of(framework, queue, depth, at, out)
        keeps_up, seen = flow.keeps_up, taken.get((framework, queue), 0)
        if queue in paused:
            keeps_up = None
        elif depth and not seen:
            keeps_up = False
        oldest = row and row.get("oldest_at")
        yield QueueFacts(
            framework,
            queue,
            depth,
            parse_time(oldest) if oldest else None,
            flow.in_per_second,
            out,
            keeps_up,
            queue in paused,
            seen,
        )


def _hosts(workers: Workers) -> Iterable[HostFacts]:
    silent: dict[tuple[str, str], list[Worker]] = defaultdict(list)
    for worker in workers.silent():
        silent[worker.framework, worker.host].append(worker)
    for (framework, host), seen in workers.counts(lambda worker: [worker.host]).items():
        dead = silent[framework, host]
        if seen or dead:
            yield HostFacts(
                framework,
                host,
                seen,
                len(dead),
                max((worker.seen_at for worker in dead), default=None),
                tuple(sorted({queue for worker in dead for queue in worker.queues})),
            )
