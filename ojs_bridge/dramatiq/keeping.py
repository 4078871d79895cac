"""A worker thread keeps a delivery that cannot be begun or ended yet; a stop gives back what the process has.

Where a queue of RabbitMQ has a limit, it drops a message that went back too often. So the thread waits and
tries again, and the prefetch bounds how many messages a worker keeps. Nothing interrupts it meanwhile.

A worker process of Dramatiq's program takes one stop for one, and uses no attempt. Most process managers send
their signal to all processes of a worker, and Dramatiq's main process sends its own to each: the process
hears it twice, which means to Dramatiq that it must end at once. If the process is killed before its jobs
end, the store knows of the stop.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

from dramatiq.broker import Broker, MessageProxy
from dramatiq.middleware import Interrupt, ShutdownNotifications, TimeLimit

from ..engine.engine import Engine
from ..engine.reservations import Reservations, Unanswered
from ..engine.storage_retry import Outage
from ..engine.threads import let_through
from ..errors import StoreError
from . import compat
from .delivery import delivery_of

#: How long a delivery from RabbitMQ is kept at most, in seconds. It is half of RabbitMQ's own
#: `consumer_timeout`, after which RabbitMQ closes the channel and delivers all of its messages again.
KEPT_AT_MOST = 900.0

#: How long a thread waits for a time limit that has struck and not arrived yet, in seconds.
ARRIVAL_SECONDS = 0.25
#: For how many seconds the same stop may be heard again.
ECHO_SECONDS = 2.0
#: How long a process that must end at once waits until its attempts are given back, in seconds.
GIVE_BACK_SECONDS = 3.0
#: What Python calls for a signal.
Handler: TypeAlias = "Callable[[int, FrameType | None], object]"


def is_old(message: MessageProxy) -> bool:
    """Return whether a delivery was kept for as long as it may be kept."""
    since = delivery_of(message).received
    return since is not None and time.monotonic() - since > KEPT_AT_MOST


class GiveUp(Exception):
    """A delivery goes back to its queue unbegun, because its worker shuts down."""


class Keeping:
    """Keeps deliveries of one broker until they can go on."""

    def __init__(self, outage: Outage) -> None:
        #: Keeps a thread from its delivery, or from a decision that has no place.
        self.outage = outage
        self._limits: list[TimeLimit] = []
        self._shutdowns: list[ShutdownNotifications] = []
        self._stopping: list[Any] = []
        #: Whether some worker shuts down.
        self.is_stopping = False

    def boot(self, broker: Broker) -> None:
        """Find the middleware that interrupts the actors of this broker."""
        self._limits = [m for m in broker.middleware if isinstance(m, TimeLimit)]
        self._shutdowns = [m for m in broker.middleware if isinstance(m, ShutdownNotifications)]

    def stop(self, worker: Any) -> None:
        """End the waits of a worker's threads: it shuts down."""
        self._stopping.append(worker)
        self.is_stopping = True

    def stopped(self, worker: Any) -> None:
        """Forget a worker that has shut down."""
        self._stopping.remove(worker)
        self.is_stopping = bool(self._stopping)

    def stops(self) -> bool:
        """Return whether this thread's worker shuts down."""
        return any(threading.current_thread() in compat.worker_threads(worker) for worker in self._stopping)

    def disarm(self, exception: BaseException | None) -> None:
        """Let nothing interrupt this thread any more; its actor, if it ran, raised `exception`.

        Dramatiq itself disarms later, so that a time limit could strike while a retry is published.
        """
        thread = threading.get_ident()
        struck = False
        for limit in self._limits:
            manager = compat.limit_manager_of(limit)
            deadlines = getattr(manager, compat.deadlines.name, None)
            # A limit that has struck and not arrived yet has no deadline. gevent's arrives as it strikes.
            struck = struck or (deadlines is not None and deadlines.get(thread, 0) is None)
            compat.remove_timeout_of(manager)(thread)
        for shutdown in self._shutdowns:
            compat.remove_notification_of(compat.shutdown_manager_of(shutdown))()
        if struck and not came_of_interrupt(exception):
            _let_arrive()

    def wait_to_begin(self, error: Exception) -> bool:
        """Wait before a delivery is tried again; False if this thread's worker shuts down."""
        self.disarm(None)
        return self.outage.wait(error, self.stops)

    def begins(self, broker: Broker, message: MessageProxy) -> None:
        """Arm the interrupts of this thread as if its message had come just now: a job had to wait."""
        self.outage.over()
        for middleware in (*self._limits, *self._shutdowns):
            middleware.before_process_message(broker, message)

    def wait_to_end(self, error: BaseException) -> bool:
        """Wait before a decision is tried again; False if this thread's worker shuts down."""
        return self.outage.wait(error, self.stops)

    def await_answer(self, engine: Engine, run: Any, error: Exception) -> None:
        """Wait until the store says whether a run counts; raises TakenOver if not, or if it stops here."""
        self.disarm(None)
        while self.wait_to_end(error):
            try:
                engine.settling.check(run)
            except StoreError as again:
                error = again
            else:
                self.outage.over()
                return
        engine.reservations.expire(run)
        raise Unanswered(run.job) from None


def came_of_interrupt(exception: BaseException | None) -> bool:
    """Return whether an exception is an interrupt or was raised because of one."""
    for _ in range(20):
        if exception is None or isinstance(exception, Interrupt):
            return exception is not None
        cause = exception.__cause__
        exception = exception.__context__ if cause is None else cause
    return False


def _let_arrive() -> None:
    try:
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.005)
    except Interrupt:
        return


def orphanhood() -> Callable[[], bool]:
    """Return what tells whether the main process of Dramatiq's command line has died since.

    From Python 3.14 on a fork server is this process's parent, and outlives the main process. A forked
    process may not learn of the death by its pipe, because its younger siblings hold that open.
    """
    main = multiprocessing.parent_process()
    parent = os.getppid()
    return lambda: main is not None and (os.getppid() != parent or not main.is_alive())


class Stops:
    """Hears the signals of a worker process in the place of Dramatiq's handlers, and calls them.

    A second stop, some seconds after the first, ends the process at once: what runs is given back before.
    """

    def __init__(self, reservations: Reservations) -> None:
        self._reservations = reservations
        self._told = -ECHO_SECONDS
        #: Whether the process ends at once, and whether what it ran was given back.
        self._ends = self._is_given_back = False

    def hear(self) -> None:
        """Begin; what this process does at a signal without a handler of Dramatiq's stays as it is."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, partial(self._stop, handler))
        if signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
            signal.signal(signal.SIGQUIT, self._quit)
        if heart := self._reservations.heart:
            is_orphan = orphanhood()
            # An orphan ends because its main process was killed. If it is killed, too, that is no stop.
            heart.note_stop(lambda: self._told > 0 and not is_orphan())

    def _stop(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._is_given_back:
            handler(number, frame)
        elif now - self._told > ECHO_SECONDS:
            self._told = now
            try:
                handler(number, frame)
            except SystemExit:
                self._end(number)

    def _quit(self, number: int, _: FrameType | None) -> None:
        if self._is_given_back:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        """Give back what runs, in a thread: this one may hold a lock that the store needs."""
        if not self._ends:
            self._ends = True
            for end in (partial(self._give_back, number), partial(self._wait, number)):
                threading.Thread(target=end, name="ojs-stops", daemon=True).start()

    def _give_back(self, number: int) -> None:
        self._reservations.give_back()
        self._go_on(number)

    def _wait(self, number: int) -> None:
        time.sleep(GIVE_BACK_SECONDS)
        self._go_on(number)

    def _go_on(self, number: int) -> None:
        """Send the signal once more, for the main thread, to the handler that ends the process."""
        if not self._is_given_back:
            self._is_given_back = True
            os.kill(os.getpid(), number)


let_through(lambda error: isinstance(error, Interrupt))
