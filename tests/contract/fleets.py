"""The fleets of both frameworks."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import dramatiq
import pika
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import dq_name, xq_name
from dramatiq.results import Results

from tests.contract.dramatiq_broker import make_broker
from tests.contract.fleet import Fleet, Wishes, Worker
from tests.contract.notes import Settings
from tests.contract.steps import Step
from tests.forking import ROOT, Forked, module
from tests.on_celery import fleet as celery_fleet
from tests.on_dramatiq.fleet import left_in
from tests.servers import eventually

LOGGER = logging.getLogger("ojs_bridge")


class OnCelery(Fleet):
    """A Celery fleet: a worker has a pool of processes."""

    framework = "celery"
    late = celery_fleet.LATE
    hurry = signal.SIGQUIT

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings)
        self._fleet = celery_fleet.Fleet(settings, folder)
        self.bridge = self._fleet.bridge

    @property
    def other_queue(self) -> str:
        """A queue with an exchange of another kind."""
        return f"{self.queue}-topic"

    def start(self, threads: int = 4, *options: str, **env: str) -> Worker:
        """Start a worker; RabbitMQ refuses one of the same name for as long as the old one is there."""
        name = f"{self.queue}-{len(self.workers)}@%h"
        self.workers.append(self._fleet.start("-c", str(threads), "-n", name, *options, env=env))
        return self.worker

    def _send(self, task: str, steps: tuple[Step, ...], wishes: Wishes) -> str:
        options: dict[str, Any] = {"headers": dict(wishes.meta), "task_id": wishes.id}
        options |= {"countdown": wishes.delay, "expires": wishes.lives}
        if wishes.account:
            options["kwargs"] = {"account": wishes.account}
        if wishes.within is not None:
            options["ojs_in"] = wishes.within
        if wishes.policy:
            options["ojs_retry"] = wishes.policy
        if wishes.state:
            options["headers"]["ojs"] = json.dumps(wishes.state)
            options["retries"] = wishes.state["attempt"] - 1
        if wishes.followed_by:
            word = wishes.followed_by
            following = self._fleet.task("follow_up").s(word).set(task_id=word)
            options["link"] = following.set(headers={"deadly": True}) if wishes.deadly else following
            options["link_error"] = self._fleet.task("errback").s()
        return str(self._fleet.send(task, *steps, **options).id)

    def put(
        self, step: Step = "ok", *, body: bytes = b"", content_type: str = "application/json", **differs: Any
    ) -> tuple[str, bytes]:
        """Publish a message by kombu alone; a header that is None is not there."""
        body = body or json.dumps([[step], {}, {}]).encode()
        job, queue = str(uuid4()), self._fleet.app.amqp.queues[self.queue]
        headers = {"lang": "py", "task": "act", "id": job, "retries": 0, "timelimit": [None, None], **differs}
        with self._fleet.app.producer_pool.acquire(block=True) as producer:
            producer.publish(
                body,
                headers={name: value for name, value in headers.items() if value is not None},
                content_type=content_type,
                content_encoding="utf-8",
                exchange=self.queue,
                routing_key=self.queue,
                declare=[queue],
            )
        return str(headers["id"]), body

    def put_delayed(self, at: datetime) -> str:
        """Publish a message with an `eta`."""
        return self.put(eta=at.isoformat())[0]

    def dead_bodies(self) -> list[bytes]:
        """Take the messages out of the dead queue."""
        bodies = [message.body for message in self._fleet.buried(self.queue)]
        return [body if isinstance(body, bytes) else body.encode() for body in bodies]

    def result(self, job: str) -> Any:
        """Return a job's result."""
        return self._fleet.app.AsyncResult(job).result

    def left(self) -> int:
        """Count the messages of the queue."""
        with self._fleet.app.connection_for_read() as connection:
            channel = connection.default_channel
            if self.settings.broker.startswith("amqp"):
                # No producer may have declared it yet.
                queue = self._fleet.app.amqp.queues[self.queue].bind(channel)
                return int(queue.queue_declare().message_count)
            held = [json.loads(text)[2] for text in channel.client.hvals(channel.unacked_key)]
            return int(channel.client.llen(self.queue)) + held.count(self.queue)

    def give_out_again(self) -> None:
        """Do what the visibility timeout has Celery's workers do."""
        with self._fleet.app.connection_for_write() as connection:
            channel = connection.default_channel
            for tag in channel.client.hkeys(channel.unacked_key):
                channel.qos.restore_by_tag(tag)


class OnDramatiq(Fleet):
    """A Dramatiq fleet: a worker is a process with threads, or but the threads of this one on the stub."""

    framework = "dramatiq"
    late = 6.0
    hurry = signal.SIGTERM

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings)
        self._folder = folder
        self._broker, self.bridge = make_broker(settings)

    @property
    def queues(self) -> list[str]:
        """The queue, that of its delayed messages, and that of its dead ones."""
        return [self.queue, dq_name(self.queue), xq_name(self.queue)]

    @property
    def other_queue(self) -> str:
        """A queue without actors of its own."""
        return f"{self.queue}-other"

    def start(self, threads: int = 4, *options: str, **env: str) -> Worker:
        """Start a worker."""
        log = self._folder / f"{self.queue}.log"
        if isinstance(self._broker, StubBroker):
            self.workers.append(Threads(self._broker, threads, log))
        else:
            self.workers.append(Process(self.settings, threads, log, env, *options))
        return self.worker

    def _send(self, task: str, steps: tuple[Step, ...], wishes: Wishes) -> str:
        options = {**wishes.meta, **({"max_age": int(wishes.lives * 1000)} if wishes.lives else {})}
        if wishes.policy:
            options["ojs_retry"] = wishes.policy
        if wishes.state:
            options |= {"ojs": wishes.state, "retries": wishes.state["attempt"] - 1}
        if wishes.within is not None:
            options["ojs_in"] = wishes.within
        if wishes.followed_by:
            options["store_results"] = True
        named = {"account": wishes.account} if wishes.account else {}
        message = self._broker.get_actor(task).message_with_options(args=steps, kwargs=named, **options)
        if wishes.id:
            message = message.copy(message_id=wishes.id)
        if wishes.followed_by:
            word, deadly = wishes.followed_by, wishes.deadly
            following = self._broker.get_actor("follow_up").message_with_options(args=(word,), deadly=deadly)
            dramatiq.pipeline([message, following], broker=self._broker).run()
        else:
            self._broker.enqueue(message, delay=wishes.delay and int(wishes.delay * 1000))
        return str(message.message_id)

    def put(
        self, step: Step = "ok", *, body: bytes = b"", queue: str = "", **differs: Any
    ) -> tuple[str, bytes]:
        """Write a message into the broker."""
        job, redis_id, broker, queue = str(uuid4()), str(uuid4()), self._broker, queue or self.queue
        message = {
            "queue_name": self.queue,
            "actor_name": "act",
            "args": [step],
            "kwargs": {},
            "options": {},
            "message_id": job,
            "message_timestamp": int(time.time() * 1000),
            **differs,
        }
        if isinstance(message["options"], dict):
            message["options"] = {**message["options"], "redis_message_id": redis_id}
        body = body or json.dumps(message).encode()
        if isinstance(broker, RedisBroker):
            broker.client.hset(f"{self.queue}:{queue}.msgs", redis_id, body)
            broker.client.rpush(f"{self.queue}:{queue}", redis_id)
        elif isinstance(broker, StubBroker):
            broker.queues[queue].put(body)
        else:
            broker.declare_queue(self.queue, ensure=True)
            broker.channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))
        return str(message["message_id"]), body

    def put_delayed(self, at: datetime) -> str:
        """Write a message into the queue of delayed messages."""
        eta = int(at.timestamp() * 1000)
        return self.put(queue=dq_name(self.queue), queue_name=dq_name(self.queue), options={"eta": eta})[0]

    def dead_bodies(self) -> list[bytes]:
        """Read the dead queue."""
        broker = self._broker
        if isinstance(broker, RedisBroker):
            return list(broker.client.hvals(f"{self.queue}:{xq_name(self.queue)}.msgs"))
        found = []
        with pika.BlockingConnection(broker.parameters) as connection:
            channel = connection.channel()
            while (got := channel.basic_get(xq_name(self.queue)))[0] is not None:
                found.append(got[2])
        return found

    def result(self, job: str) -> Any:
        """Return a job's result."""
        (results,) = (m for m in self._broker.middleware if isinstance(m, Results))
        message = self._broker.get_actor("act").message().copy(message_id=job)
        return message.get_result(backend=results.backend)

    def left(self) -> int:
        """Count the messages of the queue, once more after the delayed ones, from where some may come."""
        names = (self.queue, dq_name(self.queue), self.queue)
        before, delayed, after = (left_in(self._broker, name) for name in names)
        return max(before, after) + delayed

    def give_out_again(self) -> None:
        """Do what another worker's maintenance does for a worker that it takes for dead."""
        broker = self._broker
        assert isinstance(broker, RedisBroker)
        for name in (self.queue, dq_name(self.queue)):
            for held in broker.client.scan_iter(f"{broker.namespace}:__acks__.*.{name}"):
                while (message := broker.client.spop(held)) is not None:
                    broker.client.rpush(f"{broker.namespace}:{name}", message)

    def close(self, *, badly: bool = False) -> None:
        """Kill the workers, and leave the broker."""
        super().close(badly=badly)
        self._broker.close()


class Process:
    """A `dramatiq` command in a process group of its own, with one worker process unless told otherwise."""

    def __init__(
        self, settings: Settings, threads: int, log: Path, env: dict[str, str], *options: str
    ) -> None:
        self._log = log
        words = ["tests.contract.dramatiq_broker", "--processes", "1", "--threads", str(threads), *options]
        environment = {**os.environ, **settings.to_env(), **env}
        self._before = self.log.count("ready for action") if log.exists() else 0
        self.process: Any
        if "gevent" not in words:
            self.process = Forked(module, "dramatiq", *words, env=environment, log=log, leads=True)
            return
        # A green one starts by itself, before anything is imported.
        words.remove("gevent")
        command = [Path(sys.executable).parent / "dramatiq-gevent", *words]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
            )

    @property
    def log(self) -> str:
        """The log of the fleet's workers so far."""
        return self._log.read_text(errors="replace")

    @property
    def processes(self) -> list[int]:
        """The group of its processes."""
        return [-self.process.pid]

    def await_ready(self) -> None:
        """Wait until one more worker says that it is ready."""
        eventually(lambda: self.log.count("ready for action") > self._before, seconds=60, what="ready")

    def ask_to_stop(self) -> None:
        """Ask for a shutdown."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """End the worker, and return its exit status."""
        self.ask_to_stop()
        try:
            return self.process.wait(90)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def say_where_it_stands(self) -> str:
        """Return the end of the log."""
        return self.log[-20_000:]


class Threads:
    """A worker in this process, for a broker in its memory; it logs into a file as others do."""

    def __init__(self, broker: dramatiq.Broker, threads: int, log: Path) -> None:
        self.process = None
        self._log, self._handler = log, logging.FileHandler(log)
        self._handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        LOGGER.addHandler(self._handler)
        self._worker = dramatiq.Worker(broker, worker_timeout=20, worker_threads=threads)
        self._worker.start()

    @property
    def log(self) -> str:
        """The log so far."""
        return self._log.read_text()

    def await_ready(self) -> None:
        """Return, since it is ready."""

    def stop(self) -> int:
        """End the worker."""
        if self._handler in LOGGER.handlers:
            LOGGER.removeHandler(self._handler)
            self._worker.stop(timeout=20_000)
        return 0

    ask_to_stop = kill = stop

    def say_where_it_stands(self) -> str:
        """Return the log."""
        return self.log
