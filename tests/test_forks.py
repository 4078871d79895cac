"""Children that are forked while a thread of their parent's is busy."""

from __future__ import annotations

import io
import logging
import os
import signal
import threading

from ojs_bridge import Bridge
from tests.servers import eventually

logger = logging.getLogger("ojs_bridge")


class Slow(io.StringIO):
    """A stream with a lock, as a process's own have, that takes a while for its first line."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.entered = threading.Event()

    def write(self, text: str) -> int:
        """Write a line."""
        with self.lock:
            if not self.entered.is_set():
                self.entered.set()
                threading.Event().wait(0.5)
            return super().write(text)


def test_a_child_that_is_forked_while_a_thread_logs_can_log() -> None:
    """It would wait for ever for a lock that only its parent's thread can release."""
    Bridge()
    stream = Slow()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        thread = threading.Thread(target=logger.error, args=("a listener failed",))
        thread.start()
        assert stream.entered.wait(30)
        child = os.fork()
        if not child:
            logger.error("a job died")
            os._exit(7)
        ended: list[int] = []
        try:
            eventually(
                lambda: ended.extend(os.waitpid(child, os.WNOHANG)) or ended[-2], what="the child's end"
            )
        except TimeoutError:
            os.kill(child, signal.SIGKILL)
            raise
        assert os.waitstatus_to_exitcode(ended[-1]) == 7
        thread.join()
        assert stream.getvalue() == "a listener failed\n"
    finally:
        logger.removeHandler(handler)
