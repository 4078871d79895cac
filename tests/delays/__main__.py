"""Prints what becomes of delayed jobs, with the bridge and without: `python -m tests.delays --help`."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tests.delays import memory, trial
from tests.delays.fleets import FLEETS
from tests.delays.tables import rows_into, table
from tests.delays.trial import Trial, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "delays.md"
TRIALS = {
    "visibility": Trial(
        "Celery on Valkey, visibility timeout 5 s, due in 30 s", "celery", "valkey", 30, 31, visibility=5
    ),
    **{
        f"timeout-{name}": Trial(
            f"{fleet.name} on RabbitMQ, consumer timeout 60 s, due in 3 min",
            *(name, "rabbitmq", 180, 181),
            consumer_timeout=60,
            park_after="PT10S",
            patience=240,
        )
        for name, fleet in FLEETS.items()
    },
    **{
        f"deploys-{name}-{broker}": Trial(
            f"{fleet.name} on {shown}, 2 workers, 8 deploys, due in 20 to 60 s",
            *(name, broker, 20, 60),
            jobs=1000,
            workers=2,
            deploys=(4, 10, 16, 22, 34, 40, 46, 52),
        )
        for name, fleet in FLEETS.items()
        for broker, shown in (("valkey", "Valkey"), ("rabbitmq", "RabbitMQ"))
    },
    **{
        f"kills-{name}-{broker}": Trial(
            f"{fleet.name} on {shown}, 2 workers, 4 of them killed, due in 20 to 60 s",
            *(name, broker, 20, 60),
            jobs=1000,
            workers=2,
            killed=(10, 22, 34, 46),
            patience=120,
        )
        for name, fleet in FLEETS.items()
        for broker, shown in (("valkey", "Valkey"), ("rabbitmq", "RabbitMQ"))
    },
}
MEMORY = {f"memory-{name}": name for name in FLEETS}
STORES = {"postgres": "PostgreSQL", "valkey": "Valkey", "sqlite": "SQLite"}


def main() -> None:
    """Run what is asked for, print the tables, and fail when the bridge broke a promise."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the workers would outlive us
    parser = argparse.ArgumentParser(prog="python -m tests.delays", description=__doc__)
    names = [*TRIALS, *MEMORY]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=str(names))
    parser.add_argument("--sides", nargs="+", choices=("native", "bridge"), default=["native", "bridge"])
    parser.add_argument("--store", choices=STORES, default="postgres", help="where the bridge's jobs wait")
    parser.add_argument("--jobs", type=int, help="how many in each trial")
    parser.add_argument("--waiting", type=int, default=200_000, help="how many wait while memory is measured")
    parser.add_argument("--together", type=int, default=3, help="trials at a time: they mostly wait")
    parser.add_argument("--folder", type=Path, help="keep ledgers and logs here")
    parser.add_argument("--write", action="store_true", help=f"put the rows into {PAGE.name}")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        is_kept = _run(asked, Path(asked.folder or temporary))
    sys.exit(not is_kept)


def _run(asked: argparse.Namespace, folder: Path) -> bool:
    chosen = [(name, side) for name in asked.only if name in TRIALS for side in asked.sides]

    def play(name: str, side: str) -> Verdict:
        of = TRIALS[name]
        of = replace(of, jobs=asked.jobs or of.jobs)
        verdict = of.run(folder / f"{name}-{side}", store=asked.store if side == "bridge" else None)
        print(_title(of.name, side, asked.store), *verdict.cells(), sep=" | ", file=sys.stderr, flush=True)
        return verdict

    with ThreadPoolExecutor(asked.together) as pool:
        verdicts = list(pool.map(lambda each: play(*each), chosen))
    rows = [
        [_title(TRIALS[name].name, side, asked.store), *verdict.cells()]
        for (name, side), verdict in zip(chosen, verdicts, strict=True)
    ]
    _show(trial.HEAD, rows, write=asked.write)
    rows = []
    for name in [name for name in asked.only if name in MEMORY]:
        for side in asked.sides:
            fleet = FLEETS[MEMORY[name]]()
            cells = memory.measure(
                fleet, folder / f"{name}-{side}", bridged=side == "bridge", jobs=asked.waiting
            )
            rows.append([_title(f"{fleet.name} on Valkey", side, "postgres"), *cells])
            print(rows[-1], file=sys.stderr, flush=True)
    _show(memory.HEAD, rows, write=asked.write)
    return all(v.is_kept for (_, side), v in zip(chosen, verdicts, strict=True) if side == "bridge")


def _title(name: str, side: str, store: str) -> str:
    return f"{name}: {'alone' if side == 'native' else f'with the bridge, store on {STORES[store]}'}"


def _show(head: Sequence[str], rows: Sequence[Sequence[str]], *, write: bool) -> None:
    if rows:
        print(table(head, rows), flush=True)
    if write:
        rows_into(PAGE, head, rows)


if __name__ == "__main__":
    main()
