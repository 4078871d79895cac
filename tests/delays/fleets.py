"""How each framework sends a delayed job, and how its worker is started."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Protocol

import pika
import redis
from pika.exceptions import ChannelClosedByBroker

from ojs_bridge import Bridge
from tests.delays.settings import QUEUE, TASK, Settings


@dataclass(frozen=True)
class Sent:
    """A job that is due at a time (None: now); its first run may ask for a retry in so many seconds."""

    id: str
    due: float | None = None
    retry_in: float | None = None


class Fleet(Protocol):
    """One framework, its broker at the URL of some settings.

    A worker imports the program that starts it before it has its settings, and an app needs them: the apps
    are imported late.
    """

    name: str

    def command(self, width: int, name: str = "delays") -> list[str]:
        """Return the command of a worker that runs so many jobs at a time, and has a name of its own."""

    def send(self, settings: Settings, jobs: Iterable[Sent]) -> None:
        """Send jobs as a user's code does, each with its own id."""

    def release(self, settings: Settings) -> Bridge:
        """Publish in this process what is due, as a worker does, until the bridge is stopped."""

    def released(self, settings: Settings) -> int:
        """Count the jobs that the broker has and no worker has taken."""


class OnCelery:
    """Celery, prefork."""

    name = "Celery"

    def command(self, width: int, name: str = "delays") -> list[str]:
        """Return the command of a worker."""
        options = ["-c", str(width), "-n", f"{name}@%h", "-l", "INFO"]
        return ["celery", "-A", "tests.delays.celery_app", "worker", *options]

    def send(self, settings: Settings, jobs: Iterable[Sent]) -> None:
        """Send jobs."""
        from tests.delays.celery_app import make_app  # see Fleet

        app = make_app(settings)
        task = app.tasks[TASK]
        for job in jobs:
            eta = job.due and datetime.fromtimestamp(job.due, timezone.utc)
            task.apply_async((job.id, job.retry_in), task_id=job.id, eta=eta)
        app.close()

    def release(self, settings: Settings) -> Bridge:
        """Publish in this process what is due."""
        from tests.delays.celery_app import make_app  # see Fleet

        bridge = settings.bridge()
        make_app(settings, bridge)
        bridge.start()
        return bridge

    def released(self, settings: Settings) -> int:
        """Count the jobs that the broker has."""
        return _length(settings, QUEUE)


class OnDramatiq:
    """Dramatiq, one process of several threads."""

    name = "Dramatiq"

    def command(self, width: int, name: str = "delays") -> list[str]:
        """Return the command of a worker."""
        return ["dramatiq", "tests.delays.dramatiq_app", "--processes", "1", "--threads", str(width)]

    def send(self, settings: Settings, jobs: Iterable[Sent]) -> None:
        """Send jobs."""
        from tests.delays.dramatiq_app import make_broker  # see Fleet

        broker = make_broker(settings)
        actor = broker.get_actor(TASK)
        for job in jobs:
            message = dataclasses.replace(actor.message(job.id, job.retry_in), message_id=job.id)
            delay = None if job.due is None else math.ceil(1000 * (job.due - time.time()))
            broker.enqueue(message, delay=delay)
        broker.close()

    def release(self, settings: Settings) -> Bridge:
        """Publish in this process what is due."""
        from tests.delays.dramatiq_app import make_broker  # see Fleet

        bridge = settings.bridge()
        make_broker(settings, bridge)
        bridge.start()
        return bridge

    def released(self, settings: Settings) -> int:
        """Count the jobs that the broker has."""
        return _length(settings, f"dramatiq:{QUEUE}" if settings.on_redis else QUEUE)


def _length(settings: Settings, queue: str) -> int:
    if not settings.on_redis:
        url = pika.URLParameters(settings.broker)
        with suppress(ChannelClosedByBroker), pika.BlockingConnection(url) as connection:
            return int(connection.channel().queue_declare(queue, passive=True).method.message_count)
        return 0
    with redis.Redis.from_url(settings.broker) as client:
        return int(client.llen(queue))


FLEETS: dict[str, type[OnCelery] | type[OnDramatiq]] = {"celery": OnCelery, "dramatiq": OnDramatiq}


def send_many(fleet: Fleet, settings: Settings, jobs: Sequence[Sent], processes: int = 2) -> float:
    """Send jobs from several processes; return how many of them a second were sent."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawned) as pool:
        list(pool.map(_warm, range(processes)))
        begun = time.monotonic()
        lots = [jobs[n::processes] for n in range(processes)]
        list(pool.map(fleet.send, [settings] * processes, lots))
        return len(jobs) / (time.monotonic() - begun)


def _warm(_: int) -> None:
    time.sleep(0.5)
