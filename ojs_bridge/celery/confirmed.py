"""Publishing that RabbitMQ confirms, without which a lost retry looks like a sent one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from celery import Celery
from kombu import pools
from kombu.connection import Connection

_OPTION = "confirm_publish"
#: Where an app keeps what its confirmed connections are made from.
_CONNECTION = "_ojs_confirmed"


def producer(app: Celery) -> AbstractContextManager[Any]:
    """Acquire a producer for as long as the context lasts; an app that sets `confirm_publish` is left alone.

    Its connection is used for nothing else. Were all of Celery's to confirm, a green worker, which reads from
    its events' connection while another greenlet sends an event there, could take that greenlet's confirm;
    and every greenlet with an event to send, the shutdown's included, would wait for the next frame.
    """
    if _OPTION in (app.conf.broker_transport_options or {}) or not _can_confirm(app):
        stock: AbstractContextManager[Any] = app.producer_or_acquire(None)
        return stock
    connection: Connection = vars(app).get(_CONNECTION)
    if connection is None:
        connection = app.connection_for_write(transport_options={_OPTION: True})
        setattr(app, _CONNECTION, connection)
    pools.set_limit(app.conf.broker_pool_limit)
    timeout = app.conf.get("broker_pool_acquire_timeout")
    confirming: AbstractContextManager[Any] = pools.producers[connection].acquire(block=True, timeout=timeout)
    return confirming


def _can_confirm(app: Celery) -> bool:
    return bool(app.producer_pool.connections.connection.transport.driver_type == "amqp")
