"""One run of one side: a worker is started, warmed, given jobs, and watched until all are acknowledged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psycopg
import redis

from benchmarks.calls import counted, tree
from benchmarks.distance import Distance
from benchmarks.fleets import (
    BROKER,
    STORE,
    CeleryOnRabbitMQ,
    DramatiqOnRabbitMQ,
    Fleet,
    InMemory,
    OnCelery,
    OnDramatiq,
    OnRabbitMQ,
)
from benchmarks.side import Counts, Side
from tests.servers import Postgres, RabbitMQ, Valkey

#: Jobs before the measured ones; another number than of any row, for a stock's jobs run once under a store.
WARM = 204
#: What PostgreSQL has written: the transactions, without those that only read, and the bytes of its log. Its
#: own count of commits comes ten seconds late.
_WRITTEN = "SELECT txid_snapshot_xmax(txid_current_snapshot()), pg_current_wal_insert_lsn() - '0/0'"
#: Seconds that a run may take; that an idle worker is left alone before it is watched, and is watched.
LONGEST, CALM, IDLE = 300, 5, 10


@dataclass(frozen=True)
class Result:
    """What a worker used for so many jobs, or in so many idle seconds.

    `calls` to the system are None where they were not counted. A store on PostgreSQL has written so many
    `commits`, and so many bytes of `log`.
    """

    amount: float
    seconds: float
    cpu: float
    switches: int
    trips: int
    commits: int
    log: int
    calls: int | None = None


@dataclass
class Measured:
    """The results of a side, round by round, and that of the round that counted system calls."""

    rounds: list[Result] = field(default_factory=list)
    calls: Result | None = None


@dataclass(frozen=True)
class Load:
    """A worker and its jobs, as a row names them; `is_far` has it at a distance from its servers.

    Where it `is_durable`, Valkey writes each change to the disk before it answers.
    """

    framework: str
    width: int
    jobs: int
    in_memory: bool = False
    fails: bool = False
    queues: int = 1
    is_idle: bool = False
    is_far: bool = False
    is_durable: bool = False
    on_rabbitmq: bool = False


class Bench:
    """The servers, and a way to run a side on them."""

    def __init__(
        self, valkey: Valkey, postgres: Postgres, rabbitmq: RabbitMQ | None, distance: Distance
    ) -> None:
        self._postgres, self._distance = postgres, distance
        self._session = psycopg.connect(postgres.url.replace("+psycopg", ""), autocommit=True)
        self._server, self._rabbitmq = valkey.url.removesuffix("/0"), rabbitmq.url if rabbitmq else ""
        self._fleets: dict[tuple[str, bool], Fleet] = {
            ("celery", False): OnCelery(self._server),
            ("dramatiq", False): OnDramatiq(self._server),
            ("celery", True): CeleryOnRabbitMQ(self._rabbitmq),
            ("dramatiq", True): DramatiqOnRabbitMQ(self._rabbitmq),
        }

    def run(self, load: Load, name: str, *, jobs: int, counts_calls: bool = False) -> Result:
        """Run the side `name`: native, bridge, or a kind of store."""
        self._clean(is_durable=load.is_durable)
        with tempfile.TemporaryDirectory() as temporary:
            side = self._side(load, name, Path(temporary))
            fleet = InMemory() if load.in_memory else self._fleets[load.framework, load.on_rabbitmq]
            if isinstance(fleet, OnRabbitMQ):
                fleet.forget(side)
            with _worker(fleet, side, Path(temporary)) as worker:
                run = _Run(fleet, side, worker, self._distance if load.is_far else None, self._written)
                run.warm()
                if load.is_idle:
                    time.sleep(CALM)
                ends = counted(tree(worker.pid)) if counts_calls else None
                result = run.idle() if load.is_idle else run.work(jobs)
                return replace(result, calls=ends and ends())

    def _written(self) -> tuple[int, int]:
        commits, log = self._session.execute(_WRITTEN).fetchone() or (0, 0)
        return int(commits), int(log)

    def _clean(self, *, is_durable: bool) -> None:
        for number in (BROKER, STORE):
            with redis.Redis.from_url(f"{self._server}/{number}") as client:
                client.flushdb()
                client.config_set("appendfsync", "always")
                client.config_set("appendonly", "yes" if is_durable else "no")
        self._postgres.execute("DROP SCHEMA public CASCADE", "CREATE SCHEMA public")

    def _side(self, load: Load, name: str, folder: Path) -> Side:
        stores = {
            "sqlite": f"sqlite:///{folder}/ojs.db",
            "postgres": self._postgres.url,
            "redis": f"{self._server}/{STORE}",
            "traced": f"{self._server}/{STORE}",
        }
        store = stores.get(name)
        broker = None if load.in_memory else f"{self._server}/{BROKER}"
        if load.on_rabbitmq:
            broker = self._rabbitmq
        if load.is_far:
            broker, store = (url and self._distance.to(url) for url in (broker, store))
        counts = folder / "counts"
        Counts.create(counts)
        return Side(
            load.framework, load.width, str(counts), broker, store, name != "native", name == "traced",
            load.fails, load.queues,
        )  # fmt: skip


class _Run:
    """A worker that runs, and what it has used."""

    def __init__(
        self,
        fleet: Fleet,
        side: Side,
        worker: subprocess.Popen[str],
        distance: Distance | None,
        written: Callable[[], tuple[int, int]],
    ) -> None:
        self._fleet, self._side, self._worker, self._distance = fleet, side, worker, distance
        self._counts, self._written = Counts(side.counts), written

    def warm(self) -> None:
        """Have the worker end some jobs."""
        self._fleet.fill(self._side, WARM, self._worker)
        self._await(WARM * self._side.runs)
        time.sleep(0.3)

    def work(self, jobs: int) -> Result:
        """Measure from the first run until all jobs are acknowledged."""
        before = self._counts.total()
        self._fleet.fill(self._side, jobs, self._worker)
        deadline = time.monotonic() + LONGEST
        while (runs := self._counts.total()) == before:
            time.sleep(0.0005)
            if time.monotonic() > deadline:
                raise RuntimeError(f"no run of {self._side}")
        begun, used = time.perf_counter(), self._used()
        missed = (runs - before - 1) / self._side.runs
        self._await(before + jobs * self._side.runs)
        return self._result(jobs - missed, time.perf_counter() - begun, used)

    def idle(self) -> Result:
        """Measure a worker that has nothing to do."""
        begun, used = time.perf_counter(), self._used()
        time.sleep(IDLE)
        seconds = time.perf_counter() - begun
        return self._result(seconds, seconds, used)

    def _result(self, amount: float, seconds: float, before: tuple[float, ...]) -> Result:
        cpu, *counts = (now - then for now, then in zip(self._used(), before, strict=True))
        return Result(amount, seconds, cpu, *map(int, counts))

    def _used(self) -> tuple[float, ...]:
        processes = tree(self._worker.pid)
        # The id of another process's CPU clock.
        cpu = sum(time.clock_gettime((~pid << 3) | 2) for pid in processes)
        trips = sum(self._distance.trips()) if self._distance else 0
        return cpu, sum(map(_switches, processes)), trips, *self._written()

    def _await(self, runs: int) -> None:
        deadline = time.monotonic() + LONGEST
        while self._counts.total() < runs or not self._fleet.is_empty(self._side):
            time.sleep(0.001)
            if self._worker.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._counts.total()} of {runs} runs of {self._side}")


@contextmanager
def _worker(fleet: Fleet, side: Side, folder: Path) -> Iterator[subprocess.Popen[str]]:
    log = folder / "log"
    with log.open("w") as file:
        worker = subprocess.Popen(
            [sys.executable, *fleet.command(side)],
            env={**os.environ, **side.to_env()},
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            text=True,
            start_new_session=True,
        )
    try:
        yield worker
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{log.read_text()[-4000:]}") from error
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.communicate()


def _switches(pid: int) -> int:
    lines = [
        line for path in Path(f"/proc/{pid}/task").glob("*/status") for line in path.read_text().splitlines()
    ]
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
