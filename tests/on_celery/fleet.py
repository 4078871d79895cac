"""A real worker process, jobs sent to it, and what is seen of them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from celery import Celery, signals
from celery._state import get_current_app
from celery.contrib.testing.worker import start_worker
from celery.result import AsyncResult
from kombu import Queue
from kombu.asynchronous import set_event_loop

from ojs_bridge import Bridge
from ojs_bridge.celery.installation import attach
from tests.contract.notes import Noting, Settings, client
from tests.forking import ROOT, Forked, module
from tests.on_celery.project import make_app
from tests.servers import eventually

#: Seconds that a run may be late on a loaded machine; Redis under gevent alone is up to 4 s late.
LATE = 12.0
ENDED = {"SUCCESS", "FAILURE", "REVOKED"}


def in_seconds(seconds: float) -> str:
    """A time from now as the wire form writes it."""
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


@dataclass
class Ran:
    """One run of a job."""

    at: float
    retries: int
    state: str | None
    more: dict[str, Any]

    @property
    def ojs(self) -> dict[str, Any]:
        """The retry state that the message brought."""
        return json.loads(self.state) if self.state else {}

    @property
    def attempt(self) -> int:
        """The attempt that the message says it is."""
        return self.ojs.get("attempt", 1)


def celery(arguments: list[str], env: Mapping[str, str], log: Path) -> Forked | subprocess.Popen[bytes]:
    """Start a `celery` command that writes to a log, in a process group of its own.

    A green one starts by itself, before anything is imported.
    """
    if "gevent" not in arguments:
        return Forked(module, "celery", *arguments, env=env, log=log, leads=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "celery", *arguments],
            cwd=ROOT,
            env=env,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


@contextmanager
def worker_here(app: Celery, **given: Any) -> Iterator[None]:
    """Have a worker in this process, which leaves the log and the current app as they are."""

    def leave(**_: Any) -> None:
        """Stand for a set-up of one's own: Celery then makes none."""

    # Before Celery 5.5 a second worker keeps the event loop of the first one, and runs no job with an ETA.
    set_event_loop(None)
    options = {
        "pool": "threads",
        "concurrency": 4,
        "perform_ping_check": False,
        "shutdown_timeout": 60,
        **given,
    }
    before = get_current_app()
    signals.setup_logging.connect(leave)
    with start_worker(app, **options):
        yield
    signals.setup_logging.disconnect(leave)
    # A worker makes its app the current one.
    before.set_current()


class Worker:
    """One `celery worker` process."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        *options: str,
        env: Mapping[str, str] | None = None,
        mingles: bool = False,
    ) -> None:
        self.log_file = folder / f"{settings.queue}.log"
        self.log_file.touch()
        self._begins = self.log_file.stat().st_size
        self.asked = False
        arguments = ["-A", "tests.on_celery.worker", "worker", "-l", "INFO", "-n", f"{settings.queue}@%h"]
        alone = [] if mingles else ["--without-gossip", "--without-mingle"]
        arguments += [*alone, *options]
        names = [value for option, value in itertools.pairwise(arguments) if option == "-n"]
        self._name = names[-1].replace("%h", socket.gethostname())
        environment = {**os.environ, **settings.to_env(), "C_FORCE_ROOT": "1", **(env or {})}
        self.process = celery(arguments, environment, self.log_file)

    @property
    def log(self) -> str:
        """The worker's log so far."""
        return self.log_file.read_text(errors="replace")

    def await_ready(self) -> None:
        """Wait until the worker consumes."""
        eventually(
            lambda: self._is_ready() or self.process.poll() is not None,
            seconds=60,
            what="a ready worker",
        )
        assert self.process.poll() is None, self.log

    def _is_ready(self) -> bool:
        # Earlier workers, and workers beside this one, write to the same log.
        own = self.log_file.read_bytes()[self._begins :]
        return f" {self._name} ready.".encode() in own

    def ask_to_stop(self) -> None:
        """Ask the worker for a warm shutdown, once: a second time means a cold one."""
        if self.process.poll() is None and not self.asked:
            self.asked = True
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """End the worker warmly and return its exit status."""
        self.ask_to_stop()
        try:
            # An ending child waits up to 30 s where Celery has forgotten the job that it had just begun.
            return self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.say_where_it_stands()
            self.process.kill()
            return self.process.wait()

    def kill(self) -> None:
        """Kill the worker and its pool with signal 9, as a machine that loses its power would."""
        pool = self._pool()
        self.process.kill()
        for pid in pool:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def say_where_it_stands(self) -> str:
        """Have every process of the worker write its stacks, and return the end of the log with them."""
        said = self.log[-8000:]
        for pid in (self.process.pid, *self._pool()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGRTMIN)
            time.sleep(0.3)  # one after the other, into one log
        return f"{said}\n\n{self.log[-20_000:]}"

    @property
    def processes(self) -> list[int]:
        """The process ids of the worker and its pool."""
        return [self.process.pid, *self._pool()]

    def _pool(self) -> list[int]:
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for thread in threads for pid in thread.read_text().split()]


class Fleet:
    """An app, as this process sends with it; its workers are other processes."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.app: Celery = make_app(settings, "tests.on_celery.polling:Polling+")
        if settings.broker.startswith("amqp"):
            self.app.conf.broker_transport_options = {"confirm_publish": True}
        self.bridge: Bridge = attach(self.app)
        self.worker: Worker | None = None

    def start(self, *options: str, **more: Any) -> Worker:
        """Start a worker process."""
        self.worker = Worker(self.settings, self.folder, *options, **more)
        return self.worker

    def replace(self, *options: str) -> Worker:
        """Kill the worker, if it has not ended by itself, and start another one."""
        self.worker.kill()
        return self.start(*options)

    @property
    def node(self) -> str:
        """The worker's name, as remote control knows it."""
        return f"{self.settings.queue}@{socket.gethostname()}"

    def task(self, name: str) -> Any:
        """The task of a name."""
        return self.app.tasks[name]

    def send(self, name: str, *args: Any, **options: Any) -> AsyncResult:
        """Send a job to a task of a name."""
        return self.task(name).apply_async(args, **options)

    def end(self, job: AsyncResult, *, seconds: float = 45) -> str:
        """Wait until a job has ended, and return its state."""

        def ended() -> bool:
            return job.state in ENDED

        try:
            eventually(ended, seconds=seconds)
        except TimeoutError:
            log = self.worker.say_where_it_stands() if self.worker else ""
            raise AssertionError(f"{job.id} is {job.state} after {len(self.runs(job))} runs\n{log}") from None
        return str(job.state)

    def runs(self, job: AsyncResult) -> list[Ran]:
        """Every run of a job so far."""
        return [Ran(run["at"], run["retries"], run["state"], run) for run in self._list("runs", job)]

    def gaps(self, job: AsyncResult) -> list[float]:
        """Seconds from each run to the next."""
        runs = self.runs(job)
        return [b.at - a.at for a, b in itertools.pairwise(runs)]

    def calls(self, job: AsyncResult, name: str | None = None) -> list[list[Any]]:
        """The handlers that were called for a job, with their arguments, or only those of a name."""
        found = self._list("calls", job)
        return [call for call in found if call[0] == name or (name is None and "publish" not in call[0])]

    def events(self, job: AsyncResult) -> list[dict[str, Any]]:
        """The events of a job, in the order in which listeners heard them."""
        return self._list("events", job)

    def ending(self, job: AsyncResult, *, nth: int = 1) -> dict[str, Any]:
        """Wait for the nth event that ends a job, and return its data."""

        def ends() -> list[dict[str, Any]]:
            return [e["data"] for e in self.events(job) if e["type"] in ("job.completed", "job.discarded")]

        eventually(lambda: len(ends()) >= nth, seconds=20, what=f"ending {nth} of {job.id}")
        return ends()[nth - 1]

    def due(self, run: Ran) -> float:
        """The time at which a run was due."""
        return datetime.fromisoformat(run.ojs["next_retry_at"].replace("Z", "+00:00")).timestamp()

    def retry_due(self, job: AsyncResult) -> float:
        """The time at which a job's only retry was due, as its event says."""
        (data,) = (event["data"] for event in self.events(job) if event["type"] == "job.retrying")
        return datetime.fromisoformat(data["next_retry_at"].replace("Z", "+00:00")).timestamp()

    def buried(self, queue: str) -> list[Any]:
        """Take every message out of `<queue>.dead`."""
        found = []
        with self.app.connection_for_read() as connection:
            dead = Queue(f"{queue}.dead", no_declare=True)(connection.default_channel)
            with suppress(*connection.channel_errors):  # nothing was ever buried here
                while (message := dead.get(no_ack=True, accept=["json", "pickle"])) is not None:
                    found.append(message)
        return found

    def waiting(self) -> int:
        """The number of messages that the broker, Valkey, has in the queue or not acknowledged."""
        broker = client(self.settings.broker)
        return int(broker.llen(self.settings.queue)) + int(broker.hlen("unacked"))

    def lines(self, job: AsyncResult) -> list[str]:
        """The worker's log lines about what was decided on a job."""
        assert self.worker
        return [line for line in self.worker.log.splitlines() if f"job {job.id} (" in line]

    def _list(self, kind: str, job: AsyncResult) -> list[Any]:
        return Noting(self.settings.backend).read(kind, job.id)
