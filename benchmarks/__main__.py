"""Measures the bridge against the frameworks alone: `python -m benchmarks --help`.

Each side of a row is a worker of its own, started anew for each round. Its jobs all wait before it takes
the first. The sides run in turn; a ratio is the median of the rounds', with the least and the most. An extra
round with fewer jobs counts system calls.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from contextlib import nullcontext

from benchmarks import core
from benchmarks.distance import Distance
from benchmarks.rows import GROUPS, Group
from benchmarks.runs import Bench, Measured
from benchmarks.tables import DISTANCE, PAGE, lines_of, refreshed
from tests.servers import Postgres, RabbitMQ, Valkey


def main() -> None:
    """Run the groups of rows that are asked for, and print each when it is measured."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the workers would outlive us
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=[*GROUPS], metavar="GROUP")
    parser.add_argument("--sides", nargs="+", help="native, bridge, redis, sqlite, postgres: those only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the jobs of each row")
    parser.add_argument("--write", action="store_true", help=f"put the rows into {PAGE}")
    asked = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {asked.rounds} rounds", flush=True)
    for name, micros, goal in core.rows() if asked.only == [*GROUPS] else ():
        print(f"{name}: {micros:.1f} µs{'' if goal is None else f', at most {goal:g}'}", flush=True)
    with (
        Valkey(appendonly="no") as valkey,
        Postgres() as postgres,
        RabbitMQ() if any(GROUPS[key].load.on_rabbitmq for key in asked.only) else nullcontext() as rabbitmq,
        Distance(valkey.port, postgres.port) as distance,
    ):
        bench = Bench(valkey, postgres, rabbitmq, distance)
        for key in asked.only:
            group = GROUPS[key]
            sides = [side for side in group.sides if side in (asked.sides or group.sides)]
            measured = _measured(bench, group, sides, asked.rounds, asked.share)
            for table, lines in lines_of(group, measured):
                print("\n".join([*table.head, *lines]), flush=True)
                if asked.write:
                    PAGE.write_text(refreshed(PAGE.read_text("utf-8"), table, lines), "utf-8")


def _measured(bench: Bench, group: Group, sides: list[str], rounds: int, share: float) -> dict[str, Measured]:
    """Return the results of each side."""
    jobs = round(group.load.jobs * share)
    measured = {side: Measured() for side in sides}
    for n in range(rounds):
        for k in range(len(sides)):
            side = sides[(k + n) % len(sides)]
            measured[side].rounds.append(bench.run(group.load, side, jobs=jobs))
            print(f"{group.name}, {side}: {measured[side].rounds[-1]}", file=sys.stderr, flush=True)
    if group.table is not DISTANCE:
        for side in sides:
            measured[side].calls = bench.run(group.load, side, jobs=max(jobs // 4, 1), counts_calls=True)
    return measured


main()
