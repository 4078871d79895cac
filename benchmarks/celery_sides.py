"""The sides of a Celery comparison: real workers that end a slice of jobs in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import redis
from celery import Celery

from benchmarks.sides import Result

KIND, URL = os.environ["BENCH_KIND"], os.environ["BENCH_URL"]
JOBS, ROUNDS = int(os.environ["BENCH_JOBS"]), int(os.environ["BENCH_ROUNDS"])
#: With one child, or as many as Celery has by itself: one for each core.
CHILDREN = ["-c", os.environ["BENCH_CHILDREN"]] if "BENCH_CHILDREN" in os.environ else []
WORKER = ["-m", "celery", "-A", "benchmarks.celery_app", "worker", *CHILDREN, "-l", "CRITICAL"]
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

#: Jobs are enqueued in this other database of the same server, and then moved all at once.
_STOCK = 5


class Side:
    """A worker of its own; its child notes the times, which are the measurement."""

    def __init__(self, name: str, notes: redis.Redis, kind: str) -> None:
        self.name = name
        self._kind = kind
        self._notes = notes
        self._number = int(URL.rpartition("/")[2])
        self._producer = Celery(broker=f"{URL.rpartition('/')[0]}/{_STOCK}")
        self._producer.conf.task_default_queue = name
        self._stock = redis.Redis.from_url(f"{URL.rpartition('/')[0]}/{_STOCK}")

    def fill(self, jobs: int) -> None:
        """Give the worker so many jobs, all at once and between two marks."""
        self._notes.set(f"{self.name}.left", jobs)
        self._producer.send_task("mark", ["begin"])
        for _ in range(jobs):
            self._producer.send_task(f"bench.{self._kind}")
        if self._kind == "succeeds":
            self._producer.send_task("mark", ["end"])
        if not self._stock.move(self.name, self._number):
            raise SystemExit(f"{self.name} has not taken its last slice")

    def wait(self) -> tuple[float, float]:
        """Return the seconds, and the CPU seconds, that the worker took."""
        begin, end = (self._noted(name) for name in ("begin", "end"))
        return end[0] - begin[0], end[1] - begin[1]

    def _noted(self, name: str) -> list[float]:
        found = self._notes.blpop([f"{self.name}.{name}"], 600)
        if found is None:
            raise SystemExit(f"{self.name}: the jobs did not end")
        return json.loads(found[1])  # type: ignore[no-any-return]


def main() -> None:
    """Run the slices of all sides in turn, and print what each took."""
    notes = redis.Redis.from_url(URL, socket_timeout=None)
    notes.flushall()
    sides = [Side(name, notes, KIND) for name in os.environ["BENCH_SIDES"].split(",")]
    workers = [
        subprocess.Popen([sys.executable, *WORKER], env={**os.environ, "BENCH_SIDE": side.name}, **QUIET)  # type: ignore[call-overload]
        for side in sides
    ]
    results: list[list[Any]] = [[] for _ in sides]
    try:
        for n in range(ROUNDS):
            for k in range(len(sides)):
                at = (k + n) % len(sides)
                sides[at].fill(JOBS)
                results[at].append(vars(Result(JOBS, *sides[at].wait())))
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(60)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
