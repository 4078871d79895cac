"""The watch over a worker: threads that die are begun again, and an orphaned process ends."""

from __future__ import annotations

import logging
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ..engine.threads import keep_going
from .compat import (
    consumer_threads,
    of_consumer_thread,
    of_worker_thread,
    taken_in,
    worker_threads,
    worker_timeout,
)
from .delivery import Exit, delivery_of
from .keeping import GIVE_BACK_SECONDS, orphanhood

logger = logging.getLogger("ojs_bridge")

#: How often the watch looks at the threads, in seconds.
LOOK_SECONDS = 1.0
#: For how long threads may die again and again before the process ends, in seconds.
GIVE_UP_SECONDS = 60.0
#: For how long they must live to count as well again, in seconds.
STEADY_SECONDS = 30.0
#: How long an orphaned process, whose main process has died, may take to end its jobs, in seconds.
ORPHAN_SECONDS = 10.0
#: The exit status of an orphaned process: a temporary failure.
STATUS = os.EX_TEMPFAIL


class Watch:
    """Watches over the threads of one worker, from its boot to its shutdown."""

    def __init__(self, worker: Any, left: list[Any], give_back: Callable[[], object]) -> None:
        self._worker = worker
        #: The messages that threads have left unsettled, since an error came between.
        self._left = left
        #: The threads that rested at the last look, though their last messages were not settled.
        self._resting: dict[Any, Any] = {}
        self._stopped = threading.Event()
        self._give_back, self._is_orphan = give_back, orphanhood()
        self._first_death = self._last_death = -STEADY_SECONDS
        #: What the last look found not started: Dramatiq puts a thread in its place before it starts it.
        self._unstarted: set[threading.Thread] = set()
        #: Whether the process was asked to end, because threads died again and again.
        self.gave_up = False
        self._thread = keep_going("ojs-watch", self._round)

    def stop(self) -> None:
        """Begin no more threads."""
        self._stopped.set()
        self._thread.join(5)

    def _round(self) -> bool:
        if self._stopped.wait(LOOK_SECONDS):
            return False
        if self._is_orphan():
            _end(self._give_back)
            return False
        self._look()
        before, self._resting = self._resting, dict(filter(None, map(_resting, worker_threads(self._worker))))
        self._left += [message for thread, message in self._resting.items() if before.get(thread) is message]
        while self._left:
            _end_message(self._left.pop(), consumer_threads(self._worker))
        return True

    def _look(self) -> None:
        unstarted: set[threading.Thread] = set()
        consumers, workers = consumer_threads(self._worker), worker_threads(self._worker)
        for threads, places in ((consumers, tuple(consumers)), (workers, range(len(workers)))):
            for place in places:
                thread = threads[place]
                if thread.ident is None and thread not in self._unstarted:
                    unstarted.add(thread)
                elif not thread.is_alive():
                    self._begin_again(threads, place, thread)
        self._unstarted = unstarted

    def _begin_again(self, threads: Any, place: Any, old: Any) -> None:
        """Put a new thread in the place of a dead one; if none can be started, the next look tries again."""
        queue = getattr(old, "queue_name", None)
        what = f"the consumer thread of queue {queue!r}" if queue else old.name
        logger.error("%s has died, and is begun again; a job that it had goes back to its queue", what)
        self._note_death()
        try:
            if queue:
                # The messages that it held go back to their queue.
                old.close()
            threads[place] = new = _like(old, is_consumer=bool(queue))
            new.start()
        except Exception as error:  # noqa: BLE001 - for want of memory or of threads, which may be over later
            threads[place] = old
            logger.error("%s could not be begun again: %r", what, error)
        if not queue:
            _end_message_of(old)

    def _note_death(self) -> None:
        now = time.monotonic()
        if now - self._last_death > STEADY_SECONDS:
            self._first_death = now
        self._last_death = now
        if now - self._first_death > GIVE_UP_SECONDS and not self.gave_up:
            self.gave_up = True
            logger.critical("the threads of this worker die again and again: the process ends")
            os.kill(os.getpid(), signal.SIGTERM)


def remember(thread: Any) -> None:
    """Let a dead thread tell which message it had: a thread that runs actors calls this as it begins."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_locals.get("self") is not thread:
        frame = frame.f_back
    thread.ojs_frame = frame


def _resting(thread: Any) -> tuple[Any, Any] | None:
    """Return a thread that is not at work on its last message, and that message, unless it is settled."""
    frame = getattr(thread, "ojs_frame", None)
    message = frame and taken_in(frame)
    if message is None or delivery_of(message).is_settled:
        return None
    # A greenlet is not among them.
    inner = sys._current_frames().get(thread.ident)
    while inner not in (None, frame) and inner.f_code.co_name != thread.process_message.__name__:
        inner = inner.f_back
    return (thread, message) if inner is frame else None


def _end_message_of(thread: Any) -> None:
    """Have the message of a dead thread leave as it is marked; it goes back if nothing is marked."""
    frame, thread.ojs_frame = getattr(thread, "ojs_frame", None), None
    message = frame and taken_in(frame)
    if message is not None and _end_message(message, of_worker_thread["consumers"](thread)):
        of_worker_thread["work_queue"](thread).task_done()


def _end_message(message: Any, consumers: Any) -> bool:
    """Settle a message as it is marked; False if it is settled already."""
    delivery = delivery_of(message)
    if delivery.is_settled:
        return False
    if delivery.exit is Exit.NATIVE and delivery.task is None:
        delivery.settle(Exit.GIVE_BACK)
    # Once: it may have left its broker just before it could be noted.
    delivery.is_settled = True
    consumers[message.queue_name].post_process_message(message)
    return True


def _empty_log() -> None:
    """Read the pipe that Dramatiq logs to, as the main process did; never raises.

    When it is full, each thread that logs waits for ever: a run that has failed would not be judged, and
    would be taken for one that goes on. Where a pipe cannot be opened like that, this does nothing.
    """
    with suppress(Exception):
        log = os.open(f"/proc/self/fd/{sys.stderr.fileno()}", os.O_RDONLY | os.O_NONBLOCK)
        # The error stream itself may be a pipe, too, which the fleet's supervisor reads.
        while stat.S_ISFIFO(os.fstat(log).st_mode) and not os.path.sameopenfile(log, 2):
            try:
                os.read(log, 1 << 16)
            except BlockingIOError:
                # A greenlet must not wait for a pipe.
                time.sleep(0.05)


def _end(give_back: Callable[[], object]) -> None:
    """End an orphan in good order, or give back what it runs, and end it."""
    with suppress(RuntimeError):
        threading.Thread(target=_empty_log, name="ojs-log", daemon=True).start()
    # Nobody reads the log of an orphan: this line goes to the error stream itself.
    with suppress(OSError):
        os.write(2, b"ojs-bridge: the main process of this Dramatiq worker has died, and the worker ends\n")

    def leave() -> None:
        give_back()
        os._exit(STATUS)

    at_last = partial(os._exit, STATUS)
    for late in (
        threading.Timer(ORPHAN_SECONDS, leave),
        threading.Timer(ORPHAN_SECONDS + GIVE_BACK_SECONDS, at_last),
    ):
        late.daemon = True
        try:
            late.start()
        except RuntimeError:
            os._exit(STATUS)
    os.kill(os.getpid(), signal.SIGTERM)


def _like(old: Any, *, is_consumer: bool) -> threading.Thread:
    settings = {k: of(old) for k, of in (of_consumer_thread if is_consumer else of_worker_thread).items()}
    paused = settings.pop("paused")
    if is_consumer:
        settings.update(queue_name=old.queue_name, worker_timeout=worker_timeout(old))
    else:
        settings["worker_timeout"] = round(settings.pop("timeout") * 1000)
    new: threading.Thread = type(old)(broker=old.broker, **settings)
    of_worker_thread["paused"].set(new, paused)
    return new
