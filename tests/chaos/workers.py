"""Worker processes that are killed, and a supervisor that starts them again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.forking import ROOT, Forked, started
from tests.servers import eventually

#: Seconds that a main process may be without a child: Dramatiq's can wait for a dead one for ever.
CHILDLESS = 10.0
#: The seconds more before it has its first child.
STARTING = 30.0
#: What of a worker is killed.
KINDS = ("worker", "main", "child")
#: Runs a command on a machine of its own, by all that the command can see of it: its name follows.
ON_A_MACHINE = (
    *("unshare", "--map-root-user", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c", 'hostname "$0" && exec "$@"'),
)


class Worker:
    """One worker: a main process with its children, in a group of their own, started again when it ends.

    A worker with a `machine` has a host name and process numbers of its own; that needs Linux.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, machine: str = ""
    ) -> None:
        self._command, self._machine = command, machine
        self._environment = {**os.environ, **environment}
        self._log = log
        self._groups: list[int] = []
        self._frozen: int | None = None
        self._start()

    def _start(self) -> None:
        self._process = self._elsewhere() if self._machine else self._here()
        self._groups.append(self._process.pid)
        self._had_children = time.monotonic() + STARTING

    def _here(self) -> Forked | subprocess.Popen[bytes]:
        return started(self._command, env=self._environment, log=self._log, cwd=ROOT, leads=True)

    def _elsewhere(self) -> subprocess.Popen[bytes]:
        program, *words = self._command
        command = [*ON_A_MACHINE, self._machine, str(Path(sys.executable).with_name(program)), *words]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def starts(self) -> int:
        """Return how often the worker was started."""
        return len(self._groups)

    def tend(self) -> None:
        """Start the worker again if it has ended; kill it if it has no children for too long."""
        if _living_children(self.main):
            self._had_children = time.monotonic()
        elif time.monotonic() - self._had_children > CHILDLESS:
            _kill_group(self._process.pid)
        if self._process.poll() is not None:
            self._start()

    @property
    def main(self) -> int:
        """Return its main process, which on a machine of its own is the child of what made the machine."""
        made = _living_children(self._process.pid) if self._machine else ()
        return made[0] if made else self._process.pid

    def kill(self, rng: random.Random, kinds: Sequence[str] = KINDS) -> Sequence[int]:
        """Kill the whole worker, its main process alone, or one child; return the processes, now dead.

        They have the numbers by which they know themselves.
        """
        main = self.main
        children = _living_children(main)
        match rng.choice(kinds):
            case "child" if children:
                killed = [rng.choice(children)]
            case "main":
                killed = [main]
            case _:
                killed = [main, *children]
        known = [_own_number(process) for process in killed]
        if len(killed) > 1:
            self.kill_all()
        else:
            _kill(killed[0])
        while any(_lives(f"{process}") for process in killed):
            time.sleep(0.001)
        return known

    def kill_all(self) -> None:
        """Kill every process of the worker at once."""
        _kill_group(self._process.pid)

    @property
    def is_frozen(self) -> bool:
        """Return whether the worker is stopped, and will be woken."""
        return self._frozen is not None

    def freeze(self) -> None:
        """Stop the whole worker, like a machine that is paused."""
        self._frozen = self._process.pid
        _signal_group(self._frozen, signal.SIGSTOP)

    def thaw(self) -> None:
        """Wake it."""
        if self._frozen is not None:
            _signal_group(self._frozen, signal.SIGCONT)
            self._frozen = None

    def ask_to_stop(self) -> None:
        """Ask for a warm shutdown."""
        if self._process.poll() is None:
            self._process.terminate()

    def close(self, seconds: float = 4) -> None:
        """Wait for the end a while, then kill whatever is left of all the worker's lives."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        for group in self._groups:
            _kill_group(group)
        self._process.wait()
        eventually(lambda: not any(map(_group_lives, self._groups)), what="the end of a worker")


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _kill_group(group: int) -> None:
    _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, sent: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, sent)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _living_children(process: int) -> list[int]:
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in children if _lives(child)]


def _own_number(process: int) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return process
    return int(status.partition("NSpid:")[2].partition("\n")[0].split()[-1])


def _lives(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
