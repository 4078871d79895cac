"""The same project without the bridge and with it. Its jobs write down each of their runs."""

from __future__ import annotations

import functools
import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import redis
from celery import Celery, Task
from celery.states import READY_STATES

VARIABLE = "OJS_TEST_ROLLING"
#: Bounds that the policies change: Celery's own is 4 runs for both.
POLICIES: dict[str, dict[str, Any]] = {
    "*": {},
    "strict": {"max_attempts": 2},
    "loose": {"max_attempts": 6},
    "parking": {"initial_interval": "PT6S"},
}
#: Half of the jobs of most tasks, all of one task's, none of another's.
CANARY: dict[str, float] = {"*": 50, "manual": 100, "default": 0}


@dataclass(frozen=True)
class Side:
    """The settings of one worker or producer. A side without a store knows nothing of the bridge."""

    url: str
    queue: str
    store: str | None = None
    canary: dict[str, float] | None = None

    @property
    def name(self) -> str:
        if self.store is None:
            return "old"
        return "new" if self.canary is None else "canary"

    def to_env(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls) -> Side:
        return cls(**json.loads(os.environ[VARIABLE]))


@functools.cache
def ledger(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, decode_responses=True)


def make_app(side: Side, results: str = "") -> Celery:
    """Build the project's app; `results` names another class for its result backend."""
    app = Celery("rolling", broker=side.url, backend=results + side.url, set_as_current=False)
    app.conf.update(
        task_acks_late=True,
        task_default_queue=side.queue,
        broker_connection_retry_on_startup=True,
    )
    if side.store is not None:
        from ojs_bridge import Bridge
        from ojs_bridge.celery import install

        bridge = Bridge(side.store, {"jitter": False, "initial_interval": "PT0.2S"}, park_after="PT2S")
        install(app, bridge, policies=POLICIES, canary=side.canary)
    _define(app, side)
    return app


def _noting_ends(side: Side) -> type[Task]:
    """Return a base class that writes down the states in which its jobs end.

    A native retry may store its RETRY over the FAILURE of the run that came after it.
    """

    class Noting(Task):
        abstract = True

        def after_return(self, status: str, retval: Any, task_id: str, args: Any, *rest: Any) -> None:
            label = next(arg for arg in args if isinstance(arg, str))
            if status in READY_STATES:
                ledger(side.url).rpush(f"ends:{side.queue}:{label}", status)

    return Noting


def _define(app: Celery, side: Side) -> None:
    db, base = ledger(side.url), _noting_ends(side)

    def note(task: Task, label: str) -> int:
        """Write down a run, and return how many there were."""
        state = getattr(task.request, "ojs", None)
        run = {"by": side.name, "retries": task.request.retries, "ojs": state is not None, "at": time.time()}
        return int(db.rpush(f"runs:{side.queue}:{label}", json.dumps(run)))

    def named(name: str, **options: Any) -> Any:
        return app.task(shared=False, bind=True, base=base, name=name, **options)

    def automatic(self: Task, label: str, fails: int) -> str:
        if note(self, label) <= fails:
            raise OSError(label)
        return label

    def manual(self: Task, label: str, fails: int, countdown: float = 0.2) -> str:
        if note(self, label) <= fails:
            raise self.retry(exc=OSError(label), countdown=countdown)
        return label

    @named("traveller", max_retries=100)
    def traveller(self: Task, label: str, until: int) -> str:
        note(self, label)
        if int(db.get(f"phase:{side.queue}") or 0) < until:
            raise self.retry(exc=OSError(label), countdown=0.7)
        return label

    @named("body")
    def body(self: Task, results: list[str], label: str) -> list[str]:
        note(self, label)
        return sorted(results)

    named("automatic", autoretry_for=(OSError,), default_retry_delay=0.2, max_retries=3)(automatic)
    named("manual", max_retries=3)(manual)
    named("default", default_retry_delay=0.2)(manual)
    named("strict", max_retries=3)(manual)
    named("loose", max_retries=3)(manual)
    named("parking", autoretry_for=(OSError,), default_retry_delay=6, max_retries=3)(automatic)
