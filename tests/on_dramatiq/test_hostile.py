"""Messages that no worker can carry out: they are kept, and harm neither the worker nor other jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pika
import pytest
from dramatiq.common import dq_name, xq_name
from pika.exceptions import UnroutableError

from ojs_bridge import open_store
from tests.on_dramatiq.application import Application
from tests.on_dramatiq.conftest import url_of
from tests.on_dramatiq.fleet import broker_of
from tests.servers import eventually

DEEP: Any = []
for _ in range(700):
    DEEP = [DEEP]

#: What it is -> what of the message differs; its dead letter says so.
LETTERS: dict[str, dict[str, Any]] = {
    "a fence that no store holds": {"options": {"ojs": {"v": 1, "fence": 10**17}}},
    "a fence below zero": {"options": {"ojs": {"v": 1, "fence": -1}}},
    "an attempt of 400 digits": {"options": {"ojs": {"v": 1, "attempt": int("9" * 400)}}},
    "a deep policy": {"options": {"ojs": {"v": 1, "retry": {"max_attempts": DEEP}}}},
    "a deep policy as text": {"options": {"ojs": f'{{"v": 1, "retry": {"[" * 950}{"]" * 950}}}'}},
    "an infinite policy": {"options": {"ojs": {"v": 1, "retry": {"backoff_coefficient": float("inf")}}}},
    "a count below zero": {"options": {"retries": -1}},
    "a huge count": {"options": {"retries": 10**17}},
    "a count that is text": {"options": {"retries": "many"}},
    "a backoff that is no number": {"options": {"min_backoff": {"x": 1}}},
    "a policy that is none": {"options": {"ojs_retry": {"max_attempts": float("nan")}}},
    "an early job that no message can carry": {
        "options": {
            "ojs": {
                "v": 1,
                "next_retry_at": "9999-01-01T00:00:00.000Z",
                "retry": {"non_retryable_errors": ["x" * 20_000]},
            }
        }
    },
}
#: What Dramatiq's own threads would end at: it lies in the dead queue as it came.
AS_THEY_CAME: dict[str, Any] = {
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "no message": b"[]",
    "arguments that are none": {"args": 5},
    "options that are a list": {"options": [1]},
    "options that are a number": {"options": 5},
    "an actor without a name": {"actor_name": ["x"]},
    "a queue that nobody consumes": {"queue_name": "elsewhere"},
    "a queue without a name": {"queue_name": None},
    "an id that is a list": {"message_id": ["x"]},
}
#: What runs all the same.
HARMLESS: dict[str, dict[str, Any]] = {
    "a timestamp that is none": {"message_timestamp": "then"},
    "an eta that is none": {"options": {"eta": "soon"}},
    "an age that is none": {"options": {"max_age": "old"}},
    "a time limit that is none": {"options": {"time_limit": "long"}},
    "an id that is a number": {"message_id": 42},
    "throws that are none": {"options": {"throws": "x"}},
}


def encoded(queue: str, hostile: Any, word: str, redis_id: str) -> bytes:
    """The bytes of a message."""
    if isinstance(hostile, bytes):
        return hostile
    options = hostile.get("options", {})
    own = {
        "queue_name": queue,
        "actor_name": "hopeless",
        "args": [word],
        "kwargs": {},
        "message_id": word,
        "message_timestamp": int(time.time() * 1000),
        **hostile,
    }
    own["options"] = {**options, "redis_message_id": redis_id} if isinstance(options, dict) else options
    return json.dumps(own).encode()


class Queue:
    """The queue of an application, past Dramatiq's own producer."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self.broker: Any = broker_of("rabbitmq" if url.startswith("amqp") else "redis", url, name)

    def put(self, hostile: Any, word: str) -> bytes:
        """Put a message there; return its bytes."""
        redis_id = str(uuid4())
        body = encoded(self.name, hostile, word, redis_id)
        if self.url.startswith("amqp"):
            # A worker declares its queue some time after it says that it is ready.
            eventually(lambda: self._takes(body), what=f"the queue {self.name}")
        else:
            self.broker.client.hset(f"{self.name}:{self.name}.msgs", redis_id, body)
            self.broker.client.rpush(f"{self.name}:{self.name}", redis_id)
        return body

    def _takes(self, body: bytes) -> bool:
        """Publish on RabbitMQ; return whether the queue is there and has taken it."""
        with pika.BlockingConnection(self.broker.parameters) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            try:
                channel.basic_publish(
                    "", self.name, body, pika.BasicProperties(delivery_mode=2), mandatory=True
                )
            except UnroutableError:
                return False
        return True

    def dead(self) -> Iterator[bytes]:
        """The bytes that lie in the dead queue, which is left as it is."""
        if not self.url.startswith("amqp"):
            yield from self.broker.client.hvals(f"{self.name}:{xq_name(self.name)}.msgs")
            return
        with pika.BlockingConnection(self.broker.parameters) as connection:
            channel = connection.channel()
            while (got := channel.basic_get(xq_name(self.name)))[0] is not None:
                yield got[2]

    def left(self) -> int:
        """How many messages are neither acknowledged nor dead; on RabbitMQ once their consumers are gone."""
        if not self.url.startswith("amqp"):
            names = (self.name, dq_name(self.name))
            return sum(self.broker.client.hlen(f"{self.name}:{name}.msgs") for name in names)
        with pika.BlockingConnection(self.broker.parameters) as connection:
            declared = connection.channel().queue_declare(self.name, passive=True)
            return int(declared.method.message_count)


@pytest.mark.requirement("RET-16")
@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_what_nobody_can_carry_out_is_kept_and_the_rest_runs(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, unique: str
) -> None:
    url = url_of(request, kind)
    app = Application(url, unique, tmp_path, "tests.on_dramatiq.app", heartbeat="3000")
    queue = Queue(url, unique)
    with app.working():
        eventually(lambda: "ready for action" in app.log.read_text(), seconds=30, what="a ready worker")
        for name, hostile in LETTERS.items():
            queue.put(hostile, name)
        bodies = {name: queue.put(hostile, name) for name, hostile in AS_THEY_CAME.items()}
        for name, hostile in HARMLESS.items():
            queue.put({**hostile, "actor_name": "outspoken"}, f"ran-{name}".replace(" ", "-"))
        app.produce("for n in range(20): outspoken.send(f'healthy-{n}')")
        healthy = {f"healthy-{n}" for n in range(20)} | {f"ran-{name}".replace(" ", "-") for name in HARMLESS}
        eventually(lambda: healthy <= set(app.counts()), seconds=60, what="the healthy jobs")
        store = open_store(app.store_url, namespace=unique)
        for name in LETTERS:
            eventually(lambda name=name: store.get(name), seconds=30, what=f"the dead letter of {name}")
            letter = store.get(name)
            assert letter is not None
            assert (letter.error_type.partition(".")[0], letter.cause) == ("validation", "invalid"), name
            json.dumps(letter.to_ojs())
        as_they_came = sorted(bodies.values())
        # RabbitMQ takes a moment to put back what a look has taken.
        eventually(lambda: sorted(queue.dead()) == as_they_came, seconds=30, what="the dead messages")
        assert app.counts().keys() == healthy, "a message ran that nobody could read"
    eventually(lambda: queue.left() == 0, seconds=30, what="an empty queue")
