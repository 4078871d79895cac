"""Successes that are settled behind their jobs, which do not wait for it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from ..errors import StoreError
from ..rules.job import Job
from ..store import Reservation, Settle
from .threads import keep_going, starting

logger = logging.getLogger("ojs_bridge")

#: Within how many seconds a success is settled.
WITHIN = 0.02
#: How many successes may wait. While there are more, a job waits for its own, as it does for all else.
MOST = 1000
#: After how many seconds a store that is away is asked again.
_AGAIN = 0.5


class Behind:
    """Settles successes within 20 ms, on a thread of this process: all those of that time in one step.

    `write` settles reservations, and returns those that were lost; raises StoreError. `lost` is told of a job
    whose reservation was taken over.
    """

    def __init__(
        self, write: Callable[[Sequence[Settle]], Sequence[Reservation]], lost: Callable[[Job], None]
    ) -> None:
        self._write, self._lost = write, lost
        self._pid = 0
        self._wake = threading.Event()
        #: The successes that wait, by the keys of their jobs.
        self.waiting: dict[str, tuple[Settle, Job]] = {}

    def settle(self, job: Job, settle: Settle) -> bool:
        """Settle a success soon; False if too many wait, or no thread can start."""
        if not self.start() or len(self.waiting) >= MOST:
            return False
        self.waiting[job.key] = settle, job
        self._wake.set()
        return True

    def flush(self, seconds: float) -> None:
        """Wait until the successes of this process are settled, for so many seconds at most."""
        ends = time.monotonic() + seconds
        while self._pid == os.getpid() and self.waiting and time.monotonic() < ends:
            time.sleep(WITHIN / 10)

    def start(self) -> bool:
        """Start the thread of this process, once; return whether it is there."""
        if self._pid == os.getpid():
            return True
        with starting.lock:
            if self._pid != os.getpid():
                # A fork has those of its parent, too, which the parent settles.
                self.waiting, self._wake = {}, threading.Event()
                try:
                    keep_going("ojs-settling", self._round)
                except RuntimeError:
                    return False
                self._pid = os.getpid()
        return True

    def _round(self) -> bool:
        self._wake.wait()
        self._wake.clear()
        time.sleep(WITHIN)
        try:
            self._settle_all()
        except BaseException as error:
            # Whatever it is: a success that is not settled is a lost attempt to a late copy.
            self._wake.set()
            if not isinstance(error, StoreError):
                raise
            time.sleep(_AGAIN)
        return True

    def _settle_all(self) -> None:
        if not (jobs := dict(self.waiting)):
            return
        lost = frozenset(self._write([settle for settle, _ in jobs.values()]))
        for key, entry in jobs.items():
            # The same job may have succeeded once more meanwhile.
            if self.waiting.get(key) is entry:
                del self.waiting[key]
            if entry[0].reservation in lost:
                self._lost(entry[1])
