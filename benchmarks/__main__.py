"""Measures everything and prints it as Markdown tables: `python -m benchmarks [rounds]`."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import core
from benchmarks.sides import PROCESSES, STORE, Comparison, Ratio, compare
from tests.servers import Postgres, Valkey

DRAMATIQ, CELERY = "benchmarks.dramatiq_sides", "benchmarks.celery_sides"


def main() -> None:
    """Run the core's measurements, then the frameworks' against their own behaviour."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {PROCESSES * rounds} pairs of slices")
    print("(of a success on Dramatiq eight times as many in memory, three times on Valkey)\n")
    print("| pure core | µs | goal |\n|---|---:|---:|")
    for name, micros, goal in core.rows():
        print(f"| {name} | {micros:.1f} | {'' if goal is None else f'< {goal:g}'} |", flush=True)
    with Valkey(appendonly="no") as valkey, Postgres() as postgres:
        print(
            "\n| jobs per second | native | with the bridge | CPU a job (95 %) | time a job (95 %) | goal |"
        )
        print("|---|---:|---:|---:|---:|---:|")
        for c in _bridge(valkey.url, rounds):
            _print(c, _shown(c.cpu), _plain(c.wall))
        print("\n| jobs per second | no store | with reservations | time a job, ratio (95 %) | CPU | goal |")
        print("|---|---:|---:|---:|---:|---:|")
        for c in _reservations(valkey.url, postgres.url, rounds):
            _print(c, _shown(c.wall), f"{c.cpu.median:.2f}")


#: Jobs a slice. Celery's failing ones wait 1 s three times, however few they are: there are fewer slices.
_SLICE = {DRAMATIQ: {"succeeds": "400", "fails": "60"}, CELERY: {"succeeds": "400", "fails": "80"}}
#: The option that gives a Celery worker one child.
_ALONE = {"children": "1"}


def _options(module: str, kind: str, rounds: int, **more: str) -> dict[str, Any]:
    fewer = 4 if (module, kind) == (CELERY, "fails") else 1
    return {
        "module": module,
        "options": {"kind": kind, "jobs": _SLICE[module][kind], **more},
        "rounds": max(rounds // fewer, 2),
    }


def _bridge(url: str, rounds: int) -> Iterator[Comparison]:
    """Compare a framework without and with the bridge; a success on Dramatiq needs many pairs."""
    for where, more, there in (("in memory", 8, {}), ("on Valkey", 3, {"url": url})):
        succeeds = _options(DRAMATIQ, "succeeds", more * rounds, **there)
        yield compare(f"Dramatiq {where}, succeeds", **succeeds, goal=1.02)
        fails = _options(DRAMATIQ, "fails", rounds, **there)
        yield compare(f"Dramatiq {where}, 4 runs fail", **fails, goal=0.8)
    for kind, called, goal in (("succeeds", "succeeds", 1.02), ("fails", "4 runs fail", 1.0)):
        options = _options(CELERY, kind, rounds, url=url, **_ALONE)
        yield compare(f"Celery on Valkey, {called}", **options, goal=goal)


def _reservations(valkey: str, postgres: str, rounds: int) -> Iterator[Comparison]:
    """Compare the bridge without and with a store, for jobs that succeed."""
    stores = (
        ("the same Valkey", f"{valkey.removesuffix('/0')}/1", 1.25),
        ("PostgreSQL", postgres, None),
    )
    workers = (("Dramatiq", DRAMATIQ, {}), ("Celery", CELERY, {}), ("Celery, one child,", CELERY, _ALONE))
    for worker, module, more in workers:
        for store, url, goal in stores:
            options = _options(module, "succeeds", rounds, url=valkey, store=url, **more)
            yield compare(f"{worker} on Valkey, store on {store}", **options, goal=goal, sides=STORE)


def _shown(ratio: Ratio) -> str:
    return f"**{ratio.median:.2f}** ({ratio.lowest:.2f} to {ratio.highest:.2f})"


def _plain(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.lowest:.2f} to {ratio.highest:.2f})"


def _print(c: Comparison, *ratios: str) -> None:
    goal = "" if c.goal is None else f"≤ {c.goal:.2f}"
    cells = (c.name, f"{c.without:,.0f}", f"{c.with_it:,.0f}", *ratios, goal)
    print(f"| {' | '.join(cells)} |", flush=True)


main()
