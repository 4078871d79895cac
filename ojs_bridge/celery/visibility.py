"""Keeping Redis from giving a second worker what this one still has."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from celery import bootsteps

logger = logging.getLogger("ojs_bridge")

#: How often a delivery is renewed before its visibility timeout ends.
BEATS = 3
#: How many lost deliveries go back to their queues at a time.
SWEEP = 1000


class Visibility(bootsteps.StartStopStep):  # type: ignore[misc]
    """Renews what a worker runs, or holds until it is due, and returns what dead workers held.

    Redis measures the visibility timeout from the delivery, and kombu never renews it (DESIGN section 7.2).
    A thread of its own, because a warm shutdown ends Celery's timers while jobs still run.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._over: threading.Event | None = None

    def start(self, consumer: Any) -> None:
        """Begin, once, where the transport is Redis; a new connection is found by itself."""
        channel = consumer.task_consumer.channel
        if self._over is None and hasattr(channel, "unacked_index_key"):
            self._over = threading.Event()
            seconds = channel.visibility_timeout / BEATS
            beating = threading.Thread(
                target=_beat, args=(consumer, self._over, seconds), name="ojs-visibility", daemon=True
            )
            beating.start()

    def stop(self, consumer: Any) -> None:
        """Go on: the connection is being renewed, or a warm shutdown waits for what runs."""

    def shutdown(self, _: Any) -> None:
        """End: what is unacknowledged goes back to its queue now."""
        if self._over is not None:
            self._over.set()

    terminate = shutdown


def _beat(consumer: Any, over: threading.Event, seconds: float) -> None:
    while not over.wait(seconds):
        try:
            keep(consumer.task_consumer.channel)
        except Exception as error:  # noqa: BLE001 - no connection just now; the next beat finds another
            logger.info("deliveries are not renewed: %r", error)


def keep(channel: Any) -> None:
    """Renew every delivery that a channel has, and put back those that nobody renewed in time."""
    tags = list(channel.qos._delivered)
    if tags:
        now = time.time()
        with channel.conn_or_acquire() as client:
            client.zadd(channel.unacked_index_key, dict.fromkeys(tags, now), xx=True)
    # Green workers never do it themselves, and others only every 100 seconds.
    channel.qos.restore_visible(num=SWEEP, interval=1)
