"""The demonstration's worker processes: one of each framework, and one of each that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).parent
#: The queue of the job whose worker is killed.
KILLED_QUEUE = "killed"
_CELERY = ["celery", "-A", "celery_app", "worker", "-l", "WARNING", "--without-mingle", "--without-gossip"]
_DRAMATIQ = ["dramatiq", "dramatiq_app", "--processes", "1"]
WORKERS = {
    "celery": [*_CELERY, "-c", "2", "-Q", "celery", "-n", "demo@%h"],
    "dramatiq": [*_DRAMATIQ, "--threads", "4", "--queues", "demo"],
}
#: The commands of the workers that are killed. The same commands start the workers that take their jobs.
DOOMED = {
    "celery": [*_CELERY, "-c", "1", "-Q", KILLED_QUEUE, "-n", f"{KILLED_QUEUE}@%h"],
    "dramatiq": [*_DRAMATIQ, "--threads", "1", "--queues", KILLED_QUEUE],
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


class Workers:
    """The processes of the demonstration, whose output goes to files in a folder."""

    def __init__(self, env: dict[str, str], folder: Path, stack: ExitStack) -> None:
        self._env, self._folder, self._stack = env, folder, stack
        self.logs: dict[str, Path] = {}
        for name, command in WORKERS.items():
            self._start(name, command)
        self._doomed = {name: self._start(f"{name} (killed)", command) for name, command in DOOMED.items()}

    def kill(self, framework: str) -> None:
        """Kill the worker that runs the job of its queue, with all its processes, and start another one."""
        os.killpg(self._doomed[framework].pid, signal.SIGKILL)
        self._start(f"{framework} (another)", DOOMED[framework])

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        self.logs[name] = self._folder / f"{name}.log"
        log = self._stack.enter_context(self.logs[name].open("wb"))
        worker = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", *command],
            env=self._env,
            cwd=self._folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self._stack.callback(_stop, worker)
        return worker


@contextmanager
def working(env: dict[str, str], folder: Path) -> Iterator[Workers]:
    """Run the workers."""
    with ExitStack() as stack:
        yield Workers(env, folder, stack)


def _stop(worker: subprocess.Popen[bytes]) -> None:
    worker.terminate()
    try:
        worker.wait(timeout=10)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
