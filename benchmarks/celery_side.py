"""One side of the Celery comparison: a real worker process ends a number of jobs."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from benchmarks.celery_app import JOBS, counters
from benchmarks.celery_feed import feed


def main() -> None:
    """Enqueue first, then let one prefork child work; what it notes itself is the measurement."""
    feed()
    command = ["celery", "-A", "benchmarks.celery_app", "worker", "-c", "1", "-l", "CRITICAL"]
    worker = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 300
        while not counters.hexists("bench", "end_cpu"):
            if time.monotonic() > deadline:
                raise SystemExit(f"the jobs did not end; {counters.get('failed')} failed")
            time.sleep(0.05)
    finally:
        worker.terminate()
        worker.wait(30)
    noted = {name.decode(): float(value) for name, value in counters.hgetall("bench").items()}
    wall, cpu = (noted[f"end_{what}"] - noted[f"begin_{what}"] for what in ("wall", "cpu"))
    print(json.dumps({"jobs": JOBS, "wall": wall, "cpu": cpu}))


main()
