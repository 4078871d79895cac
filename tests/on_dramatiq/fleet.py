"""A Dramatiq broker under a bridge, its workers, and what is seen of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import dramatiq
import pika
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import dq_name, xq_name
from dramatiq.middleware import CurrentMessage

from ojs_bridge import Bridge, Event
from ojs_bridge.dramatiq import OJSRetries
from ojs_bridge.dramatiq.brokers import kind_of
from ojs_bridge.rules.job import parse_time
from tests.servers import eventually

ENDS = {"job.completed", "job.discarded"}
#: Retries so quick that a test can wait for them; deterministic.
QUICK = {"max_attempts": 3, "initial_interval": "PT0.05S", "jitter": False, "on_exhaustion": "discard"}


@dataclass
class Ran:
    """One run of an actor."""

    at: float
    options: dict[str, Any]

    @property
    def ojs(self) -> dict[str, Any]:
        """The retry state that the message brought."""
        return self.options.get("ojs", {})


@dataclass
class Sent:
    """One job that was sent, with all its runs."""

    id: str
    runs: list[Ran] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        """Seconds from each run to the next."""
        return [b.at - a.at for a, b in zip(self.runs, self.runs[1:], strict=False)]


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.events: defaultdict[str, list[Event]] = defaultdict(list)

    def __call__(self, event: Event) -> None:
        self.events[event.subject].append(event)

    def types(self, job_id: str) -> list[str]:
        """The types of a job's events, in order."""
        return [event.type for event in self.events[job_id]]

    def ends(self, job_id: str) -> list[Event]:
        """The events that end a job."""
        return [event for event in self.events[job_id] if event.type in ENDS]


class Fleet:
    """One broker with one queue, under one bridge."""

    def __init__(
        self,
        broker: dramatiq.Broker,
        queue: str,
        bridge: Bridge | None = None,
        *,
        policies: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.broker = broker
        self.queue = queue
        self.heard = Heard()
        self.bridge = bridge or Bridge(listeners=[self.heard], **{"retry": QUICK, **options})
        self.retries = OJSRetries(self.bridge, policies=policies)
        self.runs: defaultdict[str, list[Ran]] = defaultdict(list)
        broker.add_middleware(CurrentMessage())
        broker.add_middleware(self.retries)

    def actor(
        self, handler: Callable[..., Any], *, name: str = "", **options: Any
    ) -> dramatiq.Actor[..., Any]:
        """Declare an actor; its handler gets how many times its job has run, this one included."""

        def run(key: str, *args: Any) -> Any:
            message = CurrentMessage.get_current_message()
            assert message is not None
            self.runs[key].append(Ran(time.time(), dict(message.options)))
            return handler(len(self.runs[key]), *args)

        return self.declare(run, name, **options)

    def declare(
        self, function: Callable[..., Any], name: str = "", **options: Any
    ) -> dramatiq.Actor[..., Any]:
        """Declare a function as an actor on the fleet's queue."""
        name = name or f"a{uuid4().hex[:8]}"
        settings = {"queue_name": self.queue, **options}
        return dramatiq.actor(function, broker=self.broker, actor_name=name, **settings)

    def send(self, actor: dramatiq.Actor[..., Any], *args: Any, **options: Any) -> Sent:
        """Send a job to one of `actor`'s actors."""
        key = uuid4().hex
        message = actor.send_with_options(args=(key, *args), **options)
        return Sent(message.message_id, self.runs[key])

    @contextmanager
    def working(self, *, threads: int = 8, timeout: int = 20) -> Iterator[dramatiq.Worker]:
        """Run a worker in this process."""
        worker = dramatiq.Worker(self.broker, worker_timeout=timeout, worker_threads=threads)
        worker.start()
        try:
            yield worker
        finally:
            worker.stop(timeout=20_000)
            # Otherwise Dramatiq gives the stopped worker a consumer of each queue that is declared later.
            worker.consumer_whitelist = {""}

    def end(self, sent: Sent, *, nth: int = 1, seconds: float = 20) -> Event:
        """Wait until a job has ended for the nth time, and return the event that says how."""
        try:
            eventually(lambda: len(self.heard.ends(sent.id)) >= nth, seconds=seconds)
        except TimeoutError:
            raise AssertionError(f"not ended: {self.heard.types(sent.id)}, {len(sent.runs)} runs") from None
        return self.heard.ends(sent.id)[nth - 1]

    def due(self, sent: Sent) -> list[float]:
        """The time at which each retry or snoozed run of a job was due."""

        def told() -> list[str]:
            return [e.data["next_retry_at"] for e in self.heard.events[sent.id] if "next_retry_at" in e.data]

        # The event of a retry comes after its publishing, and the retry may have run by then.
        eventually(lambda: len(told()) >= len(sent.runs) - 1, what="the word of every retry")
        return sorted(parse_time(text).timestamp() for text in told())

    def planned(self, sent: Sent) -> list[float]:
        """Seconds from each failure of a job to the time that its retry was due."""
        failed = [parse_time(entry["timestamp"]).timestamp() for entry in sent.runs[-1].ojs["errors"]]
        return [due - at for due, at in zip(self.due(sent), failed, strict=True)]

    def dead(self, sent: Sent) -> list[dramatiq.Message[Any]]:
        """A job's messages in the broker's own dead queue."""
        return [
            message for message in dead_messages(self.broker, self.queue) if message.message_id == sent.id
        ]

    def left(self) -> int:
        """The number of messages in the queue, with the delayed and the unacknowledged ones."""
        # The queue is read again, as a message may have come from the delayed ones meanwhile.
        before, delayed, after = (
            left_in(self.broker, name) for name in (self.queue, dq_name(self.queue), self.queue)
        )
        return max(before, after) + delayed


def dead_messages(broker: Any, queue: str) -> list[Any]:
    """Read the broker's dead queue and leave it as it is."""
    if isinstance(broker, StubBroker):
        return [held for held, _ in kind_of(broker).dead_places.read([queue], 1000)]
    if isinstance(broker, RedisBroker):
        bodies = broker.client.hvals(f"{broker.namespace}:{xq_name(queue)}.msgs")
        return [dramatiq.Message.decode(body) for body in bodies]
    found = []
    with pika.BlockingConnection(broker.parameters) as connection:
        channel = connection.channel()
        while (got := channel.basic_get(xq_name(queue)))[0] is not None:
            found.append(dramatiq.Message.decode(got[2]))
    return found


def left_in(broker: Any, name: str) -> int:
    """Count what one queue still holds; on RabbitMQ only with its consumers gone."""
    if isinstance(broker, StubBroker):
        return broker.queues[name].unfinished_tasks
    if isinstance(broker, RedisBroker):
        return broker.client.hlen(f"{broker.namespace}:{name}.msgs")
    with pika.BlockingConnection(broker.parameters) as connection:
        try:
            return connection.channel().queue_declare(name, passive=True).method.message_count
        except pika.exceptions.ChannelClosedByBroker:
            return 0  # No message has been sent, and there is no queue yet.


def broker_of(kind: str, url: str, namespace: str) -> dramatiq.Broker:
    """Make a broker with Dramatiq's default middleware."""
    if kind == "stub":
        return StubBroker()
    if kind == "redis":
        return RedisBroker(url=url, namespace=namespace)
    return RabbitmqBroker(url=url)
