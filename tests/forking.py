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
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
    "ojs_bridge.cli.program",
    "ojs_bridge.http",
    "ojs_bridge.store.redis",
    "ojs_bridge.store.sql",
    "tests.faults",
    "tests.on_celery.project",
    "tests.on_dramatiq.fleet",
    "tests.zombies",
    "uvicorn",
]
_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(IMPORTED)
#: The programs that a test may have left behind.
_living: weakref.WeakSet[Forked] = weakref.WeakSet()


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
        errors: Path | None = None,
    ) -> None:
        log.touch()
        # `make quick` leaves out every test that starts a process.
        sys.audit("subprocess.Popen", sys.executable, words, str(cwd), None)
        to = (log, errors or log)
        self._process = _forkserver.Process(target=_begin, args=(program, words, dict(env), to, cwd, leads))
        self._process.start()
        assert self._process.pid
        self.pid: int = self._process.pid
        _living.add(self)
        with suppress(ProcessLookupError):
            while leads and self.poll() is None and os.getpgid(self.pid) != self.pid:
                time.sleep(0.001)

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

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it with signal 9."""
        self.send_signal(signal.SIGKILL)


@atexit.register
def _kill_all() -> None:
    """Leave no process behind, for which Python would wait."""
    for process in [*_living]:
        process.kill()


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


class Ended(NamedTuple):
    """The exit status of a command, and its output."""

    status: int
    out: str
    err: str


def started(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    cwd: Path,
    leads: bool = False,
    errors: Path | None = None,
) -> Forked:
    """Start a command of a shell, such as `celery -A shop worker`, `ojs-bridge serve` or `python sell.py`."""
    program, arguments = _program_of(words)
    return Forked(program, *arguments, env=env, log=log, cwd=cwd, leads=leads, errors=errors)


def ended(words: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> Ended:
    """Run a command of a shell to its end."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        status = _status_of(started(words, env=env, log=out, errors=err, cwd=cwd))
        return Ended(status, out.read_text(), err.read_text())


def run(program: Callable[..., object], *words: str, env: Mapping[str, str]) -> None:
    """Run a program to its end; an exit status other than 0 is a failure."""
    with tempfile.NamedTemporaryFile() as log:
        status = _status_of(Forked(program, *words, env=env, log=Path(log.name)))
        assert status == 0, Path(log.name).read_text()


def _status_of(process: Forked) -> int:
    try:
        return process.wait(120)
    finally:
        process.kill()


def _program_of(words: Sequence[str]) -> tuple[Callable[..., object], Sequence[str]]:
    match [*words]:
        case ["python", "-c", *rest]:
            return code, rest
        case ["python", "-m", *rest]:
            return module, rest
        case ["python", *rest]:
            return script, rest
        case [name, *rest]:
            return script, [str(Path(sys.executable).with_name(name)), *rest]
    raise ValueError("a command has a word at least")


def _begin(
    program: Callable[..., object],
    words: tuple[str, ...],
    env: dict[str, str],
    to: tuple[Path, Path],
    cwd: Path,
    leads: bool,
) -> None:
    if leads:
        os.setsid()
    for number, path in enumerate(to, start=1):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    sys.stdout.reconfigure(line_buffering="PYTHONUNBUFFERED" in env)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # As Python does: the folder of a file, or else the working directory.
    first = (cwd / words[0]).parent if program is script else cwd
    sys.path[:0] = [str(first), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    # The processes that the program itself starts are started as Python does by default.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    # Celery has the garbage collected before each fork, which would look at all that is imported.
    gc.freeze()
    interrupted = False
    try:
        program(*words)
    except KeyboardInterrupt:
        interrupted = True
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
    if interrupted:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
