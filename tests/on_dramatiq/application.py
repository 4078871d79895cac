"""A Dramatiq application in processes of its own: the real `dramatiq` command, and producers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from ojs_bridge import Letter, open_store
from ojs_bridge.store import Filter
from tests.forking import Forked, code, run, script

COMMANDS = Path(sys.executable).parent
Process: TypeAlias = "Forked | subprocess.Popen[bytes]"


class Application:
    """The application of a module on a broker, with its worker and producer processes."""

    def __init__(self, url: str, queue: str, folder: Path, module: str, **settings: str) -> None:
        self.runs = folder / "runs"
        self.runs.touch()
        self.module = module
        self.store_url = settings.pop("store", f"sqlite:///{folder}/ojs.db")
        self.store = open_store(self.store_url, namespace=queue)
        self.log = folder / "log"
        self.environment = {
            **os.environ,
            "APP_BROKER": url,
            "APP_QUEUE": queue,
            "APP_RUNS": str(self.runs),
            "OJS_BRIDGE_STORE": self.store_url,
            "OJS_BRIDGE_NAMESPACE": queue,
            "dramatiq_worker_timeout": "50",
            **{f"APP_{name.upper()}": value for name, value in settings.items()},
        }

    def start(
        self,
        *,
        command: str = "dramatiq",
        fault: str = "",
        processes: int = 1,
        threads: int = 4,
        fresh: bool = False,
    ) -> Process:
        """Start the command in a process group of its own, and before anything is imported if it is to be."""
        words = [
            *(str(COMMANDS / command), self.module),
            *("--processes", str(processes), "--threads", str(threads)),
        ]
        environment = {**self.environment, "APP_FAULT": fault}
        if not fresh:
            return Forked(script, *words, env=environment, log=self.log, leads=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)

    @contextmanager
    def working(self, **options: Any) -> Iterator[Process]:
        """Run the command, as `start` takes it, until the block ends."""
        process = self.start(**options)
        try:
            yield process
        except BaseException:
            print(self.log.read_text())
            raise
        finally:
            end(process)

    def produce(self, text: str) -> None:
        """Run a producer process."""
        self._run(textwrap.dedent(text))

    def ask(self, expression: str) -> Any:
        """Return what an expression is in a producer process, from JSON."""
        answer = self.log.with_name("answer")
        self._run(f"import json\nPath({str(answer)!r}).write_text(json.dumps({expression}))")
        return json.loads(answer.read_text())

    def _run(self, text: str) -> None:
        run(code, f"from pathlib import Path\nfrom {self.module} import *\n{text}", env=self.environment)

    def times(self, word: str) -> list[float]:
        """The times at which a job has run."""
        return [float(at) for name, at in self._lines() if name == word]

    def counts(self) -> Mapping[str, int]:
        """The number of runs of each job."""
        words = [word for word, _ in self._lines()]
        return {word: words.count(word) for word in set(words)}

    def _lines(self) -> list[list[str]]:
        """The lines that the jobs have written, without a line that is not finished."""
        return [line.split() for line in self.runs.read_text().rpartition("\n")[0].splitlines()]

    def letters(self) -> tuple[Letter, ...]:
        """The dead letters in the store."""
        return self.store.letters.list(Filter(), limit=100, cursor=None).letters

    def dead(self) -> dict[str, str]:
        """The dead letters' last error, by job type."""
        return {letter.type: letter.error_type for letter in self.letters()}


def end(process: Process) -> None:
    """Stop a worker in good order, and whatever is left of its group after that."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(90)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
