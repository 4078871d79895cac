"""Programs in processes forked from one that has imported what they need: a second less for each start."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: What every program imports, but no app: its settings are those of its process.
IMPORTED = [
    "tests.on_dramatiq.impatient",
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
    "dramatiq.cli",
    "kombu.pidbox",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
    "ojs_bridge.celery.request",
    "ojs_bridge.celery.worker",
    "ojs_bridge.store.redis",
    "ojs_bridge.store.sql",
    "tests.faults",
    "tests.on_celery.project",
    "tests.on_dramatiq.fleet",
    "tests.zombies",
]
_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(IMPORTED)


class Forked:
    """A running program, with the names of `subprocess.Popen`; it may lead a process group of its own."""

    def __init__(
        self,
        program: Callable[..., object],
        *words: str,
        env: Mapping[str, str],
        log: Path,
        cwd: Path = ROOT,
        leads: bool = False,
    ) -> None:
        log.touch()
        # `make quick` leaves out every test that starts a process.
        sys.audit("subprocess.Popen", sys.executable, words, str(cwd), None)
        self._process = _forkserver.Process(target=_begin, args=(program, words, dict(env), log, cwd, leads))
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
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.returncode

    def send_signal(self, sent: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sent)

    def kill(self) -> None:
        """Kill it with signal 9."""
        self.send_signal(signal.SIGKILL)


def module(name: str, *words: str) -> None:
    """Be `python -m`."""
    sys.argv = [name, *words]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def script(path: str, *words: str) -> None:
    """Be `python` with a file."""
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")


def code(text: str, *words: str) -> None:
    """Be `python -c`."""
    sys.argv = ["-c", *words]
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


def run(program: Callable[..., object], *words: str, env: Mapping[str, str]) -> None:
    """Run a program to its end; an exit status other than 0 is a failure."""
    with tempfile.NamedTemporaryFile() as log:
        status = Forked(program, *words, env=env, log=Path(log.name)).wait(120)
        assert status == 0, Path(log.name).read_text()


def _begin(
    program: Callable[..., object],
    words: tuple[str, ...],
    env: dict[str, str],
    log: Path,
    cwd: Path,
    leads: bool,
) -> None:
    if leads:
        os.setsid()
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    # The processes that the program itself starts are started as Python does by default.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    # Celery has the garbage collected before each fork, which would look at all that is imported.
    gc.freeze()
    try:
        program(*words)
    finally:
        atexit._run_exitfuncs()
