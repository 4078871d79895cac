"""One side of a comparison is a process of its own; sides run in turn.

The ratio is that of the least CPU time a job each side needed: what else a machine does only ever adds to it.
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
class Comparison:
    """Native against bridged: medians of jobs a second; the ratio of CPU time, and its range pair by pair."""

    name: str
    native: float
    bridged: float
    ratio: float
    lowest: float
    highest: float
    goal: float


def compare(name: str, module: str, options: dict[str, str], *, rounds: int, goal: float) -> Comparison:
    """Run both sides in turn; the first pair warms up and does not count."""
    pairs = [
        tuple(_run(module, {**options, "side": side}) for side in ("native", "bridged"))
        for _ in range(rounds + 1)
    ]
    native, bridged = zip(*pairs[1:], strict=True)
    ratios = [b.cpu / n.cpu for n, b in zip(native, bridged, strict=True)]
    return Comparison(
        name,
        statistics.median(side.jobs / side.wall for side in native),
        statistics.median(side.jobs / side.wall for side in bridged),
        min(side.cpu for side in bridged) / min(side.cpu for side in native),
        min(ratios),
        max(ratios),
        goal,
    )


def _run(module: str, options: dict[str, str]) -> Result:
    environment = {**os.environ, **{f"BENCH_{name.upper()}": value for name, value in options.items()}}
    done = subprocess.run(
        [sys.executable, "-m", module], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module} {options} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))
