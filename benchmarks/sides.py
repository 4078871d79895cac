"""One side of a comparison is a process of its own; sides run in turn.

A ratio is the median of pairs that ran one right after the other: what a machine does beside changes slowly.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """What one side measured: jobs that ended, seconds it took, CPU seconds its worker used."""

    jobs: int
    wall: float
    cpu: float


@dataclass(frozen=True)
class Ratio:
    """A ratio of times a job: the median of all pairs, and their range."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Comparison:
    """One side against another: medians of jobs a second; the ratios of their time and of their CPU time."""

    name: str
    without: float
    with_it: float
    wall: Ratio
    cpu: Ratio
    goal: float | None


#: Without the bridge and with it; with it, without a store and with one; and without it, but in shadow mode.
BRIDGE = ("native", "bridged")
STORE = ("bridged", "reserved")
SHADOW = ("native", "shadowed")


def compare(
    name: str,
    module: str,
    options: dict[str, str],
    *,
    rounds: int,
    goal: float | None,
    sides: tuple[str, str] = BRIDGE,
) -> Comparison:
    """Run both sides in turn; the first pair warms up and does not count."""
    pairs = [tuple(_run(module, {**options, "side": side}) for side in sides) for _ in range(rounds + 1)]
    first, second = zip(*pairs[1:], strict=True)
    return Comparison(
        name,
        statistics.median(side.jobs / side.wall for side in first),
        statistics.median(side.jobs / side.wall for side in second),
        _ratio([side.wall for side in first], [side.wall for side in second]),
        _ratio([side.cpu for side in first], [side.cpu for side in second]),
        goal,
    )


def _ratio(first: list[float], second: list[float]) -> Ratio:
    pairs = [b / a for a, b in zip(first, second, strict=True)]
    return Ratio(statistics.median(pairs), min(pairs), max(pairs))


def _run(module: str, options: dict[str, str]) -> Result:
    environment = {**os.environ, **{f"BENCH_{name.upper()}": value for name, value in options.items()}}
    done = subprocess.run(
        [sys.executable, "-m", module], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module} {options} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))
