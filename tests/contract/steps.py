"""Jobs whose arguments say in Python what each of their runs does."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ojs_bridge import DeadLetter, Discard, Fail, Retry, Snooze
from tests.contract.notes import until

KEEP = {"on_exhaustion": "dead_letter"}


class CardStolen(Exception):
    pass


class CardFraud(Exception):
    pass


class AuthExpired(Exception):
    pass


class Opaque:
    """A value that no encoder knows."""

    def __repr__(self) -> str:
        return "<opaque>"


#: The error map of a task.
ERRORS: dict[type[BaseException], Any] = {
    CardStolen: "payment.card_stolen",
    CardFraud: ("payment.fraud", "DEAD_LETTER"),
}


def perform(text: str, names: Mapping[str, Any]) -> Any:
    """Do one step: raise the exception that the text evaluates to, or return the value."""
    value = eval(text, dict(names))
    if isinstance(value, BaseException):
        raise value
    return value


def step(n: int, steps: tuple[str, ...], **names: Any) -> Any:
    """Do the step of the nth run; the last one repeats."""
    return perform(steps[min(n, len(steps)) - 1], {**globals(), "n": n, **names})


def sigkill() -> None:
    """Die."""
    time.sleep(0.1)  # a child that dies within its first milliseconds is run again by Celery itself
    os.kill(os.getpid(), signal.SIGKILL)


def os_exit() -> None:
    """Die by the job's own will."""
    time.sleep(0.1)
    os._exit(3)


def nap(seconds: float) -> None:
    """Sleep so lightly that an exception from another thread is heard at once."""
    for _ in range(round(seconds * 100)):
        time.sleep(0.01)


__all__ = ["DeadLetter", "Discard", "Fail", "Retry", "Snooze", "until"]


def use_up_descriptors(seconds: float) -> None:
    """Open files until this process can open nothing more; close them after so many seconds."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))

    def let_go() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in held:
            os.close(each)

    threading.Timer(seconds, let_go).start()
    with suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
