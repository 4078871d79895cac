"""A worker that silently takes no more messages is ended.

After some reconnects Celery's consumer never reads messages again (celery#8030, #8091, #8384, #10302): the
process lives, and its queues fill. A thread beside the consumer notices that.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from celery import Celery, bootsteps
from celery.worker import state

from . import compat

logger = logging.getLogger("ojs_bridge")

#: Seconds between two looks. After so many silent looks in a row the worker says so, is asked to end, and
#: ends at once, because its main thread does not react.
LOOK = 30.0
SAID, ASKED, FORCED = 2, 4, 6
#: The seconds for which a look waits for the broker at most.
_PATIENCE = 10.0
#: The exit status of a worker that ended itself: a temporary failure, so that supervisors start it anew.
_STATUS = os.EX_TEMPFAIL

#: The timeouts of each kind of connection; other brokers are not watched.
_TIMEOUTS = {
    "amqp": {"read_timeout": _PATIENCE, "write_timeout": _PATIENCE},
    "redis": {"socket_timeout": _PATIENCE, "socket_connect_timeout": _PATIENCE},
}
#: Arguments of queues whose messages the broker may keep from a free worker.
_UNEVEN = ("x-single-active-consumer", "x-priority")


class ConsumerWatch(bootsteps.StartStopStep):  # type: ignore[misc]
    """Looks, from its own thread, whether a free worker takes the messages of its queues."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._over: threading.Event | None = None
        self._takes = True
        create = compat.create_task_handler(consumer, None)
        self._hears = create is not None
        if self._hears:
            compat.create_task_handler.set(consumer, self._noting(create))

    def _noting(self, create: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `create_task_handler` whose handlers note that a message has come."""

        @functools.wraps(create)
        def create_noting(*args: Any, **kwargs: Any) -> Any:
            handle = create(*args, **kwargs)

            def on_task_received(message: Any) -> Any:
                self._takes = True
                return handle(message)

            return on_task_received

        return create_noting

    def start(self, consumer: Any) -> None:
        """Begin, once, if the broker can say how many messages a queue has."""
        if self._over is None and self._hears and consumer.connection.transport.driver_type in _TIMEOUTS:
            self._over = threading.Event()
            threading.Thread(
                target=self._watch, args=(consumer, self._over), name="ojs-watch", daemon=True
            ).start()

    def stop(self, consumer: Any) -> None:
        """Go on: the connection is being renewed."""

    def shutdown(self, _: Any) -> None:
        """End with the worker."""
        if self._over is not None:
            self._over.set()

    terminate = shutdown

    def _watch(self, consumer: Any, over: threading.Event) -> None:
        silent = 0
        while not over.wait(LOOK):
            try:
                queue = self._neglected(consumer)
            except Exception as error:  # noqa: BLE001 - Celery itself says that the broker is away
                logger.info("whether this worker takes what its queues have is not known: %r", error)
                queue = None
            silent = silent + 1 if queue else 0
            if queue:
                _act(silent, queue)

    def _neglected(self, consumer: Any) -> str | None:
        """Return a queue with messages, if this free worker has taken none since the last look."""
        takes, self._takes = self._takes, False
        if takes or not _is_free(consumer):
            return None
        return _filled(consumer.app, consumer.connection.transport.driver_type)


def _is_free(consumer: Any) -> bool:
    """Return whether a worker would run a message at once."""
    if consumer.blueprint.state != bootsteps.RUN or consumer.connection is None:
        return False
    limited = any(bucket and bucket.contents for bucket in compat.task_buckets(consumer).values())
    held_until_due = consumer.app.conf.get("worker_eta_task_limit")
    full = held_until_due and consumer.qos.value >= held_until_due
    jobs, places = len(compat.reserved_requests(state)), compat.num_processes(consumer.pool)
    return not limited and not full and jobs < places


def _filled(app: Celery, driver: str) -> str | None:
    """Return a queue that has messages for this worker; a new connection asks the broker."""
    queues = [queue for queue in app.amqp.queues.consume_from.values() if _is_for_all(queue)]
    with app.connection_for_read(
        connect_timeout=_PATIENCE, transport_options=_TIMEOUTS[driver]
    ) as connection:
        for queue in queues:
            try:
                if connection.channel().queue_declare(queue.name, passive=True).message_count:
                    return str(queue.name)
            except connection.channel_errors:  # there is none, or nobody else may ask for it
                continue
    return None


def _is_for_all(queue: Any) -> bool:
    arguments = {**(queue.queue_arguments or {}), **(queue.consumer_arguments or {})}
    return arguments.get("x-queue-type") != "stream" and not any(map(arguments.get, _UNEVEN))


def _act(silent: int, queue: str) -> None:
    if silent == SAID:
        logger.error("this worker is free and takes nothing, though the queue %r has messages", queue)
    elif silent == ASKED:
        logger.critical("this worker still takes nothing, and ends; its supervisor is to start it anew")
        # Celery's signal handlers do this, too, but with a status of 0.
        compat.should_stop.set(state, _STATUS)
    elif silent >= FORCED:
        logger.critical("this worker does not hear that it is to end, and ends at once")
        os._exit(_STATUS)
