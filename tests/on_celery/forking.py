"""`python -m celery` in a process forked from one that has imported Celery: a second less for each start."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: What every worker imports, but no app: that one's settings are its worker's.
IMPORTED = [
    "celery.app.control",
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.fixups.django",
    "celery.worker.components",
    "celery.worker.consumer",
    "celery.worker.loops",
    "celery.worker.strategy",
    "kombu.pidbox",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
    "ojs_bridge.celery.request",
    "ojs_bridge.celery.worker",
    "ojs_bridge.store.sql",
    "tests.on_celery.project",
]
_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(IMPORTED)


def celery(arguments: list[str], env: Mapping[str, str], log: Path) -> Forked | subprocess.Popen[bytes]:
    """Start a `celery` command that writes to a log; a green one by itself, before anything is imported."""
    if "gevent" not in arguments:
        return Forked(arguments, env, log)
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "celery", *arguments], cwd=ROOT, env=env, stdout=out, stderr=out
        )


class Forked:
    """A running `python -m celery`, with the names of `subprocess.Popen`."""

    def __init__(self, arguments: list[str], env: Mapping[str, str], log: Path) -> None:
        self._process = _forkserver.Process(target=_celery, args=(arguments, dict(env), log))
        self._process.start()
        assert self._process.pid
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal, None as long as there is none."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status, if there is one."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return its status; raises TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("celery", timeout or 0)
        return self.returncode

    def send_signal(self, sent: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sent)

    def kill(self) -> None:
        """Kill it with signal 9."""
        self.send_signal(signal.SIGKILL)


def _celery(arguments: list[str], env: dict[str, str], log: Path) -> Any:
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    sys.argv = ["celery", *arguments]
    try:
        runpy.run_module("celery", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
