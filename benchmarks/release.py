"""Measures how fast jobs that are due leave the store, and what that leaves in PostgreSQL.

`python -m benchmarks.release --help`. Jobs that are all due at the same time are published to a broker from
which no worker takes any: by the schedulers of one process, and of two. Then very many rows go through the
table of PostgreSQL, with a publisher that does nothing, while others wait in it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.lateness import BROKERS, PAGE
from benchmarks.waiting import NOW, STORES, Stores, fill, waiting
from ojs_bridge import Bridge
from ojs_bridge.engine.scheduler import BATCH, Scheduler
from ojs_bridge.store.sql import tables
from tests.delays.fleets import FLEETS, Sent, send_many
from tests.delays.settings import Settings
from tests.delays.tables import rows_into, table
from tests.servers import Postgres, eventually

#: Seconds until the jobs are due: longer than they take to be sent.
AHEAD = 30
#: The rows that come at a time; how often PostgreSQL is asked in all.
LOT, TOLD = 10_000, 5
HEAD = ("jobs that are due at once, released a second", *(f"store {name}" for name in STORES.values()))
ROWS = (
    "rows that have gone through",
    "a second",
    "dead rows",
    "table, MB",
    "indexes, MB",
    "sequential scans",
)
_spawn = multiprocessing.get_context("spawn")


def main() -> None:
    """Measure what is asked for, and print the tables."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the releasers would outlive us
    parser = argparse.ArgumentParser(prog="python -m benchmarks.release", description=__doc__)
    parser.add_argument("--frameworks", nargs="*", choices=FLEETS, default=[*FLEETS])
    parser.add_argument("--brokers", nargs="+", choices=BROKERS, default=[*BROKERS])
    parser.add_argument("--jobs", type=int, default=10_000, help="that are due at once")
    parser.add_argument("--waiting", type=int, default=100_000, help="jobs that wait in the store besides")
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="that go through PostgreSQL's table; 0: none"
    )
    parser.add_argument("--write", action="store_true", help=f"put the rows into {PAGE.name}")
    asked = parser.parse_args()
    rates, rows = [], []
    with tempfile.TemporaryDirectory() as temporary, Stores(Path(temporary), asked.waiting) as stores:
        for framework, broker, processes in itertools.product(asked.frameworks, asked.brokers, (1, 2)):
            name = f"{FLEETS[framework].name} to {BROKERS[broker].__name__}, {processes} process"
            cells = [f"{_rate(framework, broker, s, stores, asked.jobs, processes):,.0f}" for s in STORES]
            rates.append([f"{name}{'es' * (processes > 1)}", *cells])
            print(rates[-1], file=sys.stderr, flush=True)
    print(table(HEAD, rates), flush=True)
    if asked.rows:
        rows = list(_through(asked.rows, asked.waiting))
        print(table(ROWS, rows), flush=True)
    if asked.write:
        rows_into(PAGE, HEAD, rates)
        rows_into(PAGE, ROWS, rows)


def _rate(framework: str, broker: str, store: str, stores: Stores, jobs: int, processes: int) -> float:
    """Return how many jobs a second come to the broker, from the time at which all are due."""
    fleet = FLEETS[framework]()
    with BROKERS[broker]() as server, tempfile.TemporaryDirectory() as ledger, ExitStack() as stack:
        settings = Settings(server.url, stores.url(store, is_full=True), ledger, "PT1S")
        due = time.time() + AHEAD
        send_many(fleet, settings, [Sent(f"due-{n}", due) for n in range(jobs)])
        ends = _spawn.Event()
        for _ in range(processes):
            releaser = _spawn.Process(target=_release, args=(framework, settings, ends))
            releaser.start()
            stack.callback(releaser.join)
        stack.callback(ends.set)
        eventually(lambda: time.time() > due, seconds=AHEAD, what="the time of the jobs")
        eventually(lambda: fleet.released(settings) >= jobs, seconds=120, what="all jobs")
        return jobs / (time.time() - due)


def _release(framework: str, settings: Settings, ends: Event) -> None:
    bridge = FLEETS[framework]().release(settings)
    ends.wait()
    bridge.stop()


class _Nowhere:
    """A publisher that does nothing."""

    def publish(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


def _through(rows: int, others: int) -> Iterator[list[str]]:
    """Yield what PostgreSQL tells of its table, now and then, while rows go through it."""
    with Postgres() as postgres:
        fill(postgres.url, others)
        store = Bridge(postgres.url).store
        assert store is not None
        store.parked.park(waiting("celery", -1, NOW))
        clock = lambda: datetime.now(timezone.utc)  # noqa: E731
        publishers: Any = {"celery": _Nowhere()}
        scheduler = Scheduler(store.parked, store.reservations, publishers, clock, lambda *_: None)
        names = [column.name for column in tables.parked.c]
        changed = {"key": "key || n", "job_id": "job_id || n", "record": "replace(record, key, key || n)"}
        copied = ", ".join(changed.get(name, name) for name in names)
        with psycopg.connect(postgres.url.replace("+psycopg", ""), autocommit=True) as session:
            session.execute("CREATE TABLE one AS SELECT * FROM ojs_parked ORDER BY due_ms LIMIT 1")
            scans, spent = _scans(session), 0.0
            for count in range(LOT, rows + 1, LOT):
                session.execute(
                    f"INSERT INTO ojs_parked ({', '.join(names)}) SELECT {copied} FROM one, "
                    f"generate_series({count - LOT}, {count - 1}) AS n".encode()
                )
                begun = time.monotonic()
                while scheduler.publish_due("celery", publishers["celery"]) == BATCH:
                    pass
                spent += time.monotonic() - begun
                if count % (rows // TOLD) == 0:
                    yield [
                        f"{count:,}",
                        f"{count / spent:,.0f}",
                        *_told(session),
                        f"{_scans(session) - scans}",
                    ]


def _told(session: psycopg.Connection[Any]) -> list[str]:
    session.execute("SELECT pg_stat_force_next_flush()")
    told = session.execute(
        "SELECT n_dead_tup, pg_table_size(relid), pg_indexes_size(relid) FROM pg_stat_user_tables "
        "WHERE relname = 'ojs_parked'"
    ).fetchone()
    assert told is not None
    return [f"{told[0]:,}", *(f"{size / 2**20:,.0f}" for size in told[1:])]


def _scans(session: psycopg.Connection[Any]) -> int:
    told = session.execute("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'ojs_parked'").fetchone()
    assert told is not None
    return int(told[0])


if __name__ == "__main__":
    main()
