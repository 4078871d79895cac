"""The dead queues of Dramatiq's brokers: `.XQ` queues on RabbitMQ, hashes and sorted sets on Redis."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Protocol, TypeAlias

import dramatiq
from dramatiq.broker import Broker, MessageProxy
from dramatiq.common import q_name, xq_name

from ..adapters import parameters_of
from ..adapters.dead_queues import QueuesOnRabbitMQ, claimed_on_redis, found_letter
from ..bridge import Bridge
from ..engine.layers import TaskPolicy
from ..errors import Unreachable
from ..messages import HEADER
from ..rules.failures import Failure
from ..rules.job import ErrorEntry, Job, count_of
from ..rules.notations import spoken
from ..store import Letter, from_ms
from .compat import dead_letters_by_queue, dead_of, message_in, messages_of, parameters
from .delivery import is_dropped
from .translate import NAME, bare_job, error_in_words, job_of, original, outages, time_of

logger = logging.getLogger("ojs_bridge")

#: A message in a dead queue: its bytes, but on StubBroker the message itself.
Found: TypeAlias = bytes | MessageProxy
#: How many messages are read from Redis at a time.
READ = 500


class DramatiqDeadQueues:
    """The dead queues of all queues that a broker has declared."""

    def __init__(
        self, broker: Broker, places: Places, bridge: Bridge, tasks: Mapping[str, TaskPolicy | None]
    ) -> None:
        self._broker = broker
        self._bridge = bridge
        self._tasks = tasks
        self._places = places

    def read(self, most: int) -> Sequence[Letter]:
        """Return at most so many letters; on RabbitMQ the oldest of each queue, on Redis the newest."""
        queues = sorted({q_name(name) for name in self._broker.get_declared_queues()})
        with _reaching():
            found = self._places.read(queues, most)
        letters = (self._letter(message, at) for message, at in found)
        return [letter for letter in letters if letter is not None]

    def take(self, letter: Letter, then: Callable[[Letter], object]) -> bool:
        """Claim a letter, call `then`, and delete it unless `then` raises; False if it is not there."""

        def is_it(found: Found) -> bool:
            parts = _read(found)
            if parts is None or str(parts[0].message_id) != letter.job_id:
                return False
            return bool(parts[1]["encoded"] == letter.message["encoded"])

        with _reaching():
            return self._places.take(q_name(letter.queue), is_it, lambda: then(letter))

    def _letter(self, found: Found, at: datetime | None) -> Letter | None:
        parts = _read(found)
        if parts is None:
            return None
        try:
            return self._letter_of(*parts, at)
        except Exception as error:  # noqa: BLE001 - the message may hold anything
            _left(error)
            return None

    def _letter_of(self, message: dramatiq.Message[Any], kept: dict[str, Any], at: datetime | None) -> Letter:
        engine = self._bridge.engine
        actor, bare = self._broker.actors.get(message.actor_name), _ended(message)
        kept["parameters"] = [*parameters_of(actor.fn)] if actor else []
        task = self._tasks.get(message.actor_name) or engine.task()
        run = engine.admit(job_of(message, bare), bare, task)
        return found_letter(run, NAME, kept, at=at, now=engine.now())


def _read(found: Found) -> tuple[dramatiq.Message[Any], dict[str, Any]] | None:
    """Return a message, and the form in which a dead letter keeps it; None if it cannot be read."""
    try:
        message = dramatiq.Message.decode(found) if isinstance(found, bytes) else message_in(found)
        return message, original(message)
    except Exception as error:  # noqa: BLE001 - the application's own encoder may raise anything
        _left(error)
        return None


def _left(error: Exception) -> None:
    logger.warning("a message in a dead queue cannot be read, and stays there: %s", error_in_words(error))


def _ended(message: dramatiq.Message[Any]) -> Job:
    """Return the job of a dead message by Dramatiq's own options."""
    bare = bare_job(message)
    state = message.options.get(HEADER)
    if not isinstance(state, Mapping):
        return bare._replace(errors=_native_errors(message, bare))
    # The native counter has counted the last run only where the message has its final state.
    said = state.get("attempt")
    return bare._replace(attempt=max(bare.attempt - 1, count_of(said) or 1))


def _native_errors(message: dramatiq.Message[Any], bare: Job) -> tuple[ErrorEntry, ...]:
    """Return the error that Dramatiq itself wrote into a message: the last error before its last retry."""
    text, said_at = message.options.get("traceback"), message.options.get("requeue_timestamp")
    at = time_of(said_at) or bare.created_at
    if not (isinstance(text, str) and text.strip() and at):
        return ()
    type_, _, said = text.strip().splitlines()[-1].partition(": ")
    failed = bare._replace(attempt=max(bare.attempt - 1, 1))
    return failed.failed(Failure(type_, said), at=at).errors


@contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except outages() as error:
        raise Unreachable(error_in_words(error)) from error


class Places(Protocol):
    """The dead queues of one kind of broker; `queue` is the name of the queue that they belong to."""

    def read(self, queues: Sequence[str], most: int) -> list[tuple[Found, datetime | None]]:
        """Return at most so many dead messages, and since when they are dead, if the broker knows it."""

    def take(self, queue: str, is_it: Callable[[Found], bool], then: Callable[[], object]) -> bool:
        """Claim a message, call `then`, and delete it unless `then` raises; False if it is not there."""

    def in_words(self, queue: str) -> str:
        """Return where a message is after its last failure, and how long the broker keeps it there."""


class DeadElsewhere:
    """The dead messages of a broker that is not Dramatiq's own: nobody here can look."""

    def __init__(self, broker: Any) -> None:
        self._name = type(broker).__name__
        self._why = f"the bridge cannot look into the dead letters of a {self._name}"

    def in_words(self, _: str) -> str:
        """Return where a message is after its last failure, and how long the broker keeps it there."""
        return f"{self._name} hears that it has failed, and treats it in its own way"

    def read(self, *_: object) -> list[tuple[Found, datetime | None]]:
        """Raise Unreachable."""
        raise Unreachable(self._why)

    def take(self, *_: object) -> bool:
        """Raise Unreachable."""
        raise Unreachable(self._why)


class DeadInMemory:
    """The dead queues of StubBroker: lists of messages."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._claimed: set[int] = set()

    def in_words(self, queue: str) -> str:
        """Return where a message is after its last failure, and how long the broker keeps it there."""
        return f"it goes to the dead queue {xq_name(queue)}, in this process's memory"

    def read(self, queues: Sequence[str], most: int) -> list[tuple[Found, datetime | None]]:
        """Return at most so many dead messages, and since when they are dead, if the broker knows it."""
        found = [m for queue in queues for m in [*self._letters(queue)] if not is_dropped(m)]
        return [(message, None) for message in found[:most]]

    def take(self, queue: str, is_it: Callable[[Found], bool], then: Callable[[], object]) -> bool:
        """Claim a message, call `then`, and delete it unless `then` raises; False if it is not there."""
        with self._lock:
            letters = [m for m in [*self._letters(queue)] if not is_dropped(m)]
            free = [m for m in letters if id(m) not in self._claimed and is_it(m)]
            if not free:
                return False
            self._claimed.add(id(free[0]))
        gone = False
        try:
            then()
            gone = True
        finally:
            # In one step, or another reader finds the message free, and publishes it as well.
            with self._lock:
                if gone:
                    self._letters(queue).remove(free[0])
                self._claimed.discard(id(free[0]))
        return True

    def _letters(self, queue: str) -> list[MessageProxy]:
        letters: list[MessageProxy] = dead_letters_by_queue(self._broker, {}).get(queue, [])
        return letters


class DeadOnRedis:
    """The dead queues of RedisBroker: a sorted set of ids, and a hash of messages."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def in_words(self, queue: str) -> str:
        """Return where a message is after its last failure, and how long the broker keeps it there."""
        kept = spoken(self._broker.dead_message_ttl / 1000)
        return f"it goes to the dead queue {xq_name(queue)}, which keeps it for {kept}"

    def read(self, queues: Sequence[str], most: int) -> list[tuple[Found, datetime | None]]:
        """Return at most so many dead messages, and since when they are dead, if the broker knows it."""
        client = self._broker.client
        places = [
            (score, self._messages(queue), redis_id)
            for queue in queues
            for redis_id, score in client.zrevrange(self._ids(queue), 0, most - 1, withscores=True)
        ]
        newest = sorted(places, reverse=True)[:most]
        found: list[tuple[Found, datetime | None]] = []
        for start in range(0, len(newest), READ):
            with client.pipeline(transaction=False) as pipe:
                for _, messages, redis_id in newest[start : start + READ]:
                    pipe.hget(messages, redis_id)
                bodies = zip(pipe.execute(), newest[start : start + READ], strict=True)
            found += [(body, from_ms(int(score))) for body, (score, _, _) in bodies if body]
        return found

    def take(self, queue: str, is_it: Callable[[Found], bool], then: Callable[[], object]) -> bool:
        """Claim a message, call `then`, and delete it unless `then` raises; False if it is not there."""
        client, ids, messages = self._broker.client, self._ids(queue), self._messages(queue)
        redis_id = next((i for i, body in client.hscan_iter(messages) if is_it(body)), None)
        if redis_id is None:
            return False
        with claimed_on_redis(client, f"{ids}.ojs.{redis_id.decode()}") as is_ours:
            if not is_ours or not client.hexists(messages, redis_id):
                return False
            then()
            with client.pipeline() as pipe:
                pipe.zrem(ids, redis_id).hdel(messages, redis_id).execute()
        return True

    def _ids(self, queue: str) -> str:
        return dead_of(self._broker, queue)

    def _messages(self, queue: str) -> str:
        return messages_of(self._broker, xq_name(queue))


class DeadOnRabbitMQ:
    """The dead queues of RabbitmqBroker."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def in_words(self, queue: str) -> str:
        """Return where a message is after its last failure, and how long the broker keeps it there."""
        kept = spoken(sys.modules["dramatiq.brokers.rabbitmq"].DEAD_MESSAGE_TTL / 1000)
        return f"it goes to the dead queue {xq_name(queue)}, which keeps it for {kept}"

    def read(self, queues: Sequence[str], most: int) -> list[tuple[Found, datetime | None]]:
        """Return at most so many dead messages, and since when they are dead, if the broker knows it."""
        found: list[bytes] = []
        with self._connection() as connection:
            for queue in queues:
                found += PikaQueues(connection).read(xq_name(queue), most - len(found))
        return [(body, None) for body in found]

    def take(self, queue: str, is_it: Callable[[Found], bool], then: Callable[[], object]) -> bool:
        """Claim a message, call `then`, and delete it unless `then` raises; False if it is not there."""
        with self._connection() as connection:
            return PikaQueues(connection).take(xq_name(queue), is_it, then)

    def _connection(self) -> Any:
        import pika

        return pika.BlockingConnection(parameters(self._broker))


class PikaQueues(QueuesOnRabbitMQ[bytes]):
    """Dead queues as pika reads them."""

    def __init__(self, connection: Any) -> None:
        from pika.exceptions import ChannelClosedByBroker

        self.connection = connection
        self.errors = (ChannelClosedByBroker,)

    def get(self, channel: Any, name: str) -> Any:
        """Return the next message of a queue, its method, its properties and its body, or None."""
        message = channel.basic_get(name)
        return None if message[0] is None else message

    def shown(self, _: Any, message: Any) -> bytes:
        """Return the body of a message."""
        body: bytes = message[2]
        return body

    def delete(self, channel: Any, message: Any) -> None:
        """Acknowledge a message."""
        channel.basic_ack(message[0].delivery_tag)

    def put_back(self, channel: Any) -> None:
        """Put back what was not acknowledged."""
        channel.basic_nack(0, multiple=True, requeue=True)

    def headers_of(self, message: Any) -> Mapping[str, Any]:
        """Return the headers of a message."""
        return message[1].headers or {}

    def publish(self, channel: Any, name: str, message: Any, headers: dict[str, Any]) -> None:
        """Publish a message with other headers, and wait until RabbitMQ has confirmed it."""
        _, properties, body = message
        properties.headers = headers
        channel.confirm_delivery()
        channel.basic_publish("", name, body, properties)
