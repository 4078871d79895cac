"""Counts the CPU instructions of a job with and without the bridge, which no busy machine blurs.

`python -m benchmarks.instructions`; needs valgrind. Each side runs with few jobs and with more: the
difference is the cost of a job, without start-up and shutdown. Enqueueing counts where the worker does it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import redis

from benchmarks.sides import BRIDGE, STORE, TRACED
from tests.servers import Valkey

#: Two numbers of jobs, few and more; each failing job runs four times.
JOBS = {"succeeds": (200, 1200), "fails": (50, 250)}
COUNTED = re.compile(r"I +refs: +([\d,]+)")
Count: TypeAlias = Callable[[dict[str, str]], int]


def main() -> None:
    """Print the table."""
    print("| instructions a job | native | with the bridge | ratio | goal |")
    print("|---|---:|---:|---:|---:|")
    with Valkey(appendonly="no") as valkey:
        there = {"BENCH_URL": valkey.url}
        for where, options in (("in memory", {}), ("on Valkey", there)):
            _row(f"Dramatiq {where}, succeeds", _of_dramatiq, {**options, "BENCH_KIND": "succeeds"}, 1.02)
            _row(f"Dramatiq {where}, 4 runs fail", _of_dramatiq, {**options, "BENCH_KIND": "fails"}, 0.8)
        _row("Celery on Valkey, succeeds", _of_celery, {**there, "BENCH_KIND": "succeeds"}, 1.02)
        _row("Celery on Valkey, 4 runs fail", _of_celery, {**there, "BENCH_KIND": "fails"}, 1.0)
        print("\n| instructions a job | no store | with reservations | ratio | goal |")
        print("|---|---:|---:|---:|---:|")
        stored = {**there, "BENCH_KIND": "succeeds", "BENCH_STORE": f"{valkey.url.removesuffix('/0')}/1"}
        for framework, count in (("Dramatiq", _of_dramatiq), ("Celery", _of_celery)):
            _row(f"{framework}, store on the same Valkey", count, stored, 1.25, STORE)
        print("\n| instructions a job | with reservations | with OpenTelemetry, 1 % sampled | ratio | goal |")
        print("|---|---:|---:|---:|---:|")
        for framework, count in (("Dramatiq", _of_dramatiq), ("Celery", _of_celery)):
            _row(f"{framework}, store on the same Valkey", count, stored, 1.10, TRACED)


def _row(
    name: str, count: Count, options: dict[str, str], goal: float, sides: tuple[str, str] = BRIDGE
) -> None:
    without, with_it = (_a_job(count, {**options, "BENCH_SIDE": side}) for side in sides)
    print(f"| {name} | {without:,} | {with_it:,} | **{with_it / without:.3f}** | ≤ {goal:.2f} |", flush=True)


def _a_job(count: Count, options: dict[str, str]) -> int:
    few, more = JOBS[options["BENCH_KIND"]]
    single = {"BENCH_THREADS": "1", "BENCH_CHILDREN": "1", "BENCH_ROUNDS": "1"}
    alone = {**options, **single, "BENCH_SIDES": options["BENCH_SIDE"]}
    least, most = (count({**alone, "BENCH_JOBS": str(jobs)}) for jobs in (few, more))
    return (most - least) // (more - few)


def _of_dramatiq(options: dict[str, str]) -> int:
    with _Counted(["-m", "benchmarks.dramatiq_sides"], options) as counted:
        counted.process.wait(600)
    return counted.instructions


def _of_celery(options: dict[str, str]) -> int:
    """Count a worker and its child; this process enqueues the jobs before."""
    os.environ.update(options)
    from benchmarks.celery_sides import WORKER, Side

    with redis.Redis.from_url(options["BENCH_URL"], socket_timeout=None) as notes:
        notes.flushall()
        side = Side(options["BENCH_SIDE"], notes, options["BENCH_KIND"])
        side.fill(int(options["BENCH_JOBS"]))
        with _Counted(WORKER, options) as counted:
            side.wait()
            counted.process.terminate()
            counted.process.wait(60)
    return counted.instructions


class _Counted:
    """A Python process under valgrind, with its children."""

    def __init__(self, arguments: list[str], options: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        tool = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--trace-children=yes"]
        files = [
            f"--log-file={self._folder.name}/%p.log",
            f"--cachegrind-out-file={self._folder.name}/%p.out",
        ]
        environment = {**os.environ, **options, "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            [*tool, *files, sys.executable, *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.instructions = 0

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        logs = [path.read_text() for path in Path(self._folder.name).glob("*.log")]
        found = [match[1] for log in logs if (match := COUNTED.search(log))]
        self.instructions = sum(int(number.replace(",", "")) for number in found)
        self._folder.cleanup()


main()
