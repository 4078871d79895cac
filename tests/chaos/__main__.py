"""Prints what chaos does to each framework, with the bridge and without: `python -m tests.chaos [jobs]`."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tests.chaos.fates import load
from tests.chaos.frameworks import OnCelery, OnDramatiq
from tests.chaos.report import Verdict, judge, table
from tests.chaos.trial import Outage, Pause, Storm, Trial
from tests.servers import Postgres, Proxy, RabbitMQ, Valkey

STORM = Storm(
    seconds=140,
    kill_every=4,
    outages=(
        Outage(9, "store", 5, frozen=True),
        Outage(16, "way"),
        Outage(21, "broker", 3),
        Outage(25, "worker", 20, frozen=True),
        Outage(30, "way"),
        # Longer than a quorum queue's delivery limit would bear if each wait used up a delivery.
        Outage(50, "store", 40),
        Outage(95, "broker", 1),
        Outage(100, "broker", 13, frozen=True),
        Outage(116, "worker", 20, frozen=True),
    ),
    # A fleet on a busy machine, with a store on PostgreSQL, needs more than twice the time of one at rest.
    patience=900,
)
#: What `--holds` adds: pauses that come and go, one of them over an outage of the store; the store answers
#: whenever one begins or ends.
PAUSES = (
    Pause(5, "flaky", 15, "40/s"),
    Pause(30, "doomed", 15),
    Pause(38, "*", 4),
    Pause(46, "instant", 50, "60/s"),
)
#: When the bank is down, of whose jobs there are so many in a hundred.
BANK_DOWN, OF_THE_BANK = (0, 28), 15
#: The seconds for the framework alone: a job that kills its worker never ends there.
BOUND = 150
#: The number of jobs of a list that are shown.
MOST = 1000
FRAMEWORKS: dict[str, type[OnCelery] | type[OnDramatiq]] = {"celery": OnCelery, "dramatiq": OnDramatiq}
BROKERS: dict[str, type[Valkey] | type[RabbitMQ]] = {"valkey": Valkey, "rabbitmq": RabbitMQ}
STORES: dict[str, type[Valkey] | type[Postgres]] = {"valkey": Valkey, "postgres": Postgres}
SIDES = {"bridge": True, "native": False}


def main() -> None:
    """Run every trial that was asked for, print the table, and fail when the bridge broke a promise."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the workers would outlive us
    asked = _arguments()
    rows = []
    for framework in asked.frameworks:
        for broker in asked.brokers:
            stores = [store for side in asked.sides for store in (asked.stores if SIDES[side] else (None,))]
            for store in stores:
                rows.append(_trial(framework, broker, store, asked))
                faults = str(rows[-1].faults or "")
                print(" ".join(rows[-1].cells()), faults[:MOST], file=sys.stderr, flush=True)
    print("\n".join(table(rows)))
    sys.exit(any(row.faults for row in rows if "bridge" in row.name))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("jobs", nargs="?", type=int, default=2000)
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--brokers", nargs="+", choices=BROKERS, default=list(BROKERS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument(
        "--stores", nargs="+", choices=STORES, default=list(STORES), help="what keep the bridge's records"
    )
    parser.add_argument(
        "--holds", action="store_true", help="pause, limit and break jobs, where there is the bridge"
    )
    parser.add_argument("--folder", type=Path, help="keep ledgers and logs here")
    return parser.parse_args()


def _trial(framework: str, broker: str, store: str | None, asked: argparse.Namespace) -> Verdict:
    side = f"with the bridge, store on {STORES[store].__name__}" if store else "alone"
    name = f"{FRAMEWORKS[framework].name} on {BROKERS[broker].__name__}, {side}"
    jobs = load(asked.jobs, seed=1)
    if asked.holds and store:
        jobs = [f"bank-1-{n}" for n in range(asked.jobs * OF_THE_BANK // 100)] + jobs
    with (
        tempfile.TemporaryDirectory() as temporary,
        BROKERS[broker]() as queue,
        ExitStack() as stack,
    ):
        folder = (asked.folder or Path(temporary)) / name.replace(" ", "-")
        kept = stack.enter_context(STORES[store]()) if store else None
        way = stack.enter_context(Proxy(kept.port)) if kept else None
        holds = asked.holds and store is not None
        trial = Trial(FRAMEWORKS[framework](), queue, kept, jobs, folder, way, limited=holds)
        storm = STORM if store else replace(STORM, patience=BOUND)
        if holds:
            storm = replace(STORM, pauses=PAUSES, bank=BANK_DOWN)
        return judge(name, jobs, trial.run(storm), bridged=store is not None, limited=holds)


main()
