"""Kills workers that share five slots, and counts the runs under way: `python -m tests.chaos.slots`.

Workers of both frameworks, each with a broker of its own, run with the defaults of framework and bridge; more
jobs wait all the time. Every run notes its begin and its end; a killed one has ended when its process is
killed. Never may more runs be under way than there are slots.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos.fates import LONG
from tests.chaos.ledger import Reader
from tests.chaos.settings import LONG_SLOTS, Settings
from tests.chaos.workers import Worker
from tests.servers import Postgres, RabbitMQ, Server, Valkey, eventually

if TYPE_CHECKING:
    from tests.chaos.frameworks import Framework

BROKERS: dict[str, type[Valkey] | type[RabbitMQ]] = {"redis": Valkey, "rabbitmq": RabbitMQ}
STORES: dict[str, type[Valkey] | type[Postgres]] = {"redis": Valkey, "postgres": Postgres}
#: Seconds until all workers have started, and all slots are in use.
SOON = 120
HEAD = (
    "fleet",
    "kills",
    "runs killed",
    "runs done",
    "most at once",
    "in use on average",
    "free after a run, s",
)
#: What of a worker is killed. Of the runs that a main process leaves, killed alone, the end is not known.
KILLS = ("worker", "child")


class Use(NamedTuple):
    """A run from its begin to its end, and whether a kill has ended it."""

    begin: float
    end: float
    was_killed: bool


def main() -> None:
    """Kill the workers of each fleet, print the table, and fail when a slot was given twice."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the workers would outlive us
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.slots")
    parser.add_argument("--broker", choices=BROKERS, default="rabbitmq")
    parser.add_argument("--store", choices=STORES, default="redis")
    parser.add_argument("--workers", type=int, default=10, help="half of them run Celery, half Dramatiq")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--every", type=float, default=3, help="seconds between two kills")
    parser.add_argument("--kills", nargs="+", choices=KILLS, default=KILLS, help="what of a worker is killed")
    parser.add_argument("--apart", action="store_true", help="give each worker a machine of its own")
    parser.add_argument("--folder", type=Path, help="keep ledgers and logs here")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = measured(asked, asked.folder or Path(temporary))
    name = f"{asked.workers} workers on {'machines of their own' if asked.apart else 'one machine'}"
    free = (LONG_SLOTS - found.average) * asked.seconds / (found.killed + found.done)
    cells = [name, *found[:-1], f"{found.average:.2f}", f"{free:.2f}"]
    print(f"| {' | '.join(HEAD)} |\n|---|{'---:|' * (len(HEAD) - 1)}\n| {' | '.join(map(str, cells))} |")
    sys.exit(found.most > LONG_SLOTS)


class Found(NamedTuple):
    """The numbers of kills, of runs by their ends, and of runs that were under way."""

    kills: int
    killed: int
    done: int
    most: int
    average: float


def measured(asked: argparse.Namespace, folder: Path) -> Found:
    """Kill workers of a fleet, as was asked for."""
    with ExitStack() as stack:
        fleet = Fleet(asked, stack.enter_context(STORES[asked.store]()), folder, stack)
        uses, begin, end = fleet.run()
    killed, done = (sum(use.was_killed is how and use.end <= end for use in uses) for how in (True, False))
    return Found(fleet.kills, killed, done, *figures(uses, begin, end))


def figures(uses: Sequence[Use], begin: float, end: float) -> tuple[int, float]:
    """Return how many runs were under way at once, at the most and on average, between two times."""
    changes = sorted([(use.begin, 1) for use in uses] + [(use.end, -1) for use in uses])
    under_way = most = 0
    for _, change in changes:
        under_way += change
        most = max(most, under_way)
    shared = sum(max(0.0, min(use.end, end) - max(use.begin, begin)) for use in uses)
    return most, shared / (end - begin)


@dataclass
class _Side:
    """The workers of one framework, and its broker."""

    framework: Framework
    settings: Settings


class Fleet:
    """Workers of both frameworks on one store, and their killer."""

    def __init__(self, asked: argparse.Namespace, store: Server, folder: Path, stack: ExitStack) -> None:
        # Not above: a worker imports this file before it has its settings, and the apps need them.
        from tests.chaos.frameworks import OnCelery, OnDramatiq

        self._asked, self._rng = asked, random.Random(1)
        self._sides = []
        for framework in (OnCelery(), OnDramatiq()):
            broker = stack.enter_context(BROKERS[asked.broker]())
            settings = Settings(broker.url, store.url, str(folder), hasty=False, limited=True)
            framework.declare(settings)
            self._sides.append(_Side(framework, settings))
        self._workers: list[Worker] = []
        self._ledgers: list[Reader] = []
        for n in range(asked.workers):
            side, place = self._sides[n % 2], folder / f"worker-{n}"
            place.mkdir(parents=True)
            environment = replace(side.settings, ledger=str(place)).to_env()
            log, machine = place.with_suffix(".log"), place.name if asked.apart else ""
            worker = Worker(side.framework.command(), environment, log, machine=machine)
            stack.callback(worker.close, 0)
            self._workers.append(worker)
            self._ledgers.append(Reader(place))
        #: The processes that were killed: of which worker, its number, and when.
        self._killed: list[tuple[int, int, float]] = []
        self.kills = 0

    def run(self) -> tuple[Sequence[Use], float, float]:
        """Kill for the time that was asked for; return all runs, and between which times the killing was."""
        asked = self._asked
        jobs = int(asked.seconds * LONG_SLOTS / min(LONG)) + 2 * LONG_SLOTS
        for n, side in enumerate(self._sides):
            side.framework.enqueue(side.settings, [f"long-{n}-{number}" for number in range(jobs)])
        eventually(lambda: self._tend() == LONG_SLOTS, seconds=SOON, what="the use of all slots")
        begin, end = time.time(), time.time() + asked.seconds
        while (now := time.time()) < end:
            if now >= begin + (self.kills + 1) * asked.every:
                self._kill()
            self._tend()
            time.sleep(0.05)
        return [*self._uses()], begin, end

    def _tend(self) -> int:
        """Start again what has ended; return how many runs have begun."""
        for worker, ledger in zip(self._workers, self._ledgers, strict=True):
            worker.tend()
            ledger.refresh()
        return sum(len(ledger.lines(job, "start")) for ledger in self._ledgers for job in [*ledger.jobs])

    def _kill(self) -> None:
        n = self._rng.randrange(len(self._workers))
        # A killed process may take long to end on a busy machine, but runs no more.
        at, processes = time.time(), self._workers[n].kill(self._rng, self._asked.kills)
        self._killed += [(n, process, at) for process in processes]
        self.kills += 1

    def _uses(self) -> Iterator[Use]:
        for n, ledger in enumerate(self._ledgers):
            ledger.refresh()
            kills = [(at, True, process) for of, process, at in self._killed if of == n]
            for job in ledger.jobs:
                for start in ledger.lines(job, "start"):
                    ends = [(line.at, False, line.pid) for line in ledger.lines(job, "done")]
                    its = [(at, how) for at, how, pid in ends + kills if pid == start.pid and at >= start.at]
                    yield Use(start.at, *min(its, default=(float("inf"), False)))


if __name__ == "__main__":
    main()
