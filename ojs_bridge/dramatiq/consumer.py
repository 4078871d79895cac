"""The consumer under the bridge: a delivery is acknowledged, kept or given back as it is marked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from uuid import uuid4

from dramatiq.broker import Broker, Consumer, MessageProxy
from dramatiq.common import dq_name
from dramatiq.errors import ConnectionClosed

from ..engine.reservations import UNTOLD, Reservations
from ..engine.runs import Lost, Run
from ..engine.storage_retry import is_of_process
from ..errors import StoreError
from . import compat
from .brokers import (
    confirm,
    error_in_words,
    give_back,
    is_known,
    is_rabbitmq,
    is_redis,
    published_dead,
    redis_errors,
    redis_outages,
)
from .delivery import DELAYED_AS, ENDING, NATIVE, Delivery, Exit, delivery_of, publication
from .on_redis import Acknowledgements, Hands, enrich, forget, replace_on
from .receiving import Wake, readable, sound, taking
from .translate import bare_job, encodable

logger = logging.getLogger("ojs_bridge")

#: Acknowledges a message on its broker.
Ack: TypeAlias = Callable[[MessageProxy], None]
#: How many seconds a job waits before it is given back, so that a lasting error does not spin.
HOLD_SECONDS = 1.0


class SettlingConsumer(Consumer):
    """Settles a message as the bridge has marked it, and an unmarked message as Dramatiq does."""

    def __init__(
        self,
        inner: Consumer,
        broker: Broker,
        queue_name: str,
        hands: Hands,
        wake: Wake,
        acks: Acknowledgements | None,
        reservations: Reservations,
    ) -> None:
        self._inner = inner
        self._broker = broker
        self._hands = hands
        self._reservations = reservations
        self._queue_name = queue_name
        self._take = sound(broker, inner, queue_name, taking(broker, inner, queue_name, wake, hands))
        self._is_delayed = queue_name == dq_name(queue_name)
        self._takes = is_redis(broker)
        self._wake = wake
        self._is_tagged = is_rabbitmq(broker)
        self._is_untold = not is_known(broker)
        if not self._is_tagged:
            self.__dict__["ack"] = self._straight(inner.ack, acks)

    def ack(self, message: MessageProxy) -> None:
        """Acknowledge, or settle as marked."""
        self._settle(message, self._inner.ack)

    def _straight(self, acknowledge: Ack, acks: Acknowledgements | None) -> Ack:
        """Return an `ack` that only looks at the mark of a message: every job comes by here."""
        settle, acknowledged = self._settle, self._acknowledged
        # A fleet's own `do_ack` is called for each message.
        name, own = compat.do_ack.name, vars(self._broker)
        lots = None if hasattr(type(self._broker), name) else acks

        def ack(message: MessageProxy) -> None:
            delivery: Delivery | None = message.ojs_delivery
            lot = None if name in own else lots
            if delivery is not None and delivery.exit is not NATIVE:
                if lot is None or delivery.exit is not ENDING:
                    settle(message, acknowledge)
                    return
            elif lot is None:
                if acks is None:
                    acknowledge(message)
                    # Else the watch would take it for one that its thread has left.
                    delivery_of(message).is_settled = True
                else:
                    settle(message, acknowledge)
                return
            try:
                lot.send(message, acknowledged)
            except (*redis_errors(), MemoryError, RecursionError) as error:  # type: ignore[misc]
                # Whatever the error is: Dramatiq would give up, and others have left theirs to this thread.
                raise ConnectionClosed(error) from None
            if delivery is not None:
                delivery.is_settled = True

        return ack

    def nack(self, message: MessageProxy) -> None:
        """Move to the dead queue, or settle as marked."""
        self._settle(message, self._inner.nack)

    def _settle(self, message: MessageProxy, otherwise: Ack) -> None:
        delivery = delivery_of(message)
        if delivery.consumer is not None and delivery.consumer is not self._inner:
            # RabbitMQ counts delivery tags per channel: on the new channel this tag is of another message.
            if delivery.ending:
                delivery.ending.settle()
            logger.warning("job %s: its connection is gone, RabbitMQ delivers it again", bare_job(message))
            return
        try:
            if delivery.exit is NATIVE:
                otherwise(message)
            else:
                self._carry_out(delivery, message, otherwise)
        except Exception as error:
            # After any other error Dramatiq leaves the message where no worker takes it.
            if isinstance(error, (StoreError, *redis_outages())) or is_of_process(error):
                raise ConnectionClosed(error) from None
            raise
        if self._takes and not delivery.is_given_back:
            self._put(message)
        delivery.is_settled = True

    def _acknowledged(self, gone: list[MessageProxy], others: list[MessageProxy]) -> None:
        for message in (*gone, *others):
            self._hands.put(message)
            forget(self._inner, message)
        for message in gone:
            if ending := delivery_of(message).ending:
                ending.acknowledged()
        self._wake.freed(self._inner)

    def _put(self, message: MessageProxy) -> None:
        self._hands.put(message)
        self._wake.freed(self._inner)

    def _carry_out(self, delivery: Delivery, message: MessageProxy, otherwise: Ack) -> None:
        run = delivery.begun.run if isinstance(delivery.begun, Lost) else delivery.begun
        heart = self._reservations.heart
        reserved = run.reservation if isinstance(run, Run) and delivery.exit is not ENDING else None
        if heart and reserved and heart.holds(reserved):
            # Something has broken in before it was settled.
            heart.abandon(reserved)
        match delivery.exit:
            case Exit.ENDING if delivery.ending:
                delivery.ending.settle()
                otherwise(message)
            case Exit.DROP if delivery.is_replaced:
                forget(self._inner, message)
            case Exit.DROP if hasattr(self._inner, compat.dead_letters.name):
                # StubBroker: a unit test finds the failed message there, and `join` raises its error.
                otherwise(message)
            case Exit.DROP:
                self._inner.ack(message)
            case Exit.DEAD:
                _bury(self._broker, self._inner, message)
            case Exit.HOLD | Exit.UNBEGUN:
                time.sleep(HOLD_SECONDS)
                self._give_back(delivery, message)
            case Exit.GIVE_BACK:
                self._give_back(delivery, message)

    def _give_back(self, delivery: Delivery, message: MessageProxy) -> None:
        if delivery.is_given_back and message in self._hands:
            # An earlier try failed half-way: the message went back, came again, and runs as another delivery.
            return
        delivery.is_given_back = True
        # First, or this process might fetch the message again, and take it for this delivery.
        self._hands.put(message)
        _give_back(self._inner, message)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Give prefetched messages back; raises ConnectionClosed after any error."""
        given = list(messages)
        for message in given:
            self._hands.put(message)
        with _closing():
            if hasattr(self._inner, compat.dead_letters.name):
                # A broker in memory would forget them.
                for message in given:
                    _give_back(self._inner, message)
            else:
                self._inner.requeue(given)

    def __iter__(self) -> Any:
        # A broker in memory loses no connection: its deliveries without a delay need no notes.
        if self._takes or self._is_tagged or self._is_delayed or self._is_untold:
            return self
        return iter(self._inner)

    def __next__(self) -> MessageProxy | None:
        message = self._take()
        if message is not None:
            if self._is_tagged:
                message.ojs_delivery = Delivery(self._inner, time.monotonic())  # type: ignore[attr-defined]
            elif self._takes and not self._hands.take(message, is_delayed=self._is_delayed):
                return None
            if self._is_untold:
                setattr(message, compat.redelivered.name, UNTOLD)
            if self._is_delayed:
                compat.message_in(message).options[DELAYED_AS] = publication(message)
        return message

    def stop_fetching(self) -> None:
        """Leave new messages to other workers. On RabbitMQ this worker still gets its share."""
        if self._takes and not self._is_delayed:
            # The consumer of the delayed queue goes on: by its fetches Redis knows that this worker lives.
            compat.redis_prefetch.set(self._inner, 0)

    def close(self) -> None:
        """Close the broker's own consumer, and give back the messages that it has fetched and not handed out.

        Raises ConnectionClosed after any error: another error would end Dramatiq's thread.
        """
        fetched = compat.message_cache(self._inner, [])
        compat.message_cache.set(self._inner, [])
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
        logger.warning(
            "a consumer's messages were not given back, they come again: %s", error_in_words(error)
        )
        logger.debug("a consumer's messages were not given back", exc_info=True)
        raise ConnectionClosed(error) from None


def wrap(broker: Any, reservations: Reservations) -> None:
    """Make a broker hand out consumers under the bridge, and RabbitMQ confirm publications; works once."""
    consume = broker.consume
    if getattr(consume, "_ojs_wrapped", False):
        return

    hands, wakes = Hands(), dict[str, Wake]()
    acknowledgements: dict[str, Acknowledgements] = {}

    def settling(*args: Any, **kwargs: Any) -> Consumer:
        queue_name = args[0] if args else kwargs["queue_name"]
        if is_redis(broker):
            try:
                hands.release_strays(broker, queue_name)
            except redis_outages() as error:
                raise ConnectionClosed(error) from None
            acknowledgements.setdefault(queue_name, Acknowledgements(broker, queue_name))
        inner, acks = consume(*args, **kwargs), acknowledgements.get(queue_name)
        wake = wakes.setdefault(queue_name, Wake())
        return SettlingConsumer(inner, broker, queue_name, hands, wake, acks, reservations)

    def woken(queue_name: str) -> None:
        if wake := wakes.get(queue_name):
            wake.set()

    settling._ojs_wrapped = True  # type: ignore[attr-defined]
    broker.consume = settling
    if is_redis(broker):
        # A process that was forked after its broker was made would share what it has fetched with the others.
        compat.worker_id.set(broker, str(uuid4()))
        replace_on(broker, hands, woken)
    confirm(broker)


def _bury(broker: Any, inner: Consumer, message: MessageProxy) -> None:
    """Put a message with its final state into the broker's dead queue.

    If that fails, a plain nack moves the message there as it was enqueued, without the last attempt.
    """
    if is_rabbitmq(broker) and published_dead(broker, message):
        inner.ack(message)
        return
    inner.nack(message)
    if is_redis(broker):
        enrich(broker, message)


def _give_back(inner: Any, message: MessageProxy) -> None:
    if hasattr(message, compat.tag.name):
        give_back(inner, message)
    elif hasattr(inner, compat.dead_letters.name):
        compat.stub_queue(inner).put(encodable(message).encode())
        inner.ack(message)
    else:
        inner.requeue([message])
        forget(inner, message)
