"""A delivery leaves the consumer as the bridge decided: acknowledged, kept or given back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from dramatiq.broker import Broker, Consumer, MessageProxy
from dramatiq.common import dq_name
from dramatiq.errors import ConnectionClosed

from ..errors import StoreError
from .acknowledging import Ack, Ending
from .brokers import is_rabbitmq, is_redis, redis_outages, told
from .compat import fetch_no_more, forget, give_back_tag, has_tag, put_back, shows_dead, take_fetched
from .delivery import NATIVE, Delivery, Settlement, delivery_of
from .on_rabbitmq import confirm, published_dead
from .on_redis import Hands, enrich, replace_on
from .receiving import Wakes, readable, sound, taking
from .translate import encodable

logger = logging.getLogger("ojs_bridge")

#: How long a job waits before it is given back, so that what fails for good does not spin, in seconds.
HOLD_SECONDS = 1.0


class SettlingConsumer(Consumer):
    """A consumer that settles marked messages as marked, and all others as the broker's own does."""

    def __init__(self, inner: Consumer, broker: Broker, queue_name: str, hands: Hands, wakes: Wakes) -> None:
        self._inner = inner
        self._broker = broker
        self._hands = hands
        self._queue_name = queue_name
        self._take = sound(broker, inner, queue_name, taking(broker, inner, queue_name, wakes, hands))
        self._is_delayed = queue_name == dq_name(queue_name)
        self._takes = is_redis(broker)
        self._is_tagged = is_rabbitmq(broker)
        if not self._is_tagged:
            self.__dict__["ack"] = self._straight(inner.ack)

    def ack(self, message: MessageProxy) -> None:
        """Acknowledge, or settle as marked."""
        self._settle(message, self._inner.ack)

    def _straight(self, acknowledge: Ack) -> Ack:
        """Return an `ack` that asks a message nothing but its mark: every job comes by here."""
        settle, takes, put = self._settle, self._takes, self._hands.put

        def ack(message: MessageProxy) -> None:
            delivery: Delivery | None = message.ojs_delivery
            if delivery is not None and delivery.settlement is not NATIVE:
                settle(message, acknowledge)
                return
            try:
                acknowledge(message)
            except redis_outages() as error:
                raise ConnectionClosed(error) from None
            if takes:
                put(message)

        return ack

    def nack(self, message: MessageProxy) -> None:
        """Move to the dead queue, or settle as marked."""
        self._settle(message, self._inner.nack)

    def _settle(self, message: MessageProxy, otherwise: Ack) -> None:
        delivery = delivery_of(message)
        if delivery.consumer is not None and delivery.consumer is not self._inner:
            # RabbitMQ counts delivery tags per channel: the tag names another message on the new channel.
            if delivery.ending:
                delivery.ending.settle()
            logger.warning("job %s: its connection is gone, RabbitMQ delivers it again", message.message_id)
            return
        try:
            if delivery.settlement is NATIVE:
                otherwise(message)
            else:
                self._carry_out(delivery, message, otherwise)
        except (StoreError, *redis_outages()) as error:  # type: ignore[misc]
            # After any other error Dramatiq leaves the message in a live worker's set, where it stays.
            raise ConnectionClosed(error) from None
        if self._takes and not delivery.is_given_back:
            self._hands.put(message)

    def _carry_out(self, delivery: Delivery, message: MessageProxy, otherwise: Ack) -> None:
        match delivery.settlement:
            case Settlement.ENDING if delivery.ending:
                self._end(delivery.ending, message, otherwise)
            case Settlement.DROP:
                self._drop(delivery, message, otherwise)
            case Settlement.DEAD:
                _bury(self._broker, self._inner, message)
            case Settlement.HOLD | Settlement.UNBEGUN:
                time.sleep(HOLD_SECONDS)
                self._give_back(delivery, message)
            case Settlement.GIVE_BACK:
                self._give_back(delivery, message)

    def _drop(self, delivery: Delivery, message: MessageProxy, otherwise: Ack) -> None:
        if delivery.is_replaced:
            forget(self._inner, message)
        elif shows_dead(self._inner):
            # StubBroker: a unit test finds what has failed there, and `join` raises its error.
            otherwise(message)
        else:
            self._inner.ack(message)

    def _give_back(self, delivery: Delivery, message: MessageProxy) -> None:
        if delivery.is_given_back and message in self._hands:
            # The last time failed half-way: it went back, came again, and runs. It is not this one any more.
            return
        delivery.is_given_back = True
        # First, or this very process might fetch it again and take it for the one it has.
        self._hands.put(message)
        _give_back(self._inner, message)

    def _end(self, ending: Ending, message: MessageProxy, otherwise: Ack) -> None:
        if otherwise == self._inner.ack:
            ending.acknowledge(message, self._inner.ack)
            forget(self._inner, message)
        else:
            ending.settle()
            otherwise(message)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Give prefetched messages back; raises ConnectionClosed, after whatever went wrong."""
        given = list(messages)
        for message in given:
            self._hands.put(message)
        with _closing():
            if shows_dead(self._inner):
                # A broker in memory would forget them.
                for message in given:
                    _give_back(self._inner, message)
            else:
                self._inner.requeue(given)

    def __iter__(self) -> Any:
        # A broker in memory loses no connection, and nothing is to be seen of what it delivers at once.
        return self if self._takes or self._is_tagged or self._is_delayed else iter(self._inner)

    def __next__(self) -> MessageProxy | None:
        message = self._take()
        if message is not None:
            if self._is_tagged:
                message.ojs_delivery = Delivery(self._inner, time.monotonic())  # type: ignore[attr-defined]
            elif self._takes and not self._hands.take(message, is_delayed=self._is_delayed):
                return None
        return message

    def stop_fetching(self) -> None:
        """Leave to other workers what comes from now on; on RabbitMQ only what they get first."""
        if self._takes and not self._is_delayed:
            # The delayed queue's consumer goes on, and is the heartbeat of jobs that still run.
            fetch_no_more(self._inner)

    def close(self) -> None:
        """Close the broker's own consumer, and give back what it has fetched and Dramatiq would forget.

        Raises ConnectionClosed, after whatever went wrong: anything else would end Dramatiq's thread.
        """
        fetched = take_fetched(self._inner)
        try:
            with _closing():
                if fetched:
                    self._inner.requeue(readable(fetched, self._queue_name))
        finally:
            with _closing():
                self._inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def _closing() -> Iterator[None]:
    try:
        yield
    except ConnectionClosed:
        raise
    except Exception as error:
        logger.warning("a consumer's messages were not given back, they come again: %s", told(error))
        logger.debug("a consumer's messages were not given back", exc_info=True)
        raise ConnectionClosed(error) from None


def wrap(broker: Any) -> None:
    """Make a broker hand out settling consumers, once, and have RabbitMQ confirm what is published."""
    consume = broker.consume
    if getattr(consume, "_ojs_wrapped", False):
        return

    hands, wakes = Hands(), Wakes()

    def settling(*args: Any, **kwargs: Any) -> Consumer:
        queue_name = args[0] if args else kwargs["queue_name"]
        if is_redis(broker):
            try:
                hands.release_strays(broker, queue_name)
            except redis_outages() as error:
                raise ConnectionClosed(error) from None
        return SettlingConsumer(consume(*args, **kwargs), broker, queue_name, hands, wakes)

    settling._ojs_wrapped = True  # type: ignore[attr-defined]
    broker.consume = settling
    if is_redis(broker):
        replace_on(broker, hands, wakes.wake)
    confirm(broker)


def _bury(broker: Any, inner: Consumer, message: MessageProxy) -> None:
    """Put the message, with its final state, into the broker's dead queue.

    A plain nack moves the bytes as they were enqueued: without the last attempt. It is the fallback.
    """
    if is_rabbitmq(broker) and published_dead(broker, message):
        inner.ack(message)
        return
    inner.nack(message)
    if is_redis(broker):
        enrich(broker, message)


def _give_back(inner: Any, message: MessageProxy) -> None:
    if has_tag(message):
        give_back_tag(inner, message)
    elif shows_dead(inner):
        put_back(inner, encodable(message).encode())
        inner.ack(message)
    else:
        inner.requeue([message])
        forget(inner, message)
