"""The private and undocumented names of Celery, kombu, billiard and redis-py that this adapter needs.

No other file of the adapter writes such a name. A worker does not start without a vital name, which keeps
jobs from being lost, and it warns of any other that is missing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Container, Iterator
from functools import partial
from types import FrameType
from typing import Any

from celery import Celery
from celery.app.trace import TraceInfo

from ..adapters.private_names import PrivateName, minor, missing_vital, names_in, vital
from ..errors import ConfigurationError

__all__ = ["TraceInfo"]

#: Uses that not every worker has: Redis as the broker, the bridge's way of taking from it, and Redis as the
#: result backend. A test under virtual time is no worker.
REDIS, FETCH, RESULTS, TESTING = "redis", "fetch", "results", "testing"


def names() -> Iterator[PrivateName]:
    """Yield every name."""
    return names_in(globals())


def check_names(uses: Container[str]) -> None:
    """Look for the names that a worker with these uses needs; raises ConfigurationError for a vital one."""
    if lost := missing_vital(names(), uses):
        hint = "; reliable_fetch=false does without it" if {name.only for name in lost} == {FETCH} else ""
        raise ConfigurationError("; ".join(map(str, lost)) + hint)


def kept_option(run: Any, option: str, default: Any) -> Any:
    """Return an option of the automatic retries as Celery keeps it, in the closure of a task's `run`.

    An instrumentation may have put a wrapper around it.
    """
    name = autoretry_options[option].name
    while run is not None:
        code = getattr(run, "__code__", None)
        if code is not None and name in code.co_freevars:
            return run.__closure__[code.co_freevars.index(name)].cell_contents
        run = getattr(run, "__wrapped__", None)
    return default


#: Packages whose code is not the user's.
_INSIDE = ("celery", __name__.partition(".")[0])
#: Green pools end a task with exceptions of these modules.
GREEN = ("gevent", "greenlet", "eventlet")

_APP, _TASK = "celery.app.base:Celery", "celery.app.task:Task"
_AUTORETRY = "celery.app.autoretry:add_autoretry_behaviour"
_BACKEND = "celery.backends.base:KeyValueStoreBackend"
_REQUEST, _STATE = "celery.worker.request:Request", "celery.worker.state"
_CONSUMER = "celery.worker.consumer.consumer:Consumer"
_AMQP, _CONNECTION = "celery.app.amqp:AMQP", "kombu.connection:Connection"
_CHANNEL, _QOS = "kombu.transport.redis:Channel", "kombu.transport.redis:QoS"
_TRANSPORT, _MEMORY = "kombu.transport.virtual:Transport", "kombu.transport.memory:Channel"

# Apps and tasks
tasks = minor("_tasks", _APP, "look a task up while its app is not finalized")
task_from_fun = vital("_task_from_fun", _APP, "adopt the tasks that are defined after `install`")
pending_tasks = minor("_pending", _APP, "adopt the tasks that are made after `install`")
when_made = minor("__then__", "celery.local:PromiseProxy", "adopt the tasks that are made after `install`")
warn_duplicate_task_name = minor(
    "_warn_duplicate_task_name", _APP, "name the user's line in Celery's warning of a taken name", since="5.7"
)
get_current_object = vital("_get_current_object", "celery.local:Proxy", "handle the jobs outside the canary")
connect_on_app_finalize = minor(
    "connect_on_app_finalize", "celery._state", "add a shared `@ojs_task` to the apps that come later"
)
get_active_apps = minor(
    "_get_active_apps", "celery._state", "add a shared `@ojs_task` to the apps that there are"
)
start_strategy = vital("start_strategy", _TASK, "keep a message that no worker can decode")
request_stack = minor("request_stack", _TASK, "have `on_retry` see a killed run's request")
orig_run = minor(
    "_orig_run", _AUTORETRY, "run a task without the automatic retries that Celery puts around it"
)
#: The options of the automatic retries, which Celery reads once and keeps in a closure.
autoretry_options = {
    option: minor(option, _AUTORETRY, "read the option as Celery has read it")
    for option in (
        "autoretry_for",
        "dont_autoretry_for",
        "retry_backoff",
        "retry_backoff_max",
        "retry_jitter",
        "retry_kwargs",
    )
}

# Results
handle_error_state = minor(
    "handle_error_state", "celery.app.trace:TraceInfo", "tell as Celery does that a killed job is retried"
)
mark_as_retry = minor(
    "mark_as_retry", "celery.backends.base:Backend", "store no retry after the end of its run"
)
handle_error_state_of, mark_as_retry_of = handle_error_state.reader(), mark_as_retry.reader()
on_chord_part_return = minor(
    "on_chord_part_return", "celery.backends.base:Backend", "have a chord count a success whose worker died"
)
get_key_for_group = minor("get_key_for_group", _BACKEND, "find what a chord on Redis has counted")
chord_zset = minor(
    "_chord_zset",
    "celery.backends.redis:RedisBackend",
    "read what a chord on Redis has counted",
    only=RESULTS,
)

# Requests and the worker's main process
receivers = minor("receivers", "celery.utils.dispatch.signal:Signal", "settle a success before others hear")
future = minor("f", "celery.concurrency.thread:ApplyResult", "find a run that has broken off in a thread")
context = vital("_context", _REQUEST, "judge a job in the main process whose child died")
already_cancelled = vital("_already_cancelled", _REQUEST, "tell a cancelled job from a crash")
already_revoked = vital("_already_revoked", _REQUEST, "tell a revoked job from a crash")
success_was_stored = minor(
    "_success_was_stored", _REQUEST, "tell a child that died after its job's success", since="5.7"
)
acknowledge = minor("acknowledge", _REQUEST, "forget the reservation of a job that has ended")
execute_using_pool = minor(
    "execute_using_pool", _REQUEST, "free the place in the pool of a message that could not be handed to it"
)
semaphore = minor(
    "semaphore", "celery.worker.components:Pool", "free the place in the pool of such a message"
)
num_processes = minor(
    "num_processes", "celery.concurrency.base:BasePool", "know whether a worker has a free process"
)
active_requests = minor("active_requests", _STATE, "show a job that waits as reserved, not as active")
reserved_requests = minor("reserved_requests", _STATE, "know how many jobs a worker has")
task_reserved = vital("task_reserved", _STATE, "keep a job that waits among those of the worker")
task_ready = vital("task_ready", _STATE, "take a job that has ended from those of the worker")
should_terminate = vital("should_terminate", _STATE, "give an attempt back at a cold shutdown")
should_stop = vital("should_stop", _STATE, "give an attempt back when a shutdown ends its process")
call_soon = vital("call_soon", _CONSUMER, "hand a job that waited to the pool")
on_task_request = vital("on_task_request", _CONSUMER, "hand a job that waited to the pool")
create_task_handler = minor("create_task_handler", _CONSUMER, "know that a worker still takes messages")
task_buckets = minor("task_buckets", _CONSUMER, "know whether a rate limit keeps jobs back")
soft_timeout_signal = vital(
    "SIG_SOFT_TIMEOUT", "billiard.pool", "let no soft time limit strike while an outcome is carried out"
)
terminate_handler_fired = minor(
    "terminate_handler_fired", "billiard.common", "tell a task's SystemExit from the pool's", since="4.3.1"
)

# Publishing
as_task_v2 = minor("as_task_v2", _AMQP, "make the message of an eagerly applied task")
close = minor("_close", _CONNECTION, "drop a channel that an outage has closed")
producer_connection = minor(
    "__connection__", "kombu.messaging:Producer", "drop a channel that an outage has closed"
)
lookup = vital(
    "_lookup",
    "kombu.transport.virtual:Channel",
    "refuse a retry that an exchange leads to no queue",
    only=REDIS,
)
type_to_name = minor(
    "type_to_name", "kombu.serialization:SerializerRegistry", "encode arguments as the message had them"
)
type_to_name_of = type_to_name.reader()
router_routes = minor("routes", "celery.app.routes:Router", "find the dead queues of the queues routed to")
detect_quorum_queues = minor(
    "detect_quorum_queues", "celery.utils.quorum_queues", "have RabbitMQ itself delay a retry", since="5.5"
)
calculate_routing_key = minor(
    "calculate_routing_key",
    "kombu.transport.native_delayed_delivery",
    "have RabbitMQ itself delay a retry",
    since="5.5",
)

# Redis as the broker
q_for_pri = vital("_q_for_pri", _CHANNEL, "find a queue's lists in Redis", only=REDIS)
message_priority = vital("_get_message_priority", _CHANNEL, "give back what a dead worker had", only=REDIS)
conn_or_acquire = vital("conn_or_acquire", _CHANNEL, "renew what a worker has", only=REDIS)
deliveries = vital("_delivered", _QOS, "renew what a worker has", only=REDIS)
restore_visible = vital("restore_visible", _QOS, "put back what a dead worker had", only=REDIS)
create_transport = vital("create_transport", _CONNECTION, "take messages in the bridge's way", only=FETCH)
brpop_start = vital("_brpop_start", _CHANNEL, "ask for a message and note its worker", only=FETCH)
brpop_read = vital("_brpop_read", _CHANNEL, "read the message that was asked for", only=FETCH)
in_poll = vital("_in_poll", _CHANNEL, "say that an answer is awaited", only=FETCH)
queue_cycle = vital("_queue_cycle", _CHANNEL, "ask every queue in its turn", only=FETCH)
on_connection_disconnect = vital(
    "_on_connection_disconnect", _CHANNEL, "hear queues after a connection that failed", only=FETCH
)
brpop_sent_at = minor(
    "_brpop_sent_at", _CHANNEL, "have kombu notice an answer that never comes", only=FETCH, since="5.7"
)
flush_brpop_reauth = minor(
    "_flush_brpop_reauth", _CHANNEL, "have redis-py log in again with a new token", only=FETCH, since="5.7"
)
_POLLER = "kombu.transport.redis:MultiChannelPoller"
register = vital("_register", _POLLER, "hear that a queue has a message", only=FETCH)
unregister = vital("_unregister", _POLLER, "hear that a queue has a message", only=FETCH)
fd_to_chan = vital("_fd_to_chan", _POLLER, "hear that a queue has a message", only=FETCH)
deliver = vital("_deliver", _TRANSPORT, "deliver what was taken", only=FETCH)
callbacks = vital("_callbacks", _TRANSPORT, "give back what no consumer wants now", only=FETCH)
can_consume = vital("can_consume", _QOS, "acknowledge what an outage kept from it", only=FETCH)
client_connection = vital("connection", "redis:Redis", "ask for a message without waiting", only=FETCH)
parse_response = vital("parse_response", "redis:Redis", "read what was asked for", only=FETCH)
send_command = vital(
    "send_command", "redis.connection:Connection", "ask for a message without waiting", only=FETCH
)

# Tests
_testing = partial(minor, only=TESTING)
app_pool = _testing("_pool", _APP, "keep in memory what a test sends")
producer_pool = _testing("_producer_pool", _AMQP, "keep in memory what a test sends")
current_apps = _testing("_tls", "celery._state", "have the app of a test be the current app for a while")
default_app = _testing("default_app", "celery._state", "find the app of a test")
tracer = _testing("__trace__", _TASK, "have a task's result kept in memory")
limit_task = _testing("_limit_task", _CONSUMER, "stand in a test for a worker's consumer")
limit_post_eta = _testing("_limit_post_eta", _CONSUMER, "stand in a test for a worker's consumer")
put = _testing("_put", _MEMORY, "note the order of the messages of a test")
put_fanout = _testing("_put_fanout", _MEMORY, "note the order of the messages of a test")


def task_in(tasks: Any, name: Any) -> Any:
    """Return a task of a registry, or None. A registry of a fleet's own may have no `get`."""
    return tasks[name] if name in tasks else None  # noqa: SIM401 - there is no `get`


def warn_outside(app: Celery) -> None:
    """Let Celery's warning of a taken task name point to the line of the user's code."""
    # Celery 5.7 points to the first line outside Celery, which is the bridge's.
    warn = warn_duplicate_task_name(app, None)
    if warn is None:
        return

    def warn_there(*args: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn(*args)
        for warning in caught:
            warnings.warn(warning.message, stacklevel=_level())

    warn_duplicate_task_name.set(app, warn_there)


def _level() -> int:
    """Return the stack level of the first line of the user's code, as the caller's `stacklevel`."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    return level
