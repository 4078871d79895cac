"""A private server: its folder, its processes, its start and its end."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Protocol

from typing_extensions import Self

from tests.servers.ports import free_port

#: How many times as long a machine may take that runs the whole suite.
PATIENCE = 3


class Child(Protocol):
    """A process, as `subprocess.Popen` names what it can do."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sent: signal.Signals) -> None: ...

    def kill(self) -> None: ...


class ServerMissing(Exception):
    """The server is not installed; the message names its package."""


class ServerFailed(Exception):
    """The server did not start or stop as it should; the message ends with its log."""


def eventually(condition: Callable[[], object], *, seconds: float = 30, what: str = "the condition") -> None:
    """Return when the condition holds, or raise TimeoutError after so many seconds of an idle machine."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > PATIENCE * seconds:
            raise TimeoutError(f"{what} did not hold within {PATIENCE * seconds:g} s")
        # A long wait asks less often, and leaves the machine to the processes that it waits for.
        time.sleep(min(0.02 + waited / 50, 0.1))


def processes_in(folder: Path) -> set[int]:
    """Return the ids of the processes that work in this folder or below it (Linux; elsewhere none)."""
    return {int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _works_in(entry, folder)}


def _works_in(process: Path, folder: Path) -> bool:
    try:
        return (process / "cwd").readlink().is_relative_to(folder)
    except OSError:
        return False


class Server(ABC):
    """A server in a temporary folder of its own, which leaves no process behind.

    Start it from a thread that lives as long as it should: it dies with the thread that started it.
    """

    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    start_seconds: ClassVar[float] = 60
    #: The place of its folder; None for that of temporary files.
    place: ClassVar[Path | None] = None

    def __init__(self) -> None:
        self.port = free_port()
        self._temporary = tempfile.TemporaryDirectory(
            prefix="ojs-server-", dir=self.place, ignore_cleanup_errors=True
        )
        self.folder = Path(self._temporary.name).resolve()
        self._children: list[Child] = []

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL by which clients connect."""

    @abstractmethod
    def _launch(self) -> None:
        """Spawn the server's processes, the server itself last."""

    @abstractmethod
    def _answers(self) -> bool:
        """Return whether a client gets an answer."""

    @property
    def pid(self) -> int:
        """The process id of the server itself."""
        return self._children[-1].pid

    def start(self) -> None:
        """Start the server and return when it answers."""
        if self._children:
            raise ServerFailed(f"{type(self).__name__} runs already")
        try:
            self._launch()
            eventually(self._is_up, seconds=self.start_seconds, what=f"an answer of {type(self).__name__}")
        except TimeoutError as error:
            log = self._log_end()
            self.kill()
            raise ServerFailed(f"{error}\n{log}") from error
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop the server in good order; its data stay until close()."""
        for child in reversed(self._children):
            child.send_signal(self.stop_signal)
            try:
                child.wait(90)
            except subprocess.TimeoutExpired:
                child.kill()
        self.kill()

    def kill(self) -> None:
        """Kill every process of the server with signal 9."""
        for child in reversed(self._children):
            child.kill()
            child.wait()
        self._children.clear()
        for pid in processes_in(self.folder):
            _kill(pid)
        eventually(lambda: not processes_in(self.folder), what=f"the end of {type(self).__name__}")

    def restart(self) -> None:
        """Start again on the same port with the same data, after a stop if the server still runs."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop the server and remove its data."""
        self.stop()
        self._temporary.cleanup()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _spawn(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, user: int | None = None
    ) -> None:
        with (self.folder / "log").open("ab") as log:
            child = subprocess.Popen(
                [*_dies_with_us(self.stop_signal), *command],
                cwd=self.folder,
                env=env,
                user=user,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # an interrupt from the terminal is for pytest, which stops us
            )
        self._children.append(child)

    def _is_up(self) -> bool:
        if any(child.poll() is not None for child in self._children):
            raise ServerFailed(f"{type(self).__name__} ended while it started\n{self._log_end()}")
        return self._answers()

    def _log_end(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]


def _dies_with_us(sent: signal.Signals) -> list[str]:
    """Return the command prefix by which the kernel signals the child when this process dies."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", sent.name.removeprefix("SIG"), "--"] if setpriv else []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
