"""Jobs that can neither begin nor end now: the worker keeps them, and tries them again.

RabbitMQ counts how often it delivers a message of a quorum queue, and drops the message at a limit. So a
delivery that has to wait does not go back to its queue: its message stays unacknowledged in the worker's main
process, which hands the same request to the pool again. A worker keeps no more of them than its prefetch
count.

A process of a pool that dies of its worker's stop has used no attempt of its job. Most process managers send
their signal to all processes of a worker, and the processes of a pool die of it.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Container
from functools import partial
from typing import Any, NamedTuple

from billiard.common import EX_SOFTWARE
from billiard.exceptions import WorkerLostError
from celery import Celery, bootsteps, current_app, signals
from celery.apps.worker import Worker
from celery.worker import state

from ..engine.heartbeat import Heartbeat
from ..engine.threads import keep_going
from ..store import Reservation
from . import compat
from .ends import Keep, Kept
from .installation import attach, bridge_of, installation
from .wire import known

logger = logging.getLogger("ojs_bridge")

#: An outage is over when no message has begun to wait for so many seconds.
QUIET = 5.0
#: After how many seconds a message that waits is published anew. RabbitMQ closes the channel of a consumer
#: that keeps a message for half an hour, and counts that as a delivery, too.
LONGEST_WAIT = 600.0
#: The signals that stop a worker, and the status of a process that one strikes while it ends of another.
_STOPPED: set[int] = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, EX_SOFTWARE}
#: How billiard says of what a process died: the process may have handled the signal, and said its number.
_STATUS = re.compile(r"(?:signal|exitcode) (\d+)")
#: For how many seconds a pool's process may know of a stop before the worker's main process does.
AHEAD = 3.0


class _Unsaid(logging.Filter):
    """Leaves out Celery's warning of each rejected job: one line tells of all jobs that wait."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], Keep))


logging.getLogger("celery.app.trace").addFilter(_Unsaid())


class _Waiting(NamedTuple):
    request: Any
    again: Callable[[], object]
    needs_store: bool
    can_be_sent: bool


class RequestKeeping(bootsteps.StartStopStep):  # type: ignore[misc]
    """Keeps requests, and tries each again after a pause; logs when that begins and when it is over."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._consumer = consumer
        self._channel: Any = None
        self._waiting: dict[Any, _Waiting] = {}
        #: Bounded, for the broker may refuse an acknowledgement, which then stays at the head.
        self._acknowledging: deque[tuple[Any, Reservation]] = deque(maxlen=1000)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        #: What is acknowledged, and whose acknowledgement may be on its way: on Redis.
        self._owed: Container[str] = ()
        self._kept_at = self._surely_ours = 0.0
        #: For each process that may have died of this worker's stop: what gives its job back, and judges it.
        self._dead: dict[Callable[[], object], Callable[[], object]] = {}
        self._outage = attach(consumer.app).engine.outage
        self._running = installation(consumer.app).running
        installation(consumer.app).keepers.add(self)

    def start(self, consumer: Any) -> None:
        """Keep what comes on the channel of this connection."""
        with self._lock:
            self._channel = consumer.task_consumer.channel
            self._owed = getattr(getattr(self._channel, "qos", None), "ojs_owed", ())
            self._surely_ours = installation(consumer.app).source.visibility_timeout / 2

    def stop(self, _: Any) -> None:
        """Forget all requests: their connection ends, and the broker delivers the messages again."""
        for give_back in tuple(self._dead):
            self._conclude(give_back)
        with self._lock:
            self._channel = None
            self._waiting.clear()
            self._acknowledging.clear()
            attach(self._consumer.app).engine.reservations.lost_connection()

    def shutdown(self, consumer: Any) -> None:
        """Give back what still runs in this process, which a cold shutdown ends now."""
        if is_cold() and isinstance(consumer.controller, Worker):
            attach(consumer.app).engine.reservations.give_back()

    def forget(self, request: Any, reservation: Reservation) -> None:
        """Let the store forget the reservation of an acknowledged message that surely has no copy.

        A copy may lie in another worker for as long as that worker's jobs last. There is none if this worker
        was the first to get the message, has had no other connection since, and has acknowledged it long
        before its visibility timeout was over. Celery's acknowledgement follows a moment later, so that each
        call asks about those before it.
        """
        message = request.message
        with self._lock:
            is_first = self._has(request) and not message.delivery_info.get("redelivered")
            if is_first and time.monotonic() - request.ojs.at < self._surely_ours:
                self._acknowledging.append((message, reservation))
            while self._acknowledging and self._acknowledging[0][0].acknowledged:
                if self._acknowledging[0][0].delivery_tag in self._owed:
                    break
                attach(self._consumer.app).engine.reservations.acknowledged(self._acknowledging.popleft()[1])

    def take_left(self, request: Any, result: Any) -> bool:
        """Forget a run that has left its place in the pool; False if its job waits here, or runs anew."""
        with self._lock:
            is_left = self._running.get(request) is result and request not in self._waiting
            if is_left:
                del self._running[request]
        return is_left

    def keep(self, request: Any, why: Kept, again: Callable[[], object] | None = None) -> bool:
        """Keep a request, and later call `again` or hand it to the pool; False if it cannot be kept."""
        with self._lock:
            if not (self._has(request) and self._tries_again(why)):
                return False
            # Among those that wait for a free process of the pool.
            request.time_start = request.worker_pid = None
            compat.active_requests(state).discard(request)
            compat.task_reserved(state)(request)
            again = again or partial(compat.call_soon(self._consumer), self._hand_over, request)
            can_be_sent = why.outcome is None and why.needs_store
            self._waiting[request] = _Waiting(request, again, why.needs_store, can_be_sent)
            self._running.pop(request, None)
            self._kept_at = time.monotonic()
        return True

    def await_stop(self, give_back: Callable[[], object], judge: Callable[[], object]) -> None:
        """Call `give_back` for a process that died, if this worker is told to stop soon; else `judge`."""
        self._dead[give_back] = judge
        if is_stopping():
            self._conclude(give_back)
        else:
            late = threading.Timer(AHEAD, self._conclude, (give_back,))
            late.daemon = True
            try:
                late.start()
            except RuntimeError:
                # For want of memory or of threads.
                self._conclude(give_back)

    def _conclude(self, give_back: Callable[[], object]) -> None:
        judge = self._dead.pop(give_back, None)
        if judge is not None:
            (give_back if is_stopping() else judge)()

    def _tries_again(self, why: Kept) -> bool:
        """Let a thread try what waits; False if none can be started, for want of memory or of threads."""
        if self._thread is None:
            try:
                self._thread = keep_going("ojs-keeping", partial(self._round, why))
            except RuntimeError:
                logger.exception("jobs go back to their queues: none can wait here")
                return False
        return True

    def _has(self, request: Any) -> bool:
        """Return whether a request's message is still this worker's."""
        return self._channel is not None and request.message.channel is self._channel

    def _hand_over(self, request: Any) -> None:
        with self._lock:
            kept = self._has(request)
        if kept:
            compat.on_task_request(self._consumer)(request)

    def _round(self, why: Kept) -> bool:
        if self._is_over():
            return False
        self._outage.wait(Keep(why), lambda: False)
        self._try_again()
        return True

    def _is_over(self) -> bool:
        is_quiet = not self._waiting and time.monotonic() - self._kept_at >= QUIET
        # What waited may be gone with the worker's connection, while the store is still away.
        if not is_quiet or not (is_stopping() or attach(self._consumer.app).engine.store_answers()):
            return False
        with self._lock:
            if self._waiting:
                return False
            self._thread = None
        if not is_stopping():
            self._outage.over()
        return True

    def _try_again(self) -> None:
        """Try the requests that wait; the store is asked once for all that need it."""
        with self._lock:
            all_waiting = tuple(self._waiting.values())
        needy = any(waiting.needs_store for waiting in all_waiting)
        answers = needy and attach(self._consumer.app).engine.store_answers()
        for waiting in all_waiting:
            if answers or not waiting.needs_store:
                self._retry(waiting)
            elif waiting.can_be_sent and time.monotonic() - waiting.request.ojs.kept_at > LONGEST_WAIT:
                self._send(waiting)

    def _retry(self, waiting: _Waiting) -> None:
        if self._takes_out(waiting):
            try:
                waiting.again()
            except Exception:
                logger.exception("job %s: its message stays unacknowledged", known(waiting.request))

    def _takes_out(self, waiting: _Waiting) -> bool:
        with self._lock:
            self._running.pop(waiting.request, None)
            return self._waiting.pop(waiting.request, None) is not None

    def _send(self, waiting: _Waiting) -> None:
        """Publish a message anew; if that fails, it waits on."""
        if self._takes_out(waiting) and not waiting.request.ojs_send_on():
            with self._lock:
                if self._has(waiting.request):
                    self._waiting[waiting.request] = waiting


def keep(app: Celery, request: Any, why: Kept, again: Callable[[], object] | None = None) -> bool:
    """Let an app's worker keep a request; False if the worker stops, or the broker has the message back."""
    return any(keeper.keep(request, why, again) for keeper in tuple(installation(app).keepers))


def await_stop(app: Celery, give_back: Callable[[], object], judge: Callable[[], object]) -> None:
    """Judge the death of a process, unless its worker is told to stop: then its job is given back."""
    keeper = next(iter(installation(app).keepers), None)
    if keeper is None:
        judge()
    else:
        keeper.await_stop(give_back, judge)


def is_stopping() -> bool:
    """Return whether this worker was told to stop."""
    return is_cold() or _is_set(compat.should_stop(state))


def is_cold() -> bool:
    """Return whether this worker was told to stop without waiting for its jobs."""
    return _is_set(compat.should_terminate(state))


def _is_set(flag: int | bool | None) -> bool:
    """Return whether a flag of Celery's is set; it may be the exit status 0."""
    return flag is not None and flag is not False


def note_stop(worker: Any, heart: Heartbeat) -> None:
    """Let the store know when a worker is told to stop: it may be killed before its jobs end."""
    soft: list[bool] = []
    heart.note_stop(lambda: bool(soft) or is_stopping())
    softly = getattr(worker, "wait_for_soft_shutdown", None)
    if softly:  # Celery 5.5; it says that it stops when this wait is over

        def wait() -> None:
            soft.append(True)
            softly()

        worker.wait_for_soft_shutdown = wait


def may_be_of_a_stop(died: BaseException) -> bool:
    """Return whether a process may have died of its worker's stop, by the error that tells of its death.

    A cold shutdown ends the processes in several ways.
    """
    status = _STATUS.search(str(died)) if isinstance(died, WorkerLostError) else None
    return is_cold() or (status is not None and int(status[1]) in _STOPPED)


def _let_listeners_finish(**_: Any) -> None:
    bridge = bridge_of(compat.get_current_object(current_app)())
    if bridge is not None:
        bridge.flush()


signals.worker_process_shutdown.connect(_let_listeners_finish, weak=False)
signals.worker_shutdown.connect(_let_listeners_finish, weak=False)
