"""A message that its user delays, or sends in a transaction: its producer writes it to the store.

If the producer of a delayed message does not, its first worker does.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import uuid
from collections import OrderedDict
from datetime import datetime, timedelta
from typing import Any

from dramatiq import Actor, Message
from dramatiq.broker import Broker
from dramatiq.common import dq_name, q_name

from ..adapters.terms import Terms
from ..bridge import Bridge
from ..engine.runs import Run, run_of
from ..engine.storing import Keeping
from ..errors import InvalidRetryPolicy, InvalidState, StoreError
from ..messages import HEADER, IN_OPTION, OUTBOX_OPTION
from ..store import Transaction
from .actors import PARK_OPTION, Actors
from .brokers import kind_of
from .compat import REDIS_ID
from .publishing import Outgoing, goes_on, send_on
from .translate import NAME, bare_job, job_of, max_age, time_of

logger = logging.getLogger("ojs_bridge")


class Delays:
    """The delays of one broker: `delay=`, beyond the bridge's `park_after`."""

    def __init__(self, broker: Broker, bridge: Bridge, actors: Actors, terms: Terms) -> None:
        self._broker, self._bridge, self._actors = broker, bridge, actors
        self._terms = terms
        self._outbox = bridge.settings.outbox if terms.outbox is None else terms.outbox

    @property
    def may_park(self) -> bool:
        """Whether delays of this broker may be parked at all."""
        return self._bridge.store is not None and kind_of(self._broker).parks_delays

    def wrap(self) -> None:
        """Let the broker send to the store what is to wait there; all else it sends as before."""
        enqueue = self._broker.enqueue
        unsent = self._actors.unsent = OrderedDict()

        @functools.wraps(enqueue)
        def enqueue_or_park(message: Message[Any], **options: Any) -> Message[Any]:
            own = message.message_id
            is_fresh = isinstance(own, str) and unsent.pop(own, None) == os.getpid()
            delay, transaction = options.get("delay"), self._transaction(message)
            if transaction is not None:
                rest = {name: value for name, value in message.options.items() if name != IN_OPTION}
                message = dataclasses.replace(message, options=rest)
                at = self._after(delay) if delay else self._bridge.engine.now()
                return self.park(message, delay, at, is_fresh=is_fresh, transaction=transaction)
            if delay and (until := self.until(message, delay)):
                return self.park(message, delay, until, is_fresh=is_fresh)
            return enqueue(message, **options)

        self._broker.enqueue = enqueue_or_park  # type: ignore[method-assign]

    def until(self, message: Message[Any], delay: Any) -> datetime | None:
        """Return until when a message that is sent now waits in the store; None if the broker takes it.

        Raises ValueError for a delay that ends at no time. Dramatiq itself says what is wrong with one that
        is no number.
        """
        options = message.options
        if goes_on() or not self.may_park or "eta" in options or "retries" in options:
            return None
        if not self._are_parked(message):
            return None
        try:
            at = self._after(delay)
        except TypeError:
            return None
        return at if self._bridge.engine.storing.parks(at) else None

    def _after(self, delay: Any) -> datetime:
        try:
            return self._bridge.engine.now() + timedelta(milliseconds=delay)
        except (OverflowError, ValueError):
            raise ValueError(
                f"delay: {delay!r} must be milliseconds until a time before the year 10000"
            ) from None

    def _transaction(self, message: Message[Any]) -> Transaction | None:
        """Return the transaction in which a message is sent, as it, its actor, its broker or its bridge says.

        Raises NotInTransaction, and ConfigurationError.
        """
        outbox, given = self._bridge.engine.outbox, message.options.get(IN_OPTION)
        if given is not None:
            return outbox.join(given)
        actor = self._broker.actors.get(message.actor_name)
        said = actor.options.get(OUTBOX_OPTION) if actor else None
        if said is None and (said := self._outbox) and actor is not None:
            # A message of a native actor that is published twice runs twice.
            said = self._actors.task_of(message) is not None
        return outbox.joined() if said and not goes_on() and "retries" not in message.options else None

    def park(
        self,
        message: Message[Any],
        delay: Any,
        at: datetime,
        *,
        is_fresh: bool,
        transaction: Transaction | None = None,
    ) -> Message[Any]:
        """Send a message to the store, where it waits until a time; return it as the broker returns it.

        The middleware hears of it as of any message. Without a transaction the broker takes it if the store
        is away. Raises what the middleware and the encoder raise, Unstorable for a message that is too long,
        and in a transaction StoreError.
        """
        broker, engine = self._broker, self._bridge.engine
        told = message
        if delay:
            eta = int(at.timestamp() * 1000)
            told = message.copy(queue_name=dq_name(message.queue_name), options={"eta": eta})
        broker.emit_before("enqueue", told, delay)
        told.encode()
        # Another job may have been sent under the same id, and a job of a fresh id may be sent again.
        own = uuid.uuid4().hex
        run, plain = self._run(told, "" if is_fresh else own)
        run = run._replace(job=run.job._replace(publication=own))
        kept = self._keeping(plain)
        if transaction is not None:
            put = functools.partial(engine.outbox.put, transaction)
            engine.storing.schedule(run, at, NAME, kept, put)
        elif header := engine.storing.delay(run, at, NAME, kept):
            send_on(engine, broker, None, plain.copy(options={HEADER: header.state}), at)
            return told
        broker.emit_after("enqueue", told, delay)
        return told

    def take_over(self, message: Message[Any]) -> bool:
        """Park a message that a worker gets long before its time; return whether it can go.

        Its producer has no bridge, or the store was away. If it is away, the message waits in the worker, as
        natively.
        """
        options, storing = message.options, self._bridge.engine.storing
        at = time_of(options.get("eta"))
        if at is None or "retries" in options or not self._are_parked(message):
            return False
        try:
            # Each copy of the message has the same chain, and no other message under its id; but on RabbitMQ
            # one that was sent in the same millisecond is taken for a copy.
            words = f"{options['eta']} {message.message_timestamp} {options.get(REDIS_ID)}"
            run, plain = self._run(message, hashlib.blake2b(words.encode(), digest_size=8).hexdigest())
            at = run.job.next_retry_at or at
            if run.job.fence or at - (run.job.created_at or at) <= storing.park_after:
                return False
            # Wherever it waits, another worker may have taken over a copy of it.
            options[HEADER] = storing.header(run.job.waiting(at)).state
            return storing.takes_over(run, at, NAME, self._keeping(plain))
        except (StoreError, InvalidState, InvalidRetryPolicy) as error:
            logger.warning("job %s waits in this worker, not in the store: %r", message.message_id, error)
            return False

    def _are_parked(self, message: Message[Any]) -> bool:
        """Return whether the delays of an actor are parked: the actor says so, or its broker, or the bridge.

        A job that Dramatiq itself retries keeps Dramatiq's own delays. Of an actor that this process does not
        know only a worker knows that.
        """
        actor = self._broker.actors.get(message.actor_name)
        if actor is not None and self._actors.task_of(message) is None:
            return False
        return self.are_asked_for(actor)

    def are_asked_for(self, actor: Actor[..., Any] | None) -> bool:
        """Return whether an actor, its broker or the bridge asks for parked delays."""
        own = actor.options.get(PARK_OPTION) if actor else None
        says = own, self._terms.park_delays, self._bridge.settings.park_delays
        return next(said for said in says if said is not None)

    def _run(self, delayed: Message[Any], chain: str) -> tuple[Run, Message[Any]]:
        """Return the run that a delayed message is for, and the message as it is sent when it is due.

        A job that has waited before has a chain, or needs none. Raises InvalidState and InvalidRetryPolicy.
        """
        options = {name: value for name, value in delayed.options.items() if name != "eta"}
        plain = dataclasses.replace(delayed, queue_name=q_name(delayed.queue_name), options=options)
        job = job_of(plain, bare_job(plain, max_age(self._broker, plain)))
        task = self._actors.tasks.get(plain.actor_name) or self._actors.undeclared
        return run_of(job, chain, self._actors.of_message(task, plain)), plain

    def _keeping(self, plain: Message[Any]) -> Keeping:
        return lambda header: Outgoing(plain.copy(options={HEADER: header.state}), self._broker).kept()
