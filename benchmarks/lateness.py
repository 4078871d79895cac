"""Measures how late delayed jobs and retries begin: `python -m benchmarks.lateness --help`.

All sides of a framework and its broker are measured at the same time. Each has one worker, and few jobs,
which are due at all phases of a second. A retry's time counts from the end of the run that failed.

What waits longer than `park_after` waits in the store, whose scheduler knows the due time alone. So a delay
of 2 minutes is measured as one of 4 s with `park_after` of 2 s, and one of an hour as one of 16 s. The
frameworks alone have the same seconds. In the store 1,000,000 jobs wait besides, which are due in a month.
"""

from __future__ import annotations

import argparse
import itertools
import math
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.waiting import STORES, Stores
from tests.chaos.ledger import Reader
from tests.chaos.workers import Worker
from tests.delays.fleets import FLEETS, Sent
from tests.delays.settings import Settings
from tests.delays.tables import rows_into, table
from tests.servers import RabbitMQ, Valkey, eventually

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "delays.md"
BROKERS: dict[str, type[Valkey] | type[RabbitMQ]] = {"valkey": Valkey, "rabbitmq": RabbitMQ}
SIDES = ("native", *STORES)
#: Seconds between two jobs, and no multiple of a poll: a worker that gets many messages looks more often.
PACE = 1.0371
#: Seconds that the last job is waited for.
PATIENCE = 30


@dataclass(frozen=True)
class Waits:
    """Delays by the names of their columns, in the seconds that they are measured with."""

    park_after: str
    delays: dict[str, float]


WORKER = Waits("PT1M", {"0.1 s": 0.1, "1 s": 1, "10 s": 10})
PARKED = Waits("PT2S", {"2 min": 4, "1 h": 16})
KINDS = ("delay", "retry")
HEAD = (
    "late by ms: p50, p99",
    *(f"{kind}, {name}" for kind in KINDS for name in (*WORKER.delays, *PARKED.delays)),
)


def main() -> None:
    """Measure what is asked for, and print the table."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the workers would outlive us
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lateness", description=__doc__)
    parser.add_argument("--frameworks", nargs="+", choices=FLEETS, default=[*FLEETS])
    parser.add_argument("--brokers", nargs="+", choices=BROKERS, default=[*BROKERS])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument("--jobs", type=int, default=60, help="of each kind and delay")
    parser.add_argument("--waiting", type=int, default=1_000_000, help="jobs that wait in the store besides")
    parser.add_argument("--write", action="store_true", help=f"put the rows into {PAGE.name}")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, Stores(Path(temporary), asked.waiting) as stores:
        for framework, broker in itertools.product(asked.frameworks, asked.brokers):
            rows = _rows(framework, broker, asked.sides, stores, asked.jobs)
            print(table(HEAD, rows), flush=True)
            if asked.write:
                rows_into(PAGE, HEAD, rows)


def _rows(framework: str, broker: str, sides: Sequence[str], stores: Stores, jobs: int) -> list[list[str]]:
    runs = list(itertools.product(sides, (WORKER, PARKED)))
    for side in set(sides) & set(STORES):
        stores.url(side, is_full=True)  # they are filled before anything is measured
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(runs)))
        found = []
        for side, waits in runs:
            server = stack.enter_context(BROKERS[broker]())
            url = stores.url(side, is_full=waits is PARKED) if side in STORES else None
            ledger = Path(stack.enter_context(tempfile.TemporaryDirectory()), "ledger")
            ledger.mkdir()
            settings = Settings(server.url, url, str(ledger), waits.park_after)
            found.append(pool.submit(_late, framework, settings, waits, jobs))
        late = [each.result() for each in found]
    return [
        [_name(framework, broker, side), *_cells({**late[2 * n], **late[2 * n + 1]}, jobs)]
        for n, side in enumerate(sides)
    ]


def _name(framework: str, broker: str, side: str) -> str:
    with_bridge = f"with the bridge, store on {STORES[side]}" if side in STORES else "alone"
    return f"{FLEETS[framework].name} on {BROKERS[broker].__name__}: {with_bridge}"


def _cells(found: dict[tuple[str, str], list[float]], jobs: int) -> Iterator[str]:
    for key in itertools.product(KINDS, (*WORKER.delays, *PARKED.delays)):
        late = sorted(found[key])
        p50, p99 = (late[math.ceil(share * len(late)) - 1] for share in (0.5, 0.99))
        missing = f", {jobs - len(late)} did not run" if len(late) < jobs else ""
        early = f", {count} early" if (count := sum(ms < -1 for ms in late)) else ""
        yield f"{p50:,.0f}, {p99:,.0f}{missing}{early}"


def _late(framework: str, settings: Settings, waits: Waits, jobs: int) -> dict[tuple[str, str], list[float]]:
    """Return the lateness of each job in milliseconds, by its kind and its delay."""
    fleet, ledger = FLEETS[framework](), Reader(Path(settings.ledger))
    worker = Worker(fleet.command(4), settings.to_env(), Path(f"{settings.ledger}.log"))
    due: dict[str, tuple[str, str, float]] = {}

    def paced() -> Iterator[Sent]:
        yield Sent("warm")
        eventually(lambda: _began(ledger, ["warm"]), seconds=60, what="a first run")
        for n, kind, (name, seconds) in itertools.product(range(jobs), KINDS, waits.delays.items()):
            time.sleep(PACE)
            job = f"{kind}-{name}-{n}".replace(" ", "-")
            if kind == "delay":
                due[job] = kind, name, time.time() + seconds
                yield Sent(job, due[job][2])
            else:
                due[job] = kind, name, seconds
                yield Sent(job, retry_in=seconds)

    try:
        fleet.send(settings, paced())
        until = time.time() + max(waits.delays.values()) + PATIENCE
        while not _began(ledger, [*due]) and time.time() < until:
            time.sleep(0.1)
    finally:
        worker.ask_to_stop()
        worker.close()
        print(f"{framework} {settings}: {len(due)} jobs", file=sys.stderr, flush=True)
    late: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for job, (kind, name, at) in due.items():
        ends = (
            ledger.lines(job, "failed")[0].at + at if kind == "retry" and ledger.lines(job, "failed") else at
        )
        late[kind, name] += [(line.at - ends) * 1000 for line in ledger.lines(job, "start")[:1]]
    return late


def _began(ledger: Reader, jobs: Sequence[str]) -> bool:
    ledger.refresh()
    return all(ledger.lines(job, "start") for job in jobs)


if __name__ == "__main__":
    main()
