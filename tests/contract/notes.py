"""The settings of a fleet, and the notes that its workers take for the tests."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass
from typing import Any

import redis

from ojs_bridge import Breaker, Bridge, Dependency, Event, StorageRetry, standard_errors

VARIABLE = "OJS_TEST_SETTINGS"
#: The environment of a worker whose acknowledgements never arrive has this variable.
UNACKNOWLEDGED = "OJS_TEST_UNACKNOWLEDGED"
#: A worker whose environment has this variable takes no other one for a process of its own machine.
ELSEWHERE = "OJS_TEST_ELSEWHERE"
#: The name of the master of a broker whose URL begins with `sentinel://`.
MASTER = "mymaster"
#: Retries so quick that a test can wait for them; deterministic.
QUICK = {"max_attempts": 3, "initial_interval": "PT0.1S", "jitter": False, "on_exhaustion": "discard"}


class Busy(Exception):
    """An error that the bridge's error map makes a snooze."""


@dataclass(frozen=True)
class Settings:
    """The settings on which the workers of a fleet and the tests that send to it must agree."""

    broker: str
    #: The URL of the notes, and of the results.
    backend: str
    queue: str
    store: str | None = None
    acks_late: bool = True
    quorum: bool = False
    limit: int | None = None
    #: After how many deliveries RabbitMQ drops a message of the fleet's own queue, a quorum queue then.
    deliveries: int | None = None
    reservation: str = "PT1M"
    park_after: str = "PT1M"
    park_delays: bool = False
    #: Seconds after which Redis gives out again what a dead worker had: Celery's visibility timeout,
    #: Dramatiq's heartbeat timeout.
    visibility: float | None = None
    fail_open: bool = False
    #: The fields of the dependencies; a breaker is given by its own fields.
    dependencies: tuple[dict[str, Any], ...] = ()
    #: Whether the bridge has listeners; without them Dramatiq's reads only what it must before an actor runs.
    heard: bool = True
    insist: int = 5
    soft_shutdown: float = 0
    #: Whether Celery ends the jobs whose connection is lost.
    cancels: bool = False
    #: Seconds after which a message that waits in its worker is published anew.
    longest_wait: float = 600
    #: Seconds after which the store forgets what surely has no copy.
    forget_after: float = 300
    #: Seconds between two looks at whether a worker is silent.
    look: float = 30
    #: The URL of the results, where they are not kept beside the notes.
    results: str = ""
    #: The functions of tests/instrumentation that are called with the bridge; those of `instruments` without
    #: their module.
    instruments: tuple[str, ...] = ()
    #: The classes of middleware that stand behind all other middleware of a Dramatiq broker.
    middleware: tuple[str, ...] = ()

    def to_env(self) -> dict[str, str]:
        """The environment of a worker."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls) -> Settings:
        """The settings of this worker."""
        return cls(**json.loads(os.environ[VARIABLE]))


def bridge_of(settings: Settings) -> Bridge:
    """Make the bridge of a fleet, in a worker or in the process that sends."""
    listeners = [broken_listener, Noting(settings.backend).event]
    bridge = Bridge(
        store=settings.store,
        retry=QUICK,
        errors=standard_errors() | {Busy: ("local.busy", "SNOOZE")},
        listeners=listeners if settings.heard else [],
        reservation=settings.reservation,
        park_after=settings.park_after,
        park_delays=settings.park_delays,
        fail_open=settings.fail_open,
        dependencies=[_dependency(fields) for fields in settings.dependencies],
        storage_retry=StorageRetry(max_attempts=settings.insist),
    )
    for name in settings.instruments:
        module, _, function = name.rpartition(".")
        within = importlib.import_module(f"tests.instrumentation.{module or 'instruments'}")
        getattr(within, function)(bridge, settings)
    return bridge


def _dependency(fields: dict[str, Any]) -> Dependency:
    breaker = fields.get("breaker")
    return Dependency(**{**fields, "breaker": breaker and Breaker(**breaker)})


def broken_listener(event: Event) -> None:
    """Fail."""
    raise RuntimeError("this listener is broken")


@functools.cache
def client(url: str) -> redis.Redis:
    """A client of a Valkey."""
    return redis.Redis.from_url(url, decode_responses=True)


class Noting:
    """Takes notes on jobs in a Valkey."""

    def __init__(self, url: str) -> None:
        self.url = url

    def note(self, kind: str, job: str, said: Any) -> int:
        """Note something of a job, and return how many notes of its kind there are.

        A process that can open no connection does so once it can.
        """
        until_then = time.monotonic() + 30
        while True:
            try:
                return int(client(self.url).rpush(f"{kind}:{job}", json.dumps(said, default=repr)))
            except (OSError, redis.ConnectionError) as error:
                if not re.search(r"Err(or|no) 24\b", str(error)) or time.monotonic() > until_then:
                    raise
                time.sleep(0.1)

    def event(self, event: Event) -> None:
        """Note an event."""
        self.note("events", event.subject, event.to_ojs())

    def read(self, kind: str, job: str) -> list[Any]:
        """Return the notes of a kind on a job."""
        return [json.loads(text) for text in client(self.url).lrange(f"{kind}:{job}", 0, -1)]


def until(url: str, key: str) -> bool:
    """Wait until a key is set."""
    while not client(url).exists(key):
        time.sleep(0.05)
    return True
