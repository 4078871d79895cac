"""Stores in which very many jobs wait that are due in a month."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path

import redis
import sqlalchemy as sa

from ojs_bridge import Bridge
from ojs_bridge.store import Parked
from ojs_bridge.store.redis.jobs import RedisParkedJobs
from ojs_bridge.store.redis.server import RedisServer, Word, script_of
from ojs_bridge.store.sql import tables
from tests.servers import Postgres, Valkey

STORES = {"valkey": "Valkey", "postgres": "PostgreSQL", "sqlite": "SQLite"}
FRAMEWORKS = ("celery", "dramatiq")
NOW = datetime.now(timezone.utc)
#: The rows that one statement writes, and the scripts that one trip to Redis takes.
LOT, TRIP = 100_000, 500


class Stores:
    """The servers of stores, each of which is started and filled when it is first asked for."""

    def __init__(self, folder: Path, waiting: int) -> None:
        self._folder, self._waiting, self._stack = folder, waiting, ExitStack()
        self._urls: dict[tuple[str, bool], str] = {}

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def url(self, name: str, *, is_full: bool) -> str:
        """Return the URL of an empty store, or of one in which so many jobs wait."""
        if (name, is_full) not in self._urls:
            self._urls[name, is_full] = url = self._made(name, "full" if is_full else "empty")
            begun = time.monotonic()
            if is_full:
                fill(url, self._waiting)
                print(f"{name} filled in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        return self._urls[name, is_full]

    def _made(self, name: str, file: str) -> str:
        if name == "sqlite":
            return f"sqlite:///{self._folder}/{file}.db"
        server = Postgres() if name == "postgres" else Valkey(appendonly="no")
        return self._stack.enter_context(server).url


def waiting(framework: str, n: int, due: datetime) -> Parked:
    """Return a job that waits, of an app that no worker knows."""
    return Parked(
        id=f"waits-{n}", key=f"waits-{n}", fence=1, type=f"shop.remind{n % 40}", queue="far",
        framework=framework, attempt=2, max_attempts=3, next_retry_at=due, parked_at=NOW,
        reason="attempt 1 of 3 failed", state={"v": 1, "attempt": 2},
        message={"encoded": "x" * 400, "encoding": "utf-8"},
    )  # fmt: skip


def fill(url: str, count: int) -> None:
    """Have so many jobs wait in a store, half of each framework."""
    store = Bridge(url).store
    assert store is not None
    store.prepare()
    due = NOW + timedelta(days=30)
    share = count // len(FRAMEWORKS)
    if url.startswith("redis"):
        _park(url, share, due)
        return
    for framework in FRAMEWORKS:
        store.parked.park(waiting(framework, 0 if framework == "celery" else share, due))
    engine = sa.create_engine(url)
    for framework in FRAMEWORKS:
        for statement in copies(framework, share, on_postgres=url.startswith("postgresql")):
            with engine.begin() as connection:
                connection.execute(sa.text(statement))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("VACUUM ANALYZE ojs_parked" if engine.name == "postgresql" else "ANALYZE"))
    engine.dispose()


def copies(framework: str, count: int, *, on_postgres: bool) -> Iterator[str]:
    """Yield the statements that copy the one row of a framework, each copy due a millisecond later."""
    changed = {name: f"{name} || '-' || n" for name in ("key", "job_id")} | {"due_ms": "due_ms + n"}
    names = [column.name for column in tables.parked.c]
    values = ", ".join(changed.get(name, f'"{name}"') for name in names)
    first = f"SELECT * FROM ojs_parked WHERE framework = '{framework}' ORDER BY due_ms LIMIT 1"
    for begin in range(1, count, LOT):
        end = min(begin + LOT, count) - 1
        numbers = (
            f"(SELECT n FROM generate_series({begin}, {end}) AS n)"
            if on_postgres
            else f"(WITH RECURSIVE s(n) AS (SELECT {begin} UNION ALL SELECT n + 1 FROM s WHERE n < {end}) "
            "SELECT n FROM s)"
        )
        columns = ", ".join(f'"{name}"' for name in names)
        rows = f"SELECT {values} FROM ({first}) AS one, {numbers} AS numbers"
        yield f"INSERT INTO ojs_parked ({columns}) {rows}"


def _park(url: str, share: int, due: datetime) -> None:
    """Write jobs into Redis as its store does, many in one trip."""
    with redis.Redis.from_url(url) as client, client.pipeline(transaction=False) as pipe:
        sent = RedisParkedJobs(_Pipelined(pipe))
        for n in range(share * len(FRAMEWORKS)):
            sent.park(waiting(FRAMEWORKS[n // share], n, due + timedelta(milliseconds=n)))
            if len(pipe) == TRIP:
                pipe.execute()
        pipe.execute()


class _Pipelined(RedisServer):
    """A server that hears many scripts in one trip."""

    def __init__(self, pipe: redis.client.Pipeline) -> None:
        super().__init__("redis://nowhere", "ojs", patience=1)
        self._pipe = pipe

    def run(self, script: str, keys: Sequence[bytes], words: Sequence[Word] = ()) -> bool:
        """Let a script run in the next trip."""
        self._pipe.eval(script_of(script)[0], len(keys), *keys, *words)
        return True
