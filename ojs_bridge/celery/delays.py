"""A job that its user delays, or sends in a transaction: its producer writes it to the store.

If the producer of a delayed job does not, its first worker does.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from celery import Celery, Task
from celery.app.task import Context
from celery.signals import task_revoked
from celery.utils.time import maybe_iso8601, maybe_make_aware
from celery.worker.state import revoked
from kombu.connection import Connection
from kombu.serialization import loads

from ..adapters import parameters_of
from ..bridge import Bridge
from ..engine.events import harmless
from ..engine.layers import TaskPolicy
from ..engine.runs import Run, run_of
from ..engine.storing import Keeping, cancel, job_of_parked
from ..errors import ConfigurationError, InvalidRetryPolicy, InvalidState, StoreError
from ..messages import CREATED, HEADER, IN_OPTION, OUTBOX_OPTION
from ..rules.decision import later
from ..rules.job import Job, decoded
from ..store import Parked, Transaction
from . import compat
from . import wire as wires
from .brokers import Broker
from .wire import NAME, Outgoing, Wire
from .wish import Caught

logger = logging.getLogger("ojs_bridge")


@dataclass
class Delays:
    """The delays of one app: `countdown=` and `eta=`, beyond the bridge's `park_after`."""

    app: Celery
    bridge: Bridge
    broker: Callable[[], Broker]
    policy: Callable[[Task | None], TaskPolicy]
    #: What `install` says of them, and of jobs in a transaction; None leaves it to the bridge.
    parks: bool | None = None
    outbox: bool | None = None

    def way(self, send_task: Callable[..., Any], name: str, options: dict[str, Any]) -> Callable[..., Any]:
        """Return what sends a job: to the store in a transaction, to the store until a time, or `send_task`.

        Raises ValueError for an `eta` that is no time, NotInTransaction, and ConfigurationError. Celery
        itself says what is wrong with a `countdown`, and sends the retries of a task that it retries.
        """
        transaction = self._transaction(name, options)
        engine, eta, countdown = self.bridge.engine, options.get("eta"), options.get("countdown")
        is_delayed = (eta or countdown) and not options.get("retries") and self.are_parked(name)
        if transaction is None and not is_delayed:
            return send_task
        if self._is_elsewhere(options):
            if transaction is not None:
                raise ConfigurationError(f"{name}: a job of a transaction goes to the broker of its app only")
            return send_task
        at: datetime | None = None
        with suppress(TypeError, OverflowError):
            if countdown:
                at = engine.now() + timedelta(seconds=countdown)
            elif eta:
                at = _instant(self.app, eta)
        is_late = at is not None and engine.storing.parks(at)
        if transaction is not None or (is_late and not self._is_outside(name, options)):
            return partial(self.park, at, transaction, send_task)
        return send_task

    def _is_outside(self, name: str, options: dict[str, Any]) -> bool:
        """Return whether the canary leaves a job to Celery, which a job without an id gets for that."""
        if (outside := self._outside_of(name)) is None:
            return False
        options["task_id"] = options.get("task_id") or str(uuid.uuid4())
        return bool(outside.has({**(options.get("headers") or {}), "id": options["task_id"]}))

    def _outside_of(self, name: str) -> Any:
        return getattr(compat.task_in(compat.tasks(self.app), name), "ojs_outside", None)

    def _is_elsewhere(self, options: Mapping[str, Any]) -> bool:
        """Return whether a job is sent to another broker than its app's, where the store's jobs go."""
        producer = options.get("producer") or options.get("publisher")
        given = options.get("connection") or getattr(producer, "connection", None)
        if given is None:
            return False
        own = self.app.connection_for_write()
        if not isinstance(given, Connection) or given.alt != own.alt:
            return True
        return not own.alt and given.as_uri() != own.as_uri()

    def _transaction(self, name: str, options: dict[str, Any]) -> Transaction | None:
        """Return the transaction in which a job is sent, as it, its task, its app or its bridge says."""
        outbox, given = self.bridge.engine.outbox, options.pop(IN_OPTION, None)
        if given is not None:
            return outbox.join(given)
        task = compat.task_in(compat.tasks(self.app), name)
        said = getattr(task, OUTBOX_OPTION, None)
        if said is None:
            said = self.bridge.settings.outbox if self.outbox is None else self.outbox
            # A job of a native task that is published twice runs twice.
            said = said and getattr(task, "ojs_bridged", task is None)
        if not said:
            return None
        # A job that goes on is told by an error, which would roll the job back, too.
        goes_on = options.get("retries") or options.get("replaced_task_nesting")
        return None if goes_on else outbox.joined()

    def park(
        self,
        at: datetime | None,
        transaction: Transaction | None,
        send_task: Callable[..., Any],
        name: str,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Send a job to the store, where it waits until a time; return its result as `send_task` does.

        Without a transaction the broker takes it if the store is away. Raises whatever sending raises,
        Unstorable for a message that is too long, and in a transaction StoreError.
        """
        app, engine = self.app, self.bridge.engine
        with app.producer_or_acquire(options.get("producer")) as producer:
            caught = Caught(app, producer, producer.connection)
            ours = {"producer": caught, "publisher": None, "connection": None}
            times = {"eta": at, "countdown": None} if at else {}
            result = send_task(name, *args, **{**options, **ours, **times})
        if (wire := caught.wire) is None:
            return result
        at = at or engine.now()
        # An id that its user has chosen may be that of another job that waits.
        mark, is_chosen = uuid.uuid4().hex, bool(options.get("task_id"))
        run = self._run(wire, mark if is_chosen else "")
        run = run._replace(job=run.job._replace(created_at=engine.now(), publication=mark))
        kept = self._keeping(wire, run.job.type)
        if transaction is not None:
            engine.storing.schedule(run, at, NAME, kept, partial(engine.outbox.put, transaction))
        elif wires.is_broadcast(app, {"exchange": wire.exchange}):
            self.broker().publish(Outgoing(wire), engine.now())
        elif header := engine.storing.delay(run, at, NAME, kept):
            # Its whole `eta`: the worker that gets it may have no bridge.
            changes = {HEADER: header.text, "eta": at.isoformat()}
            self.broker().publish(Outgoing(wire, changes), engine.now(), at)
        return result

    def take_over(self, message: Any) -> bool:
        """Park a job that a worker gets long before its time; return whether its message can go.

        Its producer has no bridge, or no store. If the store is away, the job waits in the worker, as
        natively.
        """
        headers = message.headers
        eta, name = headers.get("eta"), str(headers.get("task"))
        if not eta or headers.get("retries") or headers.get("id") in revoked or not self.are_parked(name):
            return False
        outside = self._outside_of(name)
        if (at := wires.time_in(self.app, eta)) is None or (outside and outside.has(headers)):
            return False
        storing = self.bridge.engine.storing
        parts = wires.carried(message, message.body, None, self.app)
        wire = wires.delivered(self.app, parts, message.properties or {}, message.delivery_info or {})
        # A copy of the message has the same chain; another message under its id has another time.
        chain = hashlib.blake2b(str(eta).encode(), digest_size=8).hexdigest()
        try:
            run = self._run(wire, chain)
            if run.job.fence:
                return False
            # What the bridge itself has sent on may come sooner than its user wants it.
            at = run.job.next_retry_at or at
            if run.job.next_retry_at is None:
                # Wherever it waits, another worker may have taken over a copy of it.
                headers[HEADER] = storing.header(run.job.waiting(later(at, 0))).text
            return storing.takes_over(run, at, NAME, self._keeping(wire, name))
        except (StoreError, InvalidState, InvalidRetryPolicy) as error:
            logger.warning("job %s waits in this worker, not in the store: %r", headers.get("id"), error)
            return False

    def revoke(self, job_ids: Iterable[str]) -> None:
        """Delete the jobs of these ids that wait in the store, and store that they are revoked; never raises.

        Workers have heard of the ids before, and drop a message that was published meanwhile.
        """
        if self.bridge.store is None:
            return
        parked = self.bridge.store.parked

        def cancel_all() -> None:
            for job_id in job_ids:
                while (job := parked.get(str(job_id))) and job.framework == NAME:
                    if not cancel(self.bridge.engine.context, job):
                        break  # a worker publishes it at this moment
                    harmless(job_of_parked(job), self._tell_revoked, job)

        try:
            self.bridge.engine.storing.away.try_once(cancel_all)
        except StoreError as error:
            logger.warning("jobs that are revoked may wait in the store: %r", error)

    def _tell_revoked(self, job: Parked) -> None:
        """Store that a job is revoked, and count it in its chord, as a worker that gets its message does."""
        wire = wires.from_json(job.message)
        task = compat.task_in(compat.tasks(self.app), job.type)
        *_, embed = loads(wire.body, wire.content_type, wire.content_encoding)
        request = Context(wire.headers, chord=embed.get("chord"))
        backend = task.backend if task else self.app.backend
        backend.mark_as_revoked(job.id, "revoked", request, not request.ignore_result)
        if task:
            options = {"request": request, "terminated": False, "signum": None, "expired": False}
            task_revoked.send(sender=task, **options)

    def are_parked(self, name: str) -> bool:
        """Return whether the delays of a task are parked: the task says so, or its app, or the bridge.

        A task that this process knows, and that is not under the bridge, keeps Celery's own delays.
        """
        task = compat.task_in(compat.tasks(self.app), name)
        if self.bridge.store is None or not getattr(task, "ojs_bridged", task is None):
            return False
        says = getattr(task, "ojs_park_delays", None), self.parks, self.bridge.settings.park_delays
        return next(said for said in says if said is not None)

    def _run(self, wire: Wire, chain: str) -> Run:
        """Return the run that a message is for; raises InvalidState and InvalidRetryPolicy."""
        headers, app = wire.headers, self.app
        bare = Job(
            str(headers.get("id")),
            str(headers.get("task")),
            wire.queue,
            created_at=wires.time_in(app, headers.get(CREATED)),
            expires=wires.time_in(app, headers.get("expires")),
        )
        task = self.policy(compat.task_in(compat.tasks(app), bare.type))
        return run_of(decoded(headers.get(HEADER), bare), chain, task)

    def _keeping(self, wire: Wire, name: str) -> Keeping:
        task = compat.task_in(compat.tasks(self.app), name)
        parameters = parameters_of(task.run) if task else ()
        return lambda header: Outgoing(wire, {HEADER: header.text}, parameters, keeps_eta=True).kept()


def _instant(app: Celery, eta: Any) -> datetime:
    """Return the one instant of an `eta`; a time without a zone is in UTC, as for Celery.

    A time that a change of clocks leaves out is counted on from before the change: it is never early.
    """
    try:
        at: datetime = maybe_make_aware(maybe_iso8601(eta), app.timezone)
        return at.astimezone(timezone.utc)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"eta: {eta!r} must be a datetime or an ISO 8601 time") from error
