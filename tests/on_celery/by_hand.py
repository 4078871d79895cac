"""Celery's messages delivered one at a time, in this process, by Celery's own requests and no worker."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Celery, Task
from celery.app.trace import trace_task_ret
from celery.concurrency.solo import TaskPool
from celery.worker.request import create_request_cls
from kombu import Queue
from kombu.utils.imports import symbol_by_name

from ojs_bridge import Bridge
from ojs_bridge.celery import install
from ojs_bridge.celery.task import NativeTask
from tests.contract.steps import Run, Step

#: The tasks, with Celery's own options, none of which has a job wait.
TASKS: dict[str, dict[str, Any]] = {
    "plain": {"default_retry_delay": 0},
    "auto": {"autoretry_for": (OSError,), "dont_autoretry_for": (FileNotFoundError,), "max_retries": 2},
    "backoff": {"autoretry_for": (OSError,), "retry_backoff": 3, "retry_jitter": False},
    "kwargs": {"autoretry_for": (Exception,), "retry_kwargs": {"max_retries": 1, "countdown": 0}},
    "throws": {"throws": (KeyError,)},
    "early": {"acks_late": False, "max_retries": 1, "default_retry_delay": 0},
    "requeued": {"reject_on_worker_lost": True},
    "retried": {"retry_on_worker_lost": True, "max_retries": 1},
    "dropped": {"acks_on_failure_or_timeout": False},
    "kept": {"acks_on_timeout": False},
}  # fmt: skip
Installing = Callable[[Celery], object]
numbers = itertools.count()


class Lossy(TaskPool):
    """A pool in which a job that carries the header `dies` loses its process, or its time."""

    def apply_async(self, target: Any, args: Any = (), **callbacks: Any) -> Any:
        """Run a job here, or say what became of it."""
        dies = args[2].get("dies")
        if not dies:
            return super().apply_async(target, args, **callbacks)
        callbacks["accept_callback"](0, time.monotonic())
        error = TimeLimitExceeded(1) if dies == "time limit" else WorkerLostError("killed")
        callbacks["error_callback"](_info(error))
        if dies == "time limit":
            callbacks["timeout_callback"](soft=False, timeout=1)
        return None


def _info(error: Exception) -> ExceptionInfo:
    try:
        raise error
    except Exception:
        return ExceptionInfo()


class ByHand:
    """An app with tasks that do what their arguments say, and what was seen of its jobs."""

    def __init__(self, queue: str, installing: Installing, *, notes: list[Any] | None = None) -> None:
        self.queue = queue
        self.notes: list[Any] = [] if notes is None else notes
        self.app = Celery(queue, broker="memory://", backend="cache+memory://", set_as_current=False)
        self.app.conf.update(task_default_queue=queue, task_acks_late=True)
        installing(self.app)
        # The app's clock stands still, so that a delay that Celery writes into a message is exact.
        self._began = self.app.now().replace(microsecond=0)
        self.app.now = lambda: self._began
        self.pool = Lossy()
        self._connection = self.app.connection_for_read()
        self._channel = self._connection.channel()

    @classmethod
    def of(cls, app: Celery, queue: str) -> ByHand:
        """Deliver what an app has sent to a queue."""
        hand = cls(queue, lambda _: None)
        connection = app.connection_for_read()
        hand.app, hand._connection, hand._channel = app, connection, connection.channel()
        return hand

    def define(self, name: str, **options: Any) -> Task:
        """Define a task whose nth run does what its nth argument says."""

        def run(task: Task, *steps: Step) -> Any:
            request = task.request
            n = 1 + sum(note[:2] == ("run", request.id) for note in self.notes)
            shown = dict(request.headers or {}), sorted(request.properties or {}), task.name
            self.notes.append(("run", request.id, request.retries, *shown))
            return Run(n, task).does(steps)

        return self.app.task(shared=False, bind=True, name=name, lazy=False, **options)(run)

    def send(self, name: str, *steps: Step, **options: Any) -> str:
        """Send a job, and return its id."""
        return str(self.app.tasks[name].apply_async(steps, **options).id)

    def take(self) -> Any:
        """Take a message from the queue, or None."""
        queue = Queue(self.queue, self.queue, routing_key=self.queue)(self._channel)
        return queue.get(accept=["json", "pickle"])

    def deliver(self) -> bool:
        """Deliver the next message as a worker does, due or not; return whether there was one."""
        message = self.take()
        if message is None:
            return False
        headers = message.headers
        eta = headers.get("eta") and datetime.fromisoformat(headers["eta"]) - self._began
        self.notes.append(("delivered", headers["id"], (eta and eta.total_seconds()) or None))
        task = self.app.tasks[headers["task"]]
        outside = getattr(task, "ojs_outside", None)
        if outside and outside.has(headers):
            task = NativeTask(lambda task=task: task)
        trace = functools.partial(trace_task_ret, app=self.app)
        kind = create_request_cls(symbol_by_name(task.Request), task, self.pool, "here", None, trace=trace)
        end = functools.partial(self._end, message)
        kind(
            message,
            on_ack=lambda *_: end("ack"),
            on_reject=lambda _, __, requeue: end("requeue" if requeue else "reject"),
            app=self.app,
            task=task,
        ).execute_using_pool(self.pool)
        return True

    def deliver_all(self) -> None:
        """Deliver until the queue is empty; a job that is not due yet comes back at once."""
        ends = time.monotonic() + 30
        while self.deliver():
            assert time.monotonic() < ends, f"there is no end of deliveries: {self.notes[-8:]}"

    def _end(self, message: Any, how: str) -> None:
        self.notes.append((how, message.headers["id"]))
        {"ack": message.ack, "reject": message.reject, "requeue": message.requeue}[how]()

    def runs(self, job: str) -> list[int]:
        """The native counter of each run of a job."""
        return [note[2] for note in self.notes if note[:2] == ("run", job)]

    def state(self, job: str) -> tuple[str, str]:
        """A job's state and what it returned or raised."""
        result = self.app.AsyncResult(job)
        return str(result.state), repr(result.result).replace(job, "job")


def header(**state: Any) -> str:
    """The `ojs` header of a job."""
    return json.dumps({"v": 1, **state})


def collect(*args: Any) -> list[Any]:
    return list(args)


def failing() -> None:
    raise OSError("down")


def natively(app: Celery) -> None:
    """Install nothing."""


def plain(app: Celery) -> None:
    """Install a bridge and nothing else; its clock is the app's, and no job has to wait."""
    engine = install(app, Bridge()).engine
    engine.now = lambda: app.now().astimezone(timezone.utc)
    engine.early = lambda _: None


def outside(app: Celery) -> None:
    """Install a bridge that has none of the jobs."""
    bridge = Bridge(retry={"max_attempts": 9, "initial_interval": "PT0.001S"})
    install(app, bridge, policies={"*": {}, "early": {"acks_late": True}}, canary=0)


def by_hand(installing: Any, unique: str) -> ByHand:
    hand = ByHand(f"{unique}-{next(numbers)}", installing)

    class Called(Task):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            hand.notes.append(("enter", self.request.id))
            return super().__call__(*args, **kwargs)

    class Handled(Task):
        abstract = True

        def on_retry(self, exc: Any, task_id: str, *rest: Any) -> None:
            hand.notes.append(("on_retry", task_id, type(exc)))

        def on_failure(self, exc: Any, task_id: str, *rest: Any) -> None:
            hand.notes.append(("on_failure", task_id, type(exc)))

        def after_return(self, status: str, retval: Any, task_id: str, *rest: Any) -> None:
            hand.notes.append(("after_return", task_id, status))

    for name, options in TASKS.items():
        hand.define(name, **options)
    hand.app.task(shared=False, name="collect", lazy=False)(collect)
    hand.define("called", base=Called, max_retries=2, default_retry_delay=0)
    hand.define("handled", base=Handled, max_retries=2, default_retry_delay=0)
    return hand
