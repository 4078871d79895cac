"""A fleet that is rolled out and back: its workers, and every job that was sent to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from celery import Celery, Signature, chain, chord
from celery.result import AsyncResult

from ojs_bridge.celery.installation import attach
from tests.forking import ROOT
from tests.on_celery.fleet import ENDED, celery
from tests.on_celery.rolling import Side, ledger, make_app
from tests.servers import eventually

PATIENCE = 50

#: task, arguments after the label, state, runs on old workers, runs on new workers
JOBS: dict[str, tuple[str, tuple[Any, ...], str, int, int]] = {
    "instant": ("automatic", (0,), "SUCCESS", 1, 1),
    "autoretried": ("automatic", (2,), "SUCCESS", 3, 3),
    "autoretried, exhausted": ("automatic", (9,), "FAILURE", 4, 4),
    "retried": ("manual", (2,), "SUCCESS", 3, 3),
    "retried, exhausted": ("manual", (9,), "FAILURE", 4, 4),
    "retried in flight": ("manual", (1, 2.0), "SUCCESS", 2, 2),
    "default": ("default", (9,), "FAILURE", 4, 4),
    "strict": ("strict", (9,), "FAILURE", 4, 2),
    "loose": ("loose", (9,), "FAILURE", 4, 6),
}
MANY = 101
OWN = {"max_attempts": 6}


@dataclass(frozen=True)
class Sent:
    """A job, and how it has to end: its state, and its runs on old workers and on new ones.

    Where both have run it the runs are between the two; MANY is any number.
    """

    label: str
    task: str
    result: AsyncResult
    state: str
    old: int
    new: int


class Worker:
    """One worker process of a side. Its options are those of a user, except for the pool."""

    def __init__(self, side: Side, folder: Path, number: int) -> None:
        self.name = f"{side.name}{number}"
        self._log = folder / f"{self.name}.log"
        command = ["-A", "tests.on_celery.rolling_worker", "worker"]
        command += ["-P", "threads", "-c", "4", "-l", "INFO", "-n", f"{self.name}@%h"]
        env = {**os.environ, "C_FORCE_ROOT": "1", **side.to_env()}
        # A worker of the old side imports nothing of the bridge.
        self.process = (_plain if side.store is None else celery)(command, env, self._log)

    @property
    def log(self) -> str:
        """The worker's log so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def await_ready(self) -> None:
        """Wait until it consumes."""
        eventually(lambda: " ready." in self.log, seconds=PATIENCE, what=f"{self.name}, ready")

    def stop(self) -> None:
        """End it warmly."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE) == 0, self.log


def _plain(arguments: list[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "celery", *arguments], cwd=ROOT, env=env, stdout=out, stderr=out
        )


class Roll:
    """One queue with the producers of both sides, the workers, and the ends of the jobs."""

    def __init__(self, url: str, queue: str, folder: Path) -> None:
        self.old = Side(url, queue)
        self.new = replace(self.old, store=f"sqlite:///{folder}/ojs.db")
        self.sent: list[Sent] = []
        self._folder = folder
        self._workers: list[Worker] = []
        self._db = ledger(url)
        self._phase = 0
        self._unaware, self._aware = (
            make_app(side, "tests.on_celery.polling:Polling+") for side in (self.old, self.new)
        )
        self.bridge = attach(self._aware)

    def start(self, side: Side) -> Worker:
        """Start a worker."""
        self._workers.append(Worker(side, self._folder, len(self._workers)))
        return self._workers[-1]

    def close(self) -> None:
        """Kill what is left of the workers."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.wait()

    def arrive(self, phase: int) -> None:
        """Let arrive what travelled until this phase."""
        self._phase = phase
        self._db.set(f"phase:{self.old.queue}", phase)

    def enter(self, phase: int) -> None:
        """Let arrive what travelled until this phase, and send jobs from both producers."""
        self.arrive(phase)
        for app, producer in ((self._unaware, "unaware"), (self._aware, "aware")):
            prefix = f"{phase} {producer}"
            for title, (task, args, *ending) in JOBS.items():
                self._send(app.tasks[task].s(f"{prefix} {title}", *args), *ending)
            self._send_chain(app, prefix)
            self._send_chord(app, prefix)
        self._send_with_policies(f"{phase} aware")

    def _send(self, signature: Signature, *ending: Any) -> None:
        self._expect(signature, signature.apply_async(), *ending)

    def _expect(self, signature: Signature, result: AsyncResult, state: str, old: int, new: int) -> None:
        label = signature.args[-1 if signature.task == "body" else 0]
        self.sent.append(Sent(label, signature.task, result, state, old, new))

    def _members(self, app: Celery, prefix: str) -> list[tuple[Signature, int, int]]:
        """Return a job that ends at once, one that arrives in the next phase, and one that is retried."""
        instant, traveller, retried = (app.tasks[task].si for task in ("automatic", "traveller", "automatic"))
        return [
            (instant(f"{prefix} instant", 0), 1, 1),
            (traveller(f"{prefix} traveller", self._phase + 1), MANY, MANY),
            (retried(f"{prefix} retried", 2), 3, 3),
        ]

    def _send_chain(self, app: Celery, prefix: str) -> None:
        members = self._members(app, f"{prefix} chain")
        last = chain(*(signature for signature, *_ in members), app=app).apply_async()
        for (signature, *runs), result in zip(members, (last.parent.parent, last.parent, last), strict=True):
            self._expect(signature, result, "SUCCESS", *runs)

    def _send_chord(self, app: Celery, prefix: str) -> None:
        members = self._members(app, f"{prefix} chord")
        body = app.tasks["body"].s(f"{prefix} body")
        result = chord([signature for signature, *_ in members], body, app=app).apply_async()
        for (signature, *runs), member in zip(members, result.parent.results, strict=True):
            self._expect(signature, member, "SUCCESS", *runs)
        self._expect(body, result, "SUCCESS", 1, 1)
        failing = app.tasks["manual"].si(f"{prefix} failing member", 9)
        other = app.tasks["automatic"].si(f"{prefix} other member", 0)
        body = app.tasks["body"].s(f"{prefix} body that never runs")
        result = chord([failing, other], body, app=app).apply_async()
        self._expect(failing, result.parent.results[0], "FAILURE", 4, 4)
        self._expect(body, result, "FAILURE", 0, 0)

    def _send_with_policies(self, prefix: str) -> None:
        """Send jobs with policies of their own, which old workers do not know."""
        own = self._aware.tasks["automatic"].si
        self._send(own(f"{prefix} own", 9).set(ojs_retry=OWN), "FAILURE", 4, 6)
        first, last = own(f"{prefix} first", 0), own(f"{prefix} own in a chain", 9).set(ojs_retry=OWN)
        result = chain(first, last, app=self._aware).apply_async()
        self._expect(first, result.parent, "SUCCESS", 1, 1)
        self._expect(last, result, "FAILURE", 4, 6)

    def send_parking(self) -> None:
        """Send a job whose retry a new worker parks, and wait for its first run."""
        label = f"{self._phase} parking {len(self.sent)}"
        self._send(self._aware.tasks["parking"].s(label, 1), "SUCCESS", 2, 2)
        eventually(lambda: self.runs(label), seconds=PATIENCE, what=f"a run of {label}")

    def runs(self, label: str) -> list[dict[str, Any]]:
        """Return the runs of a job, in their order."""
        return [json.loads(text) for text in self._db.lrange(f"runs:{self.old.queue}:{label}", 0, -1)]

    def ends(self, job: Sent) -> list[str]:
        """Return every state that a job has ended in; one that never runs has only its result's."""
        if job.old == 0:
            return [job.result.state] if job.result.state in ENDED else []
        return self._db.lrange(f"ends:{self.old.queue}:{job.label}", 0, -1)

    def sides(self, phase: int) -> set[str]:
        """Return which sides have run jobs that were sent in a phase."""
        return {
            run["by"]
            for job in self.sent
            if job.label.startswith(f"{phase} ")
            for run in self.runs(job.label)
        }

    def await_sides(self, phase: int, *sides: str) -> None:
        """Wait until all of the sides have run jobs that were sent in a phase."""
        eventually(
            lambda: self.sides(phase) >= set(sides), seconds=PATIENCE, what=f"{sides} in {self.sides(phase)}"
        )

    def travellers(self, phase: int) -> list[str]:
        """Return the labels of the jobs that a phase has sent on their way to the next."""
        return [
            job.label for job in self.sent if job.task == "traveller" and job.label.startswith(f"{phase} ")
        ]

    def await_arrival(self, phase: int) -> None:
        """Wait until those that a phase has sent on their way are there."""
        for job in self.sent:
            if job.label in self.travellers(phase):
                self._await_end(job)

    def _await_end(self, job: Sent) -> None:
        what = f"{job.label}: {self.runs(job.label)}"
        eventually(lambda: self.ends(job), seconds=PATIENCE, what=what)

    def await_ends(self) -> None:
        """Wait until every job has ended, and nothing is left in queue, worker or store."""
        for job in self.sent:
            self._await_end(job)
        queue, left = self.old.queue, self.bridge.retries.count
        eventually(
            lambda: not (self._db.llen(queue) or self._db.hlen("unacked") or left()),
            seconds=PATIENCE,
            what="an empty queue",
        )
