"""The consumer under the bridge: a delivery is acknowledged, kept or given back as it is marked."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from dramatiq import Message
from dramatiq.broker import Consumer, MessageProxy
from dramatiq.common import dq_name
from dramatiq.errors import ConnectionClosed

from ..engine.engine import Engine
from ..engine.reservations import Reservations
from ..engine.runs import Lost, Run
from ..engine.storage_retry import is_of_process
from ..errors import StoreError
from . import compat
from .brokers import AnyBroker, kind_of
from .delivery import DELAYED_AS, ENDING, NATIVE, Delivery, Ended, Ending, Exit, delivery_of, publication
from .on_redis import forget
from .receiving import Take, Wake
from .translate import bare_job, error_in_words, redis_outages

logger = logging.getLogger("ojs_bridge")

#: Acknowledges a message on its broker.
Ack: TypeAlias = Callable[[MessageProxy], None]
#: Keeps a delayed message in another place; returns whether it is there.
TakeOver: TypeAlias = Callable[[Message[Any]], bool]
#: How many seconds a job waits before it is given back, so that a lasting error does not spin.
LATER_SECONDS = 1.0


class SettlingConsumer(Consumer):
    """Settles a message as the bridge has marked it, and an unmarked message as Dramatiq does."""

    def __init__(
        self,
        inner: Consumer,
        kind: AnyBroker,
        queue_name: str,
        wake: Wake,
        reservations: Reservations,
        takes_over: TakeOver | None = None,
    ) -> None:
        self._inner = inner
        self._kind = kind
        self._reservations = reservations
        self.queue_name = queue_name
        thread, take = threading.current_thread(), inner.__next__
        if isinstance(thread, compat.ConsumerThread):
            take = kind.taking(inner, thread, queue_name, wake)
        self._take = _sound(kind, inner, queue_name, take)
        self._is_delayed = queue_name == dq_name(queue_name)
        self._takes_over = takes_over if self._is_delayed else None
        self._wake = wake
        # A fleet's own `do_ack` is called for each message.
        self._acks = None if hasattr(type(kind.broker), compat.do_ack.name) else kind.acks

    def ack(self, message: MessageProxy) -> None:
        """Settle as marked, or acknowledge; other threads do that for most messages."""
        acks, exit_ = self._acks, getattr(message.ojs_delivery, "exit", NATIVE)
        if acks is None or exit_ not in acks.exits or compat.do_ack.name in vars(self._kind.broker):
            self._settle(message, self._inner.ack)
            return
        if acks.pending() < compat.redis_prefetch(self._inner, 0):
            # Its thread is free: what only waits for its acknowledgement keeps no other message away.
            forget(self._inner, message)
            self._wake.freed(self._inner)
        if self._is_delayed and exit_ is NATIVE:
            # Its thread delays it no more, and before it is acknowledged it is no stray.
            self._kind.hands.take(message, is_delayed=False)
        acks.send(Ended(message, self))
        # Else the watch would take it for one that its thread has left.
        delivery_of(message).is_settled = True

    def nack(self, message: MessageProxy) -> None:
        """Move to the dead queue, or settle as marked."""
        self._settle(message, self._inner.nack)

    def _settle(self, message: MessageProxy, otherwise: Ack) -> None:
        delivery = delivery_of(message)
        if delivery.consumer is not None and delivery.consumer is not self._inner:
            # RabbitMQ counts delivery tags per channel: on the new channel this tag is of another message.
            if delivery.ending:
                Ending.settle_all([delivery.ending])
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
        if self._kind.acks and not (delivery.consumer or delivery.is_given_back):
            self._kind.hands.put(message)
            self._wake.freed(self._inner)
        delivery.is_settled = True

    def acknowledge(self, message: MessageProxy) -> None:
        """Acknowledge a message whose run is settled; never raises."""
        try:
            self._settle(message, self._inner.ack)
        except Exception as error:  # noqa: BLE001 - a fleet's own consumer may raise anything
            logger.warning("job %s: not acknowledged: %s", bare_job(message), error_in_words(error))

    def acknowledged(self, message: MessageProxy, is_gone: bool) -> None:
        """Hear that a message is gone from Redis, or else is another worker's."""
        self._kind.hands.put(message)
        forget(self._inner, message)
        self._wake.freed(self._inner)
        if is_gone and (ending := delivery_of(message).ending):
            ending.acknowledged()

    def _carry_out(self, delivery: Delivery, message: MessageProxy, otherwise: Ack) -> None:
        run = delivery.admission.run if isinstance(delivery.admission, Lost) else delivery.admission
        heart = self._reservations.heart
        reserved = run.reservation if isinstance(run, Run) and delivery.exit is not ENDING else None
        if heart and reserved and heart.holds(reserved):
            # Something has broken in before it was settled.
            heart.abandon(reserved)
        match delivery.exit:
            case Exit.ENDING if delivery.ending:
                Ending.settle_all([delivery.ending])
                otherwise(message)
            case Exit.DROP if delivery.is_replaced:
                forget(self._inner, message)
            case Exit.DROP if self._kind.shows_dropped:
                # A unit test finds the failed message there, and `join` raises its error.
                otherwise(message)
            case Exit.DROP:
                self._inner.ack(message)
            case Exit.DEAD:
                self._kind.bury(self._inner, message)
            case Exit.LATER | Exit.NOT_YET:
                time.sleep(LATER_SECONDS)
                self._give_back(delivery, message)
            case Exit.GIVE_BACK:
                self._give_back(delivery, message)

    def _give_back(self, delivery: Delivery, message: MessageProxy) -> None:
        if delivery.is_given_back and message in self._kind.hands:
            # An earlier try failed half-way: the message went back, came again, and runs as another delivery.
            return
        delivery.is_given_back = True
        # First, or this process might fetch the message again, and take it for this delivery.
        self._kind.hands.put(message)
        self._kind.give_back(self._inner, message)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Give prefetched messages back; raises ConnectionClosed after any error."""
        given = list(messages)
        for message in given:
            self._kind.hands.put(message)
        with _closing():
            self._kind.requeue(self._inner, given)

    def __iter__(self) -> Any:
        return self if self._is_delayed or self._kind.is_noted else iter(self._inner)

    def __next__(self) -> MessageProxy | None:
        message = self._take()
        if message is None:
            return None
        kind, is_delayed = self._kind, self._is_delayed
        if kind.is_noted and not kind.received(self._inner, message, is_delayed=is_delayed):
            return None
        if self._takes_over and self._takes_over(compat.message_in(message)):
            # Its thread looks meanwhile whether it is to stop, and what else is due.
            self.ack(message)
            return None
        if is_delayed:
            compat.message_in(message).options[DELAYED_AS] = publication(message)
        return message

    def stop_fetching(self) -> None:
        """Leave new messages to other workers. On RabbitMQ this worker still gets its share."""
        # A delayed queue's consumer goes on: by its fetches Redis knows that this worker lives.
        if not self._is_delayed:
            self._kind.stop_fetching(self._inner)

    def close(self) -> None:
        """Close the broker's own consumer, and give back the messages that it has fetched and not handed out.

        Raises ConnectionClosed after any error: another error would end Dramatiq's thread.
        """
        try:
            with _closing():
                self._kind.close(self._inner, self.queue_name)
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


def wrap(broker: Any, engine: Engine, takes_over: TakeOver | None = None) -> None:
    """Make a broker hand out consumers under the bridge, and RabbitMQ confirm publications; works once.

    `takes_over` is asked of each delayed message whether the store has it now.
    """
    consume = broker.consume
    if getattr(consume, "_ojs_wrapped", False):
        return

    kind = kind_of(broker)

    def settling(*args: Any, **kwargs: Any) -> Consumer:
        queue_name = args[0] if args else kwargs["queue_name"]
        kind.consuming(queue_name)
        wake = kind.wakes.setdefault(queue_name, Wake())
        inner = consume(*args, **kwargs)
        return SettlingConsumer(inner, kind, queue_name, wake, engine.reservations, takes_over)

    def woken(queue_name: str) -> None:
        if wake := kind.wakes.get(queue_name):
            wake.set()

    settling._ojs_wrapped = True  # type: ignore[attr-defined]
    broker.consume = settling
    kind.boot(woken, engine.outage)
    kind.confirm()


def _sound(kind: AnyBroker, inner: Consumer, queue_name: str, take: Take) -> Take:
    """Return a `take` that leaves out the messages that no worker can run."""
    passes: tuple[type[Exception], ...] = (StopIteration, *kind.outages)

    def take_sound() -> MessageProxy | None:
        try:
            message = take()
        except passes:
            raise
        except Exception as error:
            if not kind.has_put_away(queue_name, error):
                raise
            return None
        if message is None or (flaw := kind.flaw(compat.message_in(message), queue_name)) is None:
            return message
        kind.leave(inner, queue_name, message, flaw)
        return None

    return take_sound
