"""Starts and feeds a fleet of each framework, and counts the jobs that its broker still holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import dramatiq
import pika
import redis
from dramatiq.common import dq_name, xq_name
from pika.exceptions import AMQPChannelError

from tests.chaos import celery_app, dramatiq_app
from tests.chaos.fates import fate_of
from tests.chaos.settings import QUEUE, Settings

THREADS = 4


class Framework(Protocol):
    """One framework, its broker at the URL of some settings."""

    name: str
    #: The durable queues that a broker must not lose.
    queues: Sequence[str]
    #: Those of them that workers take jobs from.
    served: Sequence[str]

    def command(self) -> list[str]:
        """Return the command of one worker."""

    def declare(self, settings: Settings) -> None:
        """Declare the queues."""

    def enqueue(self, settings: Settings, jobs: Iterable[str]) -> None:
        """Send jobs, each with its own id; when this returns the broker has them."""

    def held(self, settings: Settings) -> tuple[set[str], set[str]]:
        """Return the jobs that are on their way, and the broker's dead ones; empties RabbitMQ's queues."""


class OnCelery:
    """Celery, prefork."""

    name = "Celery"
    queues: Sequence[str] = (QUEUE,)
    served = queues

    def command(self) -> list[str]:
        """Return the command of one worker."""
        options = ["-c", str(THREADS), "-l", "INFO", "--without-gossip", "--without-mingle"]
        return ["celery", "-A", "tests.chaos.celery_app", "worker", *options]

    def declare(self, settings: Settings) -> None:
        """Declare the queue."""
        app = celery_app.make_app(settings)
        with app.connection_for_write() as connection:
            app.amqp.queues[QUEUE](connection.default_channel).declare()

    def enqueue(self, settings: Settings, jobs: Iterable[str]) -> None:
        """Send jobs."""
        app = celery_app.make_app(settings)
        for job in jobs:
            app.tasks[fate_of(job).name].apply_async((job,), task_id=job)
        app.close()

    def held(self, settings: Settings) -> tuple[set[str], set[str]]:
        """Return the jobs that are on their way, and the dead ones."""
        dead = f"{QUEUE}.dead"
        if not settings.on_redis:
            alive, buried = (taken(settings.broker, name) for name in (QUEUE, dead))
            return {p.headers["id"] for p, _ in alive}, {p.headers["id"] for p, _ in buried}
        with redis.Redis.from_url(settings.broker) as client:
            waiting = [json.loads(text) for text in client.lrange(QUEUE, 0, -1)]
            waiting += [json.loads(text)[0] for text in client.hvals("unacked")]
            buried_here = [json.loads(text) for text in client.lrange(dead, 0, -1)]
        return {m["headers"]["id"] for m in waiting}, {m["headers"]["id"] for m in buried_here}


class OnDramatiq:
    """Dramatiq, one process of several threads a worker."""

    name = "Dramatiq"
    queues: Sequence[str] = (QUEUE, dq_name(QUEUE), xq_name(QUEUE))
    served = queues[:2]

    def command(self) -> list[str]:
        """Return the command of one worker."""
        return ["dramatiq", "tests.chaos.dramatiq_app", "--processes", "1", "--threads", str(THREADS)]

    def declare(self, settings: Settings) -> None:
        """Declare the queues."""
        broker = dramatiq_app.make_broker(settings)
        broker.declare_queue(QUEUE, **({} if settings.on_redis else {"ensure": True}))
        broker.close()

    def enqueue(self, settings: Settings, jobs: Iterable[str]) -> None:
        """Send jobs."""
        broker = dramatiq_app.make_broker(settings)
        for job in jobs:
            message = broker.get_actor(fate_of(job).name).message(job)
            broker.enqueue(dataclasses.replace(message, message_id=job))
        broker.close()

    def held(self, settings: Settings) -> tuple[set[str], set[str]]:
        """Return the jobs that are on their way, and the dead ones."""
        found = [{m.message_id for m in self._messages(settings, name)} for name in self.queues]
        return found[0] | found[1], found[2]

    def _messages(self, settings: Settings, queue: str) -> list[dramatiq.Message[Any]]:
        if not settings.on_redis:
            return [dramatiq.Message.decode(body) for _, body in taken(settings.broker, queue)]
        with redis.Redis.from_url(settings.broker) as client:
            return [dramatiq.Message.decode(body) for body in client.hvals(f"dramatiq:{queue}.msgs")]


def waiting(url: str, queue: str) -> int:
    """Count the messages of a RabbitMQ queue that no worker has."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        count: int = connection.channel().queue_declare(queue, passive=True).method.message_count
        return count


def taken(url: str, queue: str) -> Iterator[tuple[Any, bytes]]:
    """Take every message out of a RabbitMQ queue, if there is one."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection, suppress(AMQPChannelError):
        channel = connection.channel()
        while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
            yield got[1], got[2]
