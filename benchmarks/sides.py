"""One side of a comparison is a process of its own; sides run in turn.

A ratio is the median of pairs that ran one right after the other: the other load of a machine changes slowly.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """The measurement of one side: jobs that ended, seconds it took, CPU seconds its worker used."""

    jobs: int
    wall: float
    cpu: float


@dataclass(frozen=True)
class Ratio:
    """A ratio of times a job: the median of all pairs, and its confidence interval."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, first: list[float], second: list[float]) -> Ratio:
        """Return the ratio of pairs."""
        pairs = sorted(b / a for a, b in zip(first, second, strict=True))
        away = round(0.98 * math.sqrt(len(pairs)))
        middle = len(pairs) // 2
        return cls(
            statistics.median(pairs), pairs[max(middle - away, 0)], pairs[min(middle + away, len(pairs) - 1)]
        )


@dataclass(frozen=True)
class Comparison:
    """One side against another: medians of jobs a second; the ratios of their time and of their CPU time."""

    name: str
    without: float
    with_it: float
    wall: Ratio
    cpu: Ratio
    goal: float | None


#: Without the bridge and with it; with it, without a store and with one; and with a store, without
#: OpenTelemetry and with it.
BRIDGE = ("native", "bridged")
STORE = ("bridged", "reserved")
TRACED = ("reserved", "traced")

#: The number of processes of each side, one after the other: they differ more than the slices of one.
PROCESSES = 6
_WARM = 2


def compare(
    name: str,
    module: str,
    options: dict[str, str],
    *,
    rounds: int,
    goal: float | None,
    sides: tuple[str, str] = BRIDGE,
) -> Comparison:
    """Run both sides in turn; a process's first pairs warm up and do not count."""
    options = {**options, "sides": ",".join(sides), "rounds": str(rounds + _WARM)}
    ran = [run(module, options) for _ in range(PROCESSES)]
    first, second = ([result for process in ran for result in process[k][_WARM:]] for k in (0, 1))
    return Comparison(
        name,
        statistics.median(side.jobs / side.wall for side in first),
        statistics.median(side.jobs / side.wall for side in second),
        Ratio.of([side.wall for side in first], [side.wall for side in second]),
        Ratio.of([side.cpu for side in first], [side.cpu for side in second]),
        goal,
    )


def run(module: str, options: dict[str, str]) -> list[list[Result]]:
    """Return the results of a module, for each of its sides."""
    environment = {**os.environ, **{f"BENCH_{name.upper()}": value for name, value in options.items()}}
    done = subprocess.run(
        [sys.executable, "-m", module], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module} {options} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return [[Result(**noted) for noted in side] for side in json.loads(done.stdout.splitlines()[-1])]
