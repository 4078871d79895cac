"""How each framework's worker is started, given jobs that wait, and seen to have ended them all."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from uuid import uuid4

import pika
import redis
from celery import Celery
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from pika.exceptions import ChannelClosedByBroker

from benchmarks.side import Side
from tests.servers import eventually

#: The databases of the broker's server: the worker's, the store's, and that of jobs that wait to be copied.
BROKER, STORE, STOCK = 0, 1, 5


class Fleet(Protocol):
    """One framework's worker, and its queues."""

    def command(self, side: Side) -> list[str]:
        """Return the command of a worker."""

    def fill(self, side: Side, jobs: int, worker: subprocess.Popen[str]) -> None:
        """Give the worker so many jobs, all at once."""

    def is_empty(self, side: Side) -> bool:
        """Return whether all jobs have ended and are acknowledged."""


class OnCelery:
    """A Celery worker whose queues are on Redis."""

    def __init__(self, server: str) -> None:
        self._stock = _Stock(server)

    def command(self, side: Side) -> list[str]:
        """Return the command of a worker."""
        return ["-m", "celery", "-A", "benchmarks.celery_app", "worker", "-c", str(side.width)]

    def fill(self, side: Side, jobs: int, worker: subprocess.Popen[str]) -> None:
        """Give the worker so many jobs, all at once."""
        task = "fails" if side.fails else "succeeds"
        share = jobs // side.queues

        def send(url: str) -> None:
            with Celery(broker=url) as app:
                for name in side.queue_names:
                    for _ in range(share):
                        app.send_task(task, queue=name)

        self._stock.copy(side.queue_names, f"{task}-{side.queues}-{share}", send)

    def is_empty(self, side: Side) -> bool:
        """Return whether all jobs have ended and are acknowledged."""
        return not self._stock.broker.exists("unacked", *side.queue_names)


class OnDramatiq:
    """A Dramatiq worker of one process whose queues are on Redis."""

    def __init__(self, server: str) -> None:
        self._stock = _Stock(server)

    def command(self, side: Side) -> list[str]:
        """Return the command of a worker."""
        return ["-m", "dramatiq", "benchmarks.dramatiq_app", "--processes", "1", "--threads", str(side.width)]

    def fill(self, side: Side, jobs: int, worker: subprocess.Popen[str]) -> None:
        """Give the worker so many jobs, all at once."""
        share = jobs // side.queues

        def send(url: str) -> None:
            broker = RedisBroker(url=url)
            for name in side.queue_names:
                broker.declare_queue(name)
                for _ in range(share):
                    broker.enqueue(Message(name, f"{name}.job", (), {}, {}))
            broker.close()

        keys = [f"dramatiq:{name}{end}" for name in side.queue_names for end in (".msgs", "")]
        self._stock.copy(keys, f"{side.queues}-{share}", send)

    def is_empty(self, side: Side) -> bool:
        """Return whether all jobs have ended and are acknowledged."""
        names = [name for queue in side.queue_names for name in (queue, f"{queue}.DQ")]
        return not self._stock.broker.exists(*(f"dramatiq:{name}.msgs" for name in names))


class OnRabbitMQ:
    """The queues of a worker on RabbitMQ, each of which gets copies of one message that has its own id."""

    def __init__(self, url: str) -> None:
        self._url = url

    def forget(self, side: Side) -> None:
        """Delete the queues, which another framework would declare otherwise."""
        with self._channel() as channel:
            for name in side.queue_names:
                for end in ("", ".DQ", ".XQ"):
                    channel.queue_delete(name + end)

    def fill(self, side: Side, jobs: int, worker: subprocess.Popen[str]) -> None:
        """Give the worker so many jobs, as fast as RabbitMQ takes them: many times as fast as they run."""
        for name in side.queue_names:
            eventually(lambda name=name: self._has(name), seconds=60, what=f"the worker's queue {name}")
        with self._channel() as channel:
            for name in side.queue_names:
                for _ in range(jobs // side.queues):
                    properties, body = self.message(side, name)
                    channel.basic_publish("", name, body, properties)

    def is_empty(self, side: Side) -> bool:
        """Return whether no job waits. The last ones may still be acknowledged, for a millisecond."""
        with self._channel() as channel:
            return not any(
                channel.queue_declare(name, passive=True).method.message_count for name in side.queue_names
            )

    def _has(self, queue: str) -> bool:
        try:
            with self._channel() as channel:
                channel.queue_declare(queue, passive=True)
        except ChannelClosedByBroker:
            return False
        return True

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            yield connection.channel()


class CeleryOnRabbitMQ(OnRabbitMQ, OnCelery):
    """A Celery worker whose queues are on RabbitMQ."""

    def __init__(self, url: str) -> None:
        OnRabbitMQ.__init__(self, url)

    def message(self, side: Side, queue: str) -> tuple[Any, bytes]:
        """Return a message."""
        task, job = "fails" if side.fails else "succeeds", str(uuid4())
        headers = {"lang": "py", "task": task, "id": job, "root_id": job, "retries": 0}
        properties = pika.BasicProperties(
            content_type="application/json",
            content_encoding="utf-8",
            headers=headers,
            correlation_id=job,
            delivery_mode=2,
            priority=0,
        )
        return properties, b'[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'


class DramatiqOnRabbitMQ(OnRabbitMQ, OnDramatiq):
    """A Dramatiq worker whose queues are on RabbitMQ."""

    def __init__(self, url: str) -> None:
        OnRabbitMQ.__init__(self, url)

    def message(self, side: Side, queue: str) -> tuple[Any, bytes]:
        """Return a message."""
        body = Message(queue, f"{queue}.job", (), {}, {}).encode()
        return pika.BasicProperties(delivery_mode=2, priority=0), body


class InMemory:
    """A Dramatiq worker whose queues are in its own memory."""

    def command(self, side: Side) -> list[str]:
        """Return the command of a worker."""
        return ["-m", "benchmarks.dramatiq_app"]

    def fill(self, side: Side, jobs: int, worker: subprocess.Popen[str]) -> None:
        """Give the worker so many jobs, all at once."""
        assert worker.stdin is not None
        worker.stdin.write(f"{jobs}\n")
        worker.stdin.flush()

    def is_empty(self, side: Side) -> bool:
        """Return True: what is acknowledged here is not on its way to a server."""
        return True


class _Stock:
    """Jobs that a producer without the bridge has sent once, and that each run copies."""

    def __init__(self, server: str) -> None:
        self.broker = redis.Redis.from_url(f"{server}/{BROKER}")
        self._url = f"{server}/{STOCK}"
        self._kept = redis.Redis.from_url(self._url)
        self._name = ""

    def copy(self, keys: list[str], name: str, send: Any) -> None:
        """Copy these keys into the broker's database in one step; make them first unless they are there."""
        prefix = f"{name}:"
        if not self._kept.exists(*(prefix + key for key in keys)):
            send(self._url)
            for key in keys:
                self._kept.rename(key, prefix + key)
        with self._kept.pipeline(transaction=True) as pipe:
            for key in keys:
                pipe.copy(prefix + key, key, destination_db=BROKER, replace=True)
            pipe.execute()
