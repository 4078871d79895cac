"""The demonstration's worker processes, one of each framework."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).parent
WORKERS = {
    "celery": ["celery", "-A", "celery_app", "worker", "-c", "2", "-l", "WARNING"],
    "dramatiq": ["dramatiq", "dramatiq_app", "--processes", "1", "--threads", "4"],
}


def environment(valkey_url: str, store: str) -> dict[str, str]:
    """Return the environment of the workers, and of the processes that send them jobs."""
    return {
        **os.environ,
        "OJS_DEMO_VALKEY": valkey_url,
        "OJS_BRIDGE_STORE": store,
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        # Dramatiq looks for due messages this often, in milliseconds; by default once a second.
        "dramatiq_worker_timeout": "100",
    }


@contextmanager
def working(env: dict[str, str], folder: Path) -> Iterator[dict[str, Path]]:
    """Run the workers; yield the files in a folder that their output goes to."""
    logs = {name: folder / f"{name}.log" for name in WORKERS}
    with ExitStack() as stack:
        for name, command in WORKERS.items():
            log = stack.enter_context(logs[name].open("wb"))
            worker = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", *command], env=env, cwd=folder, stdout=log, stderr=log
            )
            stack.callback(_stop, worker)
        yield logs


def _stop(worker: subprocess.Popen[bytes]) -> None:
    worker.terminate()
    try:
        worker.wait(timeout=10)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
