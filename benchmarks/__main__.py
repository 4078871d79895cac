"""Measures everything and prints it as Markdown tables: `python -m benchmarks [rounds]`."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator

from benchmarks import core
from benchmarks.sides import SHADOW, STORE, Comparison, Ratio, compare
from tests.servers import Postgres, Valkey

DRAMATIQ, CELERY = "benchmarks.dramatiq_side", "benchmarks.celery_side"


def main() -> None:
    """Run the core's measurements, then the frameworks' against their own behaviour."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {rounds} rounds\n")
    print("| pure core | µs | goal |\n|---|---:|---:|")
    for name, micros, goal in core.rows():
        print(f"| {name} | {micros:.1f} | {'' if goal is None else f'< {goal:g}'} |", flush=True)
    with Valkey(appendonly="no") as valkey, Postgres() as postgres:
        print("\n| jobs per second | native | with the bridge | CPU a job, ratio (pairs) | goal |")
        print("|---|---:|---:|---:|---:|")
        for c in _bridge(valkey.url, rounds):
            _print(c, _shown(c.cpu))
        print("\n| jobs per second | no store | with reservations | time a job, ratio (pairs) | CPU | goal |")
        print("|---|---:|---:|---:|---:|---:|")
        for c in _reservations(valkey.url, postgres.url, rounds):
            _print(c, _shown(c.wall), f"{c.cpu.median:.2f}")
        print("\n| jobs per second | native | in shadow mode | CPU a job, ratio (pairs) | goal |")
        print("|---|---:|---:|---:|---:|")
        for c in _shadow(valkey.url, rounds):
            _print(c, _shown(c.cpu))


def _bridge(url: str, rounds: int) -> Iterator[Comparison]:
    """What the bridge costs."""
    stub, valkey = {"jobs": "30000"}, {"jobs": "2000", "url": url}
    for where, options in (("in memory", stub), ("on Valkey", valkey)):
        succeeds, fails = {**options, "kind": "succeeds"}, {**options, "kind": "fails", "jobs": "500"}
        yield compare(f"Dramatiq {where}, succeeds", DRAMATIQ, succeeds, rounds=rounds, goal=1.02)
        yield compare(f"Dramatiq {where}, 4 runs fail", DRAMATIQ, fails, rounds=rounds, goal=0.8)
    succeeds, fails = {**valkey, "kind": "succeeds"}, {**valkey, "kind": "fails", "jobs": "300"}
    yield compare("Celery on Valkey, succeeds", CELERY, succeeds, rounds=rounds, goal=1.02)
    yield compare("Celery on Valkey, 4 runs fail", CELERY, fails, rounds=rounds, goal=1.0)


def _reservations(valkey: str, postgres: str, rounds: int) -> Iterator[Comparison]:
    """What a store costs a job that succeeds; the broker's own Valkey is one."""
    stores = (
        ("the same Valkey", f"{valkey.removesuffix('/0')}/1", 1.25),
        ("PostgreSQL", postgres, None),
    )
    for framework, module in (("Dramatiq", DRAMATIQ), ("Celery", CELERY)):
        for store, url, goal in stores:
            options = {"jobs": "2000", "kind": "succeeds", "url": valkey, "store": url}
            name = f"{framework} on Valkey, store on {store}"
            yield compare(name, module, options, rounds=rounds, goal=goal, sides=STORE)


def _shadow(valkey: str, rounds: int) -> Iterator[Comparison]:
    """What shadow mode costs, its tallies in the broker's own Valkey."""
    store = f"{valkey.removesuffix('/0')}/1"
    for framework, module, failing in (("Dramatiq", DRAMATIQ, "500"), ("Celery", CELERY, "300")):
        for kind, jobs in (("succeeds", "2000"), ("fails", failing)):
            options = {"jobs": jobs, "kind": kind, "url": valkey, "store": store}
            name = f"{framework} on Valkey, {'succeeds' if kind == 'succeeds' else '4 runs fail'}"
            yield compare(name, module, options, rounds=rounds, goal=1.05, sides=SHADOW)


def _shown(ratio: Ratio) -> str:
    return f"**{ratio.median:.2f}** ({ratio.lowest:.2f} to {ratio.highest:.2f})"


def _print(c: Comparison, *ratios: str) -> None:
    goal = "" if c.goal is None else f"≤ {c.goal:.2f}"
    cells = (c.name, f"{c.without:,.0f}", f"{c.with_it:,.0f}", *ratios, goal)
    print(f"| {' | '.join(cells)} |", flush=True)


main()
