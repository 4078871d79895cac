"""The private and undocumented names of Dramatiq, pika and redis-py that this adapter needs.

No other file of the adapter writes such a name. A worker does not start without a vital name, which keeps
jobs from being lost, and it warns of any other that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import dramatiq
from dramatiq import worker as _worker
from dramatiq.broker import MessageProxy
from dramatiq.common import xq_name
from dramatiq.middleware import Retries, group_callbacks

from ..adapters.private_names import PrivateName, minor, names_in, vital

#: Uses that not every worker has: the kinds of brokers, by the modules of their classes.
REDIS, RABBITMQ, STUB = (f"dramatiq.brokers.{kind}" for kind in ("redis", "rabbitmq", "stub"))


def names() -> Iterator[PrivateName]:
    """Yield every name."""
    return names_in(globals())


_redis, _rabbitmq = partial(vital, only=REDIS), partial(vital, only=RABBITMQ)
_stub = partial(minor, only=STUB)

_WORKER, _CONSUMER, _RUNNER = (
    f"dramatiq.worker:{name}" for name in ("Worker", "ConsumerThread", "WorkerThread")
)
_BROKER, _POLL, _LUA = f"{REDIS}:RedisBroker", f"{REDIS}:_RedisConsumer", f"{REDIS}:_scripts.dispatch"
_AMQP, _CHANNEL = f"{RABBITMQ}:RabbitmqBroker", f"{RABBITMQ}:_RabbitmqConsumer"
_DELIVERY = f"{RABBITMQ}:_RabbitmqMessage"
_MIDDLEWARE = "dramatiq.middleware"
_LIMITS = f"{_MIDDLEWARE}.time_limit:_CtypesTimeoutManager"
_SHUTDOWNS = f"{_MIDDLEWARE}.shutdown:_CtypesShutdownManager"

# Messages and the threads of a worker
message = vital("_message", "dramatiq.broker:MessageProxy", "read and keep the message behind a proxy")
#: A name that every job or every failure needs has a reader, here and below.
message_in: Callable[[MessageProxy], dramatiq.Message[Any]] = message.reader()
consumer_threads = vital("consumers", _WORKER, "watch over the consumer threads, by queue")
worker_threads = vital("workers", _WORKER, "watch over the threads that run actors")
consumer_thread = minor("ConsumerThread", "dramatiq.worker", "look again as soon as a job is due")
ConsumerThread: Any = consumer_thread(_worker, ())
queue_prefetch = minor("QUEUE_PREFETCH", "dramatiq.worker", "leave a number to prefetch that a user has set")
consumer_of_thread = minor("consumer", _CONSUMER, "fetch no more messages at a shutdown")
worker_timeout = vital("worker_timeout", _CONSUMER, "wait for so many milliseconds at most")
worker_timeout_of = worker_timeout.reader()
delay_queue = vital("delay_queue", _CONSUMER, "tell what a thread delays from what it has forgotten")
delay_queue_of = delay_queue.reader()
of_consumer_thread = {
    name: vital(name, _CONSUMER, "replace a consumer thread that has died")
    for name in ("prefetch", "work_queue", "paused")
}
of_worker_thread = {
    name: vital(name, _RUNNER, "replace a thread that ran actors and has died")
    for name in ("consumers", "work_queue", "timeout", "paused")
}
#: The variable of what a thread has taken from its queue; before Dramatiq 2.2 that is the message itself.
taken = minor("item", f"{_RUNNER}.run", "give back the message of a thread that has died", since="2.2")


def taken_in(frame: Any) -> MessageProxy | None:
    """Return the message that a thread has taken last, by the frame of its `run`."""
    own = frame.f_locals
    item = own.get(taken.name)
    message: MessageProxy | None = own.get("message") if item is None else item.message
    return message


# Redis
redis_message_id = _redis("redis_message_id", f"{_BROKER}.enqueue", "tell the messages of one job apart")
#: The message option that tells the messages of one job apart.
REDIS_ID = redis_message_id.name
worker_id = _redis("broker_id", _BROKER, "tell what this worker has fetched")
namespace = _redis("namespace", _BROKER, "find the ids of a queue's messages")
messages = _redis(".msgs", _LUA, "find a queue's messages by their ids")
dead_ids = _redis(".XQ", _LUA, "find the ids of a queue's dead messages")
acks = _redis(":__acks__.", _LUA, "find what this worker has fetched from a queue and not acknowledged")
heartbeats = _redis(":__heartbeats__", _LUA, "tell other workers that this one is alive")
do_ack = _redis("do_ack", f"{_POLL}.ack", "see that a fleet has its own way to acknowledge")
do_enqueue = _redis("do_enqueue", f"{_BROKER}.enqueue", "put a retry in its message's place in one step")
do_requeue = _redis("do_requeue", f"{_POLL}.requeue", "give back what this worker has fetched and forgotten")
do_nack = _redis("do_nack", f"{_POLL}.nack", "move a message that no thread can carry out, as it came")
message_cache = _redis("message_cache", _POLL, "give back what a consumer has fetched and not handed out")
queued_message_ids = _redis(
    "queued_message_ids", _POLL, "fetch another message in the place of one that has left"
)
redis_prefetch = _redis("prefetch", _POLL, "leave new messages to other workers at a shutdown")
outstanding = minor(
    "outstanding_message_count", _POLL, "fetch messages as soon as there is room for them", only=REDIS
)
redis_timeout = minor("timeout", _POLL, "wait for messages in a way that a new one can end", only=REDIS)
misses = minor("misses", _POLL, "wait as long as a consumer that has found nothing", only=REDIS)

# RabbitMQ
channel = _rabbitmq("channel", _AMQP, "publish a dead letter with its final state")
parameters = _rabbitmq("parameters", _AMQP, "read dead queues on a new connection")
connection = _rabbitmq("connection", _AMQP, "publish on a new connection after an outage")
declare_dead_queue = minor(
    "_declare_xq_queue", _AMQP, "use a dead queue that exists with other arguments", only=RABBITMQ
)
queues_pending = _rabbitmq("queues_pending", _AMQP, "declare a queue anew that may be gone")
confirm_delivery = _rabbitmq("confirm_delivery", _AMQP, "have RabbitMQ confirm what is published")
redelivered = _rabbitmq("redelivered", _DELIVERY, "tell a message that was delivered before")
tag = _rabbitmq("_tag", _DELIVERY, "give a message back on the channel that delivered it")
known_tags = _rabbitmq("known_tags", _CHANNEL, "give a message back once")
consumer_connection = _rabbitmq("connection", _CHANNEL, "give a message back in the connection's own thread")
consumer_channel = _rabbitmq("channel", _CHANNEL, "give a message back on the channel that delivered it")
iterator = minor("iterator", _CHANNEL, "wait just so long for the next message", only=RABBITMQ)
inactivity_timeout = minor(
    "inactivity_timeout",
    "pika.adapters.blocking_connection:BlockingChannel.consume",
    "wait just so long for the next message",
    only=RABBITMQ,
)

# StubBroker, and tests
global_broker = _stub("global_broker", "dramatiq.broker", "find the broker of a test")
dead_letters_by_queue = _stub(
    "dead_letters_by_queue", f"{STUB}:StubBroker", "show and replay dead letters in unit tests"
)
dead_letters = _stub("dead_letters", f"{STUB}:_StubConsumer", "tell the consumer of a StubBroker from others")
stub_timeout = _stub("timeout", f"{STUB}:_StubConsumer", "look again when a delayed message is due")
stub_queue = _stub("queue", f"{STUB}:_StubConsumer", "give a message back in unit tests")

# Middleware
#: The settings of the stock `Retries`. An actor without options of its own keeps them.
retries_settings = {
    name: minor(name, f"{_MIDDLEWARE}:Retries", "retry an actor without options of its own as before")
    for name in ("max_retries", "min_backoff", "max_backoff", "retry_when")
}
limit_manager = vital("manager", f"{_MIDDLEWARE}:TimeLimit", "keep a time limit away from a job's outcome")
limit_manager_of = limit_manager.reader()
deadlines = vital("deadlines", _LIMITS, "see that a time limit has struck and not arrived yet")
remove_timeout = vital("remove_timeout", _LIMITS, "keep a time limit away from a job's outcome")
remove_timeout_of = remove_timeout.reader()
shutdown_manager = vital(
    "manager", f"{_MIDDLEWARE}:ShutdownNotifications", "keep a shutdown away from a job's outcome"
)
shutdown_manager_of = shutdown_manager.reader()
remove_notification = vital("remove_notification", _SHUTDOWNS, "keep a shutdown away from a job's outcome")
remove_notification_of = remove_notification.reader()
rate_limiter_backend = minor(
    "rate_limiter_backend", f"{_MIDDLEWARE}:GroupCallbacks", "count a member of a group once"
)
barrier_ttl = minor(
    "barrier_ttl", f"{_MIDDLEWARE}:GroupCallbacks", "know for how long a group is known", since="2.2"
)
#: For how many milliseconds a group is known in Dramatiq before 2.2.
BARRIER_TTL: int = getattr(group_callbacks, "GROUP_CALLBACK_BARRIER_TTL", 86_400_000)


def settings_of(retries: Retries) -> dict[str, Any]:
    """Return the settings of a `Retries`."""
    return {name: setting(retries) for name, setting in retries_settings.items()}


# The keys of a RedisBroker


def ids_of(broker: Any, queue_name: str) -> str:
    """Return the key of the ids of a queue's messages."""
    return f"{namespace(broker)}:{queue_name}"


def messages_of(broker: Any, queue_name: str) -> str:
    """Return the key of a queue's messages by their ids; the messages that workers have are there, too."""
    return f"{ids_of(broker, queue_name)}{messages.name}"


def dead_of(broker: Any, queue_name: str) -> str:
    """Return the key of the ids of a queue's dead messages."""
    return ids_of(broker, xq_name(queue_name))


def acks_of(broker: Any, queue_name: str, worker: str | None = None) -> str:
    """Return the key of the ids that a worker, or this one, has fetched from a queue and not acknowledged."""
    return f"{namespace(broker)}{acks.name}{worker or worker_id(broker)}.{queue_name}"


def heartbeats_of(broker: Any) -> str:
    """Return the key of the times at which workers were last alive."""
    return f"{namespace(broker)}{heartbeats.name}"
