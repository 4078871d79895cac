"""The names of Dramatiq, pika and redis-py that are private or undocumented: used here, and nowhere else."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable
from typing import Any

import dramatiq
from dramatiq import worker as _worker
from dramatiq.broker import MessageProxy
from dramatiq.common import compute_backoff, xq_name
from dramatiq.middleware import Retries, group_callbacks

from ..engine.private_names import Name, Names

NAMES = Names()
_needs = NAMES.needs

_WORKER, _MIDDLEWARE = "dramatiq.worker", "dramatiq.middleware"
_REDIS, _RABBITMQ, _STUB = (f"dramatiq.brokers.{kind}" for kind in ("redis", "rabbitmq", "stub"))
_GROUPS, _RETRIES = f"{_MIDDLEWARE}:GroupCallbacks", f"{_MIDDLEWARE}:Retries"
#: The settings of a `Retries`.
_SETTINGS = ("max_retries", "min_backoff", "max_backoff", "retry_when")
_LUA = f"{_REDIS}:_scripts.dispatch"
#: The brokers that need the names of another package.
_PACKAGES = {"pika": _RABBITMQ, "redis": _REDIS}


def missing(broker: Any) -> list[Name]:
    """Return the names that this kind of broker needs and the installed releases do not have."""
    kinds = {cls.__module__ for cls in type(broker).__mro__}

    def is_needed(name: Name) -> bool:
        module = _PACKAGES.get(name.module.partition(".")[0], name.module)
        return module in kinds or module not in (_REDIS, _RABBITMQ, _STUB)

    return NAMES.missing(is_needed)


def _reads(owner: str, name: str, needed_to: str) -> Callable[[Any], Any]:
    """Return what reads one attribute."""
    NAMES.add(owner, name, needed_to=needed_to)
    return operator.attrgetter(name)


# --- any broker ---

message_in: Callable[[MessageProxy], dramatiq.Message[Any]] = _reads(
    "dramatiq.broker:MessageProxy", "_message", "read and keep the message that a proxy stands for"
)
consumer_threads = _reads(f"{_WORKER}:Worker", "consumers", "watch over the consumer threads, by queue")
worker_threads = _reads(f"{_WORKER}:Worker", "workers", "watch over the threads that run actors")
patience_of = _reads(f"{_WORKER}:ConsumerThread", "worker_timeout", "wait for so many milliseconds at most")
NAMES.add(_WORKER, "ConsumerThread", needed_to="look again as soon as a job is due", keeps_jobs=False)
ConsumerThread: Any = getattr(_worker, "ConsumerThread", ())


@_needs(f"{_WORKER}:ConsumerThread", "prefetch", "work_queue", "worker_timeout", "paused")
def new_consumer_thread(old: Any) -> threading.Thread:
    """Replace a consumer thread that has died."""
    names = ("broker", "queue_name", "prefetch", "work_queue", "worker_timeout")
    new: threading.Thread = type(old)(**{name: getattr(old, name) for name in names})
    new.paused = old.paused  # type: ignore[attr-defined]
    return new


@_needs(f"{_WORKER}:WorkerThread", "consumers", "work_queue", "timeout", "paused")
def new_worker_thread(old: Any) -> threading.Thread:
    """Replace a thread that ran actors and has died."""
    settings = {name: getattr(old, name) for name in ("broker", "consumers", "work_queue")}
    new: threading.Thread = type(old)(**settings, worker_timeout=round(old.timeout * 1000))
    new.paused = old.paused  # type: ignore[attr-defined]
    return new


@_needs(f"{_WORKER}:ConsumerThread", "delay_queue")
def delayed_in(thread: Any) -> list[MessageProxy]:
    """Tell what a consumer thread delays from what it has fetched and forgotten."""
    # Dramatiq 2.0 has pairs of a time and a message there.
    return [item[1] if isinstance(item, tuple) else item.message for item in thread.delay_queue.queue]


@_needs(f"{_WORKER}:ConsumerThread", "delay_queue", keeps_jobs=False)
def due_in(thread: Any) -> float | None:
    """Look again when the first message that a consumer thread delays is due, in milliseconds since 1970."""
    if not thread.delay_queue.queue:
        return None
    first = thread.delay_queue.queue[0]
    due: float = first[0] if isinstance(first, tuple) else first.priority
    return due


# --- Redis ---

worker_id = _reads(f"{_REDIS}:RedisBroker", "broker_id", "tell what this worker has fetched")

NAMES.add(f"{_REDIS}:RedisBroker", "redis_message_id", needed_to="tell the messages of one job apart")
#: The message option that tells the messages of one job apart.
REDIS_ID = "redis_message_id"


@_needs(f"{_REDIS}:RedisBroker", "namespace")
def ids_of(broker: Any, queue_name: str) -> str:
    """Find the ids of a queue's messages."""
    return f"{broker.namespace}:{queue_name}"


@_needs(_LUA, ".msgs")
def messages_of(broker: Any, queue_name: str) -> str:
    """Find a queue's messages by their ids, those that workers have included."""
    return f"{ids_of(broker, queue_name)}.msgs"


@_needs(_LUA, ".XQ")
def dead_of(broker: Any, queue_name: str) -> str:
    """Find the ids of a queue's dead messages."""
    return ids_of(broker, xq_name(queue_name))


@_needs(_LUA, ":__acks__.")
def acks_of(broker: Any, queue_name: str) -> str:
    """Find the ids of what this worker has fetched from a queue and not acknowledged."""
    return f"{broker.namespace}:__acks__.{worker_id(broker)}.{queue_name}"


@_needs(_LUA, ":__heartbeats__")
def heartbeats_of(broker: Any) -> str:
    """Tell other workers that this one is alive."""
    return f"{broker.namespace}:__heartbeats__"


@_needs(f"{_REDIS}:_RedisConsumer", "do_requeue")
def requeue(broker: Any, queue_name: str, redis_ids: Iterable[bytes]) -> None:
    """Give back what this worker has fetched and forgotten."""
    broker.do_requeue(queue_name, *redis_ids)


@_needs(f"{_REDIS}:_RedisConsumer", "do_nack")
def bury(broker: Any, queue_name: str, redis_id: bytes) -> None:
    """Move a message that no thread can carry out to the dead queue, as it came."""
    broker.do_nack(queue_name, redis_id)


@_needs(f"{_REDIS}:RedisBroker", "do_enqueue")
def wrap_enqueue(broker: Any, wrapper: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Put a retry in its message's place in one step; what is wrapped takes a queue, an id and bytes."""
    broker.do_enqueue = wrapper(broker.do_enqueue)


@_needs("redis:ConnectionPool", "connection_kwargs", keeps_jobs=False)
def database_of(client: Any) -> int:
    """Acknowledge and settle in one step where the store is in the same database."""
    return int(client.connection_pool.connection_kwargs.get("db") or 0)


@_needs(f"{_REDIS}:_RedisConsumer", "message_cache")
def take_fetched(inner: Any) -> list[bytes | None]:
    """Take from a consumer what it has fetched and not handed out."""
    fetched: list[bytes | None] = getattr(inner, "message_cache", [])
    inner.message_cache = []
    return fetched


@_needs(f"{_REDIS}:_RedisConsumer", "queued_message_ids")
def forget(inner: Any, message: MessageProxy) -> None:
    """Have a consumer fetch another message in the place of one that has left."""
    getattr(inner, "queued_message_ids", set()).discard(message.message_id)


@_needs(f"{_REDIS}:_RedisConsumer", "prefetch")
def fetch_no_more(inner: Any) -> None:
    """Leave new messages to other workers at a shutdown."""
    inner.prefetch = 0


@_needs(f"{_STUB}:_StubConsumer", "timeout", keeps_jobs=False)
def wait_at_most(inner: Any, milliseconds: float) -> None:
    """Have a consumer look again when a delayed message is due."""
    if hasattr(inner, "timeout"):
        inner.timeout = milliseconds


@_needs(f"{_REDIS}:_RedisConsumer", "timeout", keeps_jobs=False)
def sleep_never(inner: Any) -> int:
    """Have a consumer return at once, and say how many milliseconds it would have slept at most."""
    longest, inner.timeout = inner.timeout, 0
    return int(longest)


@_needs(f"{_REDIS}:_RedisConsumer", "misses", keeps_jobs=False)
def pause_after(inner: Any, longest: int) -> int:
    """Wait as many milliseconds as a consumer that has found nothing would sleep."""
    return compute_backoff(inner.misses - 1, max_backoff=longest)[1]


# --- RabbitMQ ---

channel_of = _reads(f"{_RABBITMQ}:RabbitmqBroker", "channel", "publish a dead letter with its final state")
parameters_of = _reads(f"{_RABBITMQ}:RabbitmqBroker", "parameters", "read dead queues on a new connection")


@_needs(f"{_RABBITMQ}:_RabbitmqMessage", "redelivered")
def is_redelivered(message: MessageProxy) -> bool:
    """Tell a message that RabbitMQ has delivered before."""
    return bool(getattr(message, "redelivered", False))


@_needs(f"{_RABBITMQ}:_RabbitmqMessage", "_tag")
def has_tag(message: MessageProxy) -> bool:
    """Tell a message that RabbitMQ has delivered from those of other brokers."""
    return hasattr(message, "_tag")


@_needs(f"{_RABBITMQ}:_RabbitmqConsumer", "known_tags", "connection", "channel")
def give_back_tag(inner: Any, message: Any) -> None:
    """Give a message back on the channel that delivered it, unless that was done."""
    if message._tag in inner.known_tags:
        inner.known_tags.discard(message._tag)
        inner.connection.add_callback_threadsafe(lambda: inner.channel.basic_nack(message._tag, requeue=True))


@_needs(f"{_RABBITMQ}:_RabbitmqConsumer", "iterator", keeps_jobs=False)
@_needs("pika.adapters.blocking_connection:BlockingChannel.consume", "inactivity_timeout", keeps_jobs=False)
def listen(inner: Any, queue_name: str, seconds: float) -> None:
    """Have a consumer wait just so long for its next message; pika goes on with the same consumer."""
    inner.iterator = inner.channel.consume(queue_name, inactivity_timeout=seconds)


@_needs(f"{_RABBITMQ}:RabbitmqBroker", "queues_pending")
def declare_later(broker: Any, queue_name: str) -> None:
    """Have the next publication declare its queue, which may be gone."""
    broker.queues_pending.add(queue_name)


@_needs(f"{_RABBITMQ}:RabbitmqBroker", "channel", "confirm_delivery")
def confirm(broker: Any) -> None:
    """Have RabbitMQ confirm what this thread publishes; without, a lost message looks like a sent one."""
    if not broker.confirm_delivery:
        broker.confirm_delivery = True
        del broker.channel


@_needs(f"{_RABBITMQ}:RabbitmqBroker", "connection")
def drop_connection(broker: Any) -> None:
    """Have this thread publish on a new connection when the old one was closed."""
    del broker.connection


# --- StubBroker ---


@_needs(f"{_STUB}:StubBroker", "dead_letters_by_queue", keeps_jobs=False)
def shown_dead(broker: Any) -> dict[str, list[MessageProxy]]:
    """Show and replay dead letters in unit tests; other brokers show none."""
    shown: dict[str, list[MessageProxy]] = getattr(broker, "dead_letters_by_queue", {})
    return shown


@_needs(f"{_STUB}:_StubConsumer", "dead_letters", keeps_jobs=False)
def shows_dead(inner: Any) -> bool:
    """Tell the consumer of a StubBroker from others."""
    return hasattr(inner, "dead_letters")


@_needs(f"{_STUB}:_StubConsumer", "queue", keeps_jobs=False)
def put_back(inner: Any, encoded: bytes) -> None:
    """Give a message back in unit tests."""
    inner.queue.put(encoded)


# --- middleware ---


@_needs(_RETRIES, *_SETTINGS, keeps_jobs=False)
def settings_of(retries: Retries) -> dict[str, Any]:
    """Retry as a stock `Retries` does the actors that say nothing themselves."""
    return {name: getattr(retries, name) for name in _SETTINGS}


@_needs(f"{_MIDDLEWARE}:TimeLimit", "manager")
@_needs(f"{_MIDDLEWARE}.time_limit:_CtypesTimeoutManager", "deadlines")
def has_struck(limit: Any, thread: int) -> bool:
    """See that a time limit has struck and not arrived yet; gevent's strikes and arrives at once."""
    deadlines = getattr(limit.manager, "deadlines", None)
    return deadlines is not None and deadlines.get(thread, 0) is None


@_needs(f"{_MIDDLEWARE}.time_limit:_CtypesTimeoutManager", "remove_timeout")
def end_limit(limit: Any, thread: int) -> None:
    """Keep a time limit away from what becomes of a job's outcome."""
    limit.manager.remove_timeout(thread)


@_needs(f"{_MIDDLEWARE}:ShutdownNotifications", "manager")
@_needs(f"{_MIDDLEWARE}.shutdown:_CtypesShutdownManager", "remove_notification")
def end_notification(shutdown: Any) -> None:
    """Keep a shutdown away from what becomes of a job's outcome."""
    shutdown.manager.remove_notification()


@_needs(_GROUPS, "rate_limiter_backend", "barrier_ttl or GROUP_CALLBACK_BARRIER_TTL", keeps_jobs=False)
def counting_of(callbacks: Any) -> tuple[Any, int]:
    """Count a member of a group once, for as many milliseconds as its group is known."""
    # In Dramatiq 2.0 the module says it.
    ttl: int = getattr(group_callbacks, "GROUP_CALLBACK_BARRIER_TTL", 86_400_000)
    return callbacks.rate_limiter_backend, getattr(callbacks, "barrier_ttl", ttl)
