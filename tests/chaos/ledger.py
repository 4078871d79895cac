"""Jobs note their lives in files, without broker or store: one file a process, one write a line."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Ledger:
    """Appends lines to a file of this process's own; a line outlives a kill of the process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file = self._pid = -1

    def note(self, what: str, job: str, attempt: int, **more: Any) -> None:
        """Note what happens to a job at this moment."""
        line = {"at": time.time(), "what": what, "job": job, "attempt": attempt, "pid": os.getpid(), **more}
        os.write(self._descriptor(), (json.dumps(line) + "\n").encode())

    def await_release(self, job: str) -> None:
        """Wait until a reader releases the job."""
        while not self.is_released(job):
            time.sleep(0.1)

    def is_released(self, name: str) -> bool:
        """Return whether a reader has released something."""
        return Path(f"{self._folder}.{name}").exists()

    def _descriptor(self) -> int:
        if self._pid != os.getpid():
            name = f"{self._folder}/{os.getpid()}-{uuid.uuid4().hex[:6]}"
            self._file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._pid = os.getpid()
        return self._file


@dataclass(frozen=True)
class Line:
    """One line: a job's start, failure, death or success, or an event that the bridge told a listener."""

    at: float
    what: str
    attempt: int
    pid: int


class Reader:
    """Reads the lines that all processes have noted so far, each line once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: defaultdict[Path, int] = defaultdict(int)
        self.jobs: defaultdict[str, list[Line]] = defaultdict(list)
        self.newest = 0.0

    def refresh(self) -> None:
        """Read the lines that are new."""
        for path in self._folder.iterdir():
            with path.open("rb") as file:
                file.seek(self._read[path])
                for text in file:
                    if not text.endswith(b"\n"):
                        break
                    self._read[path] += len(text)
                    self._take(json.loads(text))

    def _take(self, line: dict[str, Any]) -> None:
        self.jobs[line["job"]].append(Line(line["at"], line["what"], line["attempt"], line["pid"]))
        self.newest = max(self.newest, line["at"])

    def release(self, job: str) -> None:
        """Let a job go on that awaits it."""
        Path(f"{self._folder}.{job}").touch()

    def take_back(self, name: str) -> None:
        """Take a release back."""
        Path(f"{self._folder}.{name}").unlink()

    def lines(self, job: str, *what: str) -> Sequence[Line]:
        """Return a job's lines of some kinds in the order of time."""
        return sorted((line for line in self.jobs[job] if line.what in what), key=lambda line: line.at)
